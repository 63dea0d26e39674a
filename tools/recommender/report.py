"""What a training run shows and leaves behind: a bar, a table, metrics.json and training.png."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


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
    title = f"{metrics['data']} on {metrics['devices']} devices"
    table = Table(title=title, show_header=False, min_width=len(title) + 4)
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


def write_metrics(folder: Path, metrics: Mapping[str, Any]) -> Path:
    """Writes metrics.json; an earlier one is replaced when the new one is complete."""
    text = json.dumps(metrics, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return write_whole(folder / "metrics.json", lambda path: path.write_text(text))


def write_plot(
    folder: Path,
    losses: Sequence[float],
    labels: np.ndarray,
    scores: Mapping[str, np.ndarray],
) -> Path:
    """Writes training.png: the loss of every step, and the ROC curve of each named scoring."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, len(losses) + 1)
    left.plot(steps, losses, linewidth=0.6, alpha=0.5, label="each step")
    window = max(1, len(losses) // 20)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    left.plot(steps[window - 1 :], smooth, label=f"mean of {window}")
    left.set(xlabel="step", ylabel="training loss")
    left.legend()
    for name, values in scores.items():
        right.plot(*roc_curve(labels, values), label=name)
    right.plot([0, 1], [0, 1], linestyle=":", color="grey")
    right.set(xlabel="false positive rate", ylabel="true positive rate", title="test part")
    right.legend()
    return write_whole(
        folder / "training.png", lambda path: figure.savefig(path, dpi=120, format="png")
    )


def roc_curve(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every threshold from high to low."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(labels[order] > 0.5)
    # Tied scores are passed at once.
    last = np.append(np.diff(scores[order]) != 0, True)
    hits, passed = hits[last], (np.arange(len(labels)) + 1)[last]
    misses = passed - hits
    return np.append(0, misses / misses[-1]), np.append(0, hits / hits[-1])


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Writes a file beside its place and moves it there, so that no half-written one is seen."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
