"""What a training run shows and leaves behind: lines, a bar, a table and metrics.json."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tools.common.command import wrong_value

METRICS, PLOT = "metrics.json", "training.png"


def say(console: Console, line: str) -> None:
    """Prints a line as it is: names in it are neither markup nor emoji, and are not broken."""
    console.print(Text(line), soft_wrap=True)


def progress_bar(console: Console) -> Progress:
    """A bar whose task has the fields loss, rate (tokens per second) and skipped (steps)."""
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TextColumn("skipped {task.fields[skipped]}"),
        TimeRemainingColumn(),
        console=console,
    )


def summary_table(metrics: Mapping[str, Any]) -> Table:
    """The figures that end a run."""
    table = Table(show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    gain = metrics["test_auc"] - metrics["baseline_auc"]
    for name, value in (
        ("test AUC, model", f"{metrics['test_auc']:.4f}"),
        ("test AUC, user and item biases", f"{metrics['baseline_auc']:.4f}"),
        ("gain", f"{gain:+.4f}"),
        ("training loss", f"{metrics['train_loss']:.4f}"),
        ("tokens per second", f"{metrics['tokens_per_second']:,.0f}"),
        ("dropped tokens", f"{metrics['dropped_tokens']:,}"),
        ("skipped steps", f"{metrics['skipped_steps']:,}"),
    ):
        table.add_row(name, value)
    return table


def check_folder(folder: Path) -> None:
    """Raises UserError where a folder has the name of a file that a run writes."""
    for name in (METRICS, PLOT):
        if (folder / name).is_dir():
            raise wrong_value("out", folder, f"{name} in it is a folder: remove it")


def write_metrics(folder: Path, metrics: Mapping[str, Any]) -> Path:
    """Writes metrics.json; an earlier one is replaced when the new one is complete."""
    text = json.dumps(metrics, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return write_whole(folder / METRICS, lambda path: path.write_text(text))


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Writes a file beside its place and moves it there, so that no half-written one is seen."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
