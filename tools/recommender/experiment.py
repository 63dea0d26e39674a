"""One run from data to report: what `tools.train` does once its flags are read."""

import dataclasses
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import xrex
from tools.recommender import report
from tools.recommender.clicks import ClickData, read_ratings_csv
from tools.recommender.metrics import auc, fit_baseline, validation_folds
from tools.recommender.movielens import load_movielens
from tools.recommender.synthetic import SyntheticConfig, synthetic_clicks
from tools.recommender.training import StepReport, TrainConfig, make_trainer, predict, train

SIMULATED_DEVICES = 8
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


class UsageError(ValueError):
    """Settings that cannot be; the message says which and why."""


@dataclass(frozen=True)
class Experiment:
    """What to train on what, and where to leave the outcome.

    Attributes:
      data: "movielens", "synthetic", or the name of a CSV file.
      out: folder for metrics.json and training.png.
      cache: folder for downloads.
      fold: 0 tests on the test part; k > 0 on the k-th of `validation_folds`.
      train: how to train.
      synthetic: the stream of data="synthetic".
    """

    data: str
    out: Path
    cache: Path
    fold: int
    train: TrainConfig
    synthetic: SyntheticConfig


def run(experiment: Experiment, console: Console) -> dict[str, Any]:
    """Trains, prints the table, writes the files, and returns what is in metrics.json.

    Raises:
      UsageError: data and settings do not go together, or training diverged.
      DataError: the data cannot be had or used.
      OSError: the folder cannot be written.
    """
    out, config = experiment.out, experiment.train
    # First, so that no work is lost to a folder that cannot be written.
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out={out} cannot be written: {error.strerror}") from error
    data = load_data(experiment)
    if experiment.fold:
        data = validation_folds(data)[experiment.fold - 1]
    try:
        trainer = make_trainer(data, config)
    except (ValueError, NotImplementedError) as error:
        raise UsageError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
    describe(console, data, trainer.pipeline.config.handle)

    with console.status("fitting the baseline"):
        baseline = fit_baseline(data)
    steps: list[StepReport] = []
    with report.progress_bar(console) as bar:
        task = bar.add_task("", total=config.steps, loss=float("nan"), rate=0.0, skipped=0)

        def show(step: StepReport) -> None:
            steps.append(step)
            bar.update(
                task,
                completed=step.step,
                loss=step.loss,
                rate=step.tokens_per_second,
                skipped=step.skipped,
            )

        trained = train(trainer, data, config, show)

    labels, token_ids = data.labels[data.train_size :], data.token_ids[data.train_size :]
    scores = {"model": predict(trained, token_ids), "biases": baseline.scores(token_ids)}
    if not np.all(np.isfinite(scores["model"])):
        raise UsageError("the model's scores are not finite: lower --learning_rate")
    metrics = {
        "data": data.name,
        "fold": experiment.fold,
        "examples": len(data.labels),
        "vocab": data.vocab,
        "tokens": len(steps) * trained.handle.tokens_per_batch,
        "train_loss": final_loss(steps),
        "test_auc": auc(labels, scores["model"]),
        "baseline_auc": auc(labels, scores["biases"]),
        "tokens_per_second": steps[-1].tokens_per_second,
        "dropped_tokens": steps[-1].dropped,
        "skipped_steps": steps[-1].skipped,
        "devices": math.prod(config.mesh),
        "platform": jax.default_backend(),
        **dataclasses.asdict(config),
    }
    console.print(report.summary_table(metrics))
    plot = report.write_plot(out, [step.loss for step in steps], labels, scores)
    console.print(f"wrote {report.write_metrics(out, metrics)} and {plot}", soft_wrap=True)
    return metrics


def choose_mesh(mesh: str | None, devices: int | None) -> tuple[int, ...]:
    """The sizes of the mesh's axes. Call it before JAX looks for devices: it simulates some.

    Args:
      mesh: sizes such as "2x4"; None for one axis.
      devices: how many; None for those of the mesh, or all GPUs, or eight simulated ones.

    Raises:
      UsageError: a mesh that is none or contradicts `devices`, or too few devices.
    """
    shape: tuple[int, ...] | None = None
    if mesh is not None:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", mesh):
            raise UsageError(f"--mesh={mesh}: wanted sizes such as 8, 2x4 or 2x2x2")
        shape = tuple(map(int, mesh.split("x")))
        if devices not in (None, math.prod(shape)):
            raise UsageError(
                f"--mesh={mesh} has {math.prod(shape)} devices, and --devices is {devices}: "
                "leave one of them out"
            )
    wanted = math.prod(shape) if shape else devices
    # Counts for the CPU only: where there are GPUs, JAX takes them.
    if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
        count = f"{_DEVICE_COUNT}={wanted or SIMULATED_DEVICES}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    available = jax.device_count()
    if wanted is not None and wanted > available:
        raise UsageError(
            f"{wanted} devices were asked for, and there are {available} of platform "
            f"{jax.default_backend()} (JAX_PLATFORMS=cpu simulates any number)"
        )
    return shape or (wanted or available,)


def load_data(experiment: Experiment) -> ClickData:
    """The data that the experiment names."""
    if experiment.data == "movielens":
        return load_movielens(experiment.cache)
    if experiment.data == "synthetic":
        return synthetic_clicks(experiment.synthetic)
    if not experiment.data.endswith(".csv"):
        raise UsageError(
            f"--data={experiment.data}: wanted movielens, synthetic or a file named *.csv"
        )
    return read_ratings_csv(Path(experiment.data))


def describe(console: Console, data: ClickData, handle: xrex.AsyncEmbContextHandle) -> None:
    """Says what is about to be trained on what."""
    test = len(data.labels) - data.train_size
    console.print(f"{data.name}: {data.train_size:,} examples to train on, {test:,} to test")
    console.print(f"table: {data.vocab:,} rows; {handle.describe()}", markup=False, soft_wrap=True)


def final_loss(steps: list[StepReport]) -> float:
    """The mean loss of the last tenth of the steps, those not finite left out."""
    losses = [step.loss for step in steps[-math.ceil(len(steps) / 10) :] if np.isfinite(step.loss)]
    if not losses:
        raise UsageError("no loss of the last steps is finite: lower --learning_rate")
    return float(np.mean(losses))
