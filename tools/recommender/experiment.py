"""One run from data to report: what `tools.train` does once its flags are read."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tools.common.command import UserError, wrong_value
from tools.common.devices import check_memory
from tools.recommender import plot, report
from tools.recommender.baseline import BiasModel, fit_baseline
from tools.recommender.clicks import ClickData
from tools.recommender.config import Experiment, TrainConfig
from tools.recommender.folds import VALIDATION_FOLDS, choose_fold, usable_folds
from tools.recommender.metrics import auc
from tools.recommender.movielens import load_movielens
from tools.recommender.ratings_csv import read_ratings_csv
from tools.recommender.report import say
from tools.recommender.synthetic import synthetic_clicks
from tools.recommender.training import (
    StepReport,
    TrainedModel,
    Trainer,
    make_trainer,
    predict,
    train,
)


def run(experiment: Experiment, console: Console) -> dict[str, Any]:
    """Trains, prints the figures, writes the files, and returns what is in metrics.json.

    All that can be known before training is checked before it.

    Raises:
      UserError: the data cannot be had or used, data and settings do not go together, or training
        diverged.
      OSError: a file cannot be written.
    """
    report.check_folder(experiment.out)
    data = choose_fold(load_data(experiment), experiment.fold)
    folds = usable_folds(data)
    check_memory(
        data.vocab * experiment.train.emb_width * np.dtype(np.float32).itemsize,
        f"{data.vocab:,} rows of --emb_width={experiment.train.emb_width}",
    )
    trainer = make_trainer(data, experiment.train)
    describe(console, data, trainer, folds)
    with console.status("fitting the baseline"):
        baseline = fit_baseline(data, folds)
    trained, steps = train_with_bar(console, trainer, data, experiment.train)
    scores = score_test_part(trained, baseline, data)
    labels = data.labels[data.train_size :]
    metrics = {
        "data": data.name,
        "fold": experiment.fold,
        "examples": len(data.labels),
        "click_rating": data.click_rating,
        "click_share": data.click_share,
        "vocab": data.vocab,
        "tokens": len(steps) * trained.handle.tokens_per_batch,
        "train_loss": final_loss(steps),
        "test_auc": auc(labels, scores["model"]),
        "baseline_auc": auc(labels, scores["biases"]),
        "baseline_folds": len(folds),
        "tokens_per_second": steps[-1].tokens_per_second,
        "dropped_tokens": steps[-1].dropped,
        "skipped_steps": steps[-1].skipped,
        "devices": math.prod(experiment.train.mesh),
        "platform": jax.default_backend(),
        **dataclasses.asdict(experiment.train),
    }
    say(console, f"{data.name} on {metrics['devices']} devices:")
    console.print(report.summary_table(metrics))
    picture = plot.write_plot(experiment.out, [step.loss for step in steps], labels, scores)
    say(console, f"wrote {report.write_metrics(experiment.out, metrics)} and {picture}")
    return metrics


def load_data(experiment: Experiment) -> ClickData:
    """The data that the experiment names."""
    if experiment.data == "movielens":
        return load_movielens(experiment.cache, experiment.click_rating)
    if experiment.data == "synthetic":
        if experiment.click_rating is not None:
            raise wrong_value(
                "click_rating",
                f"{experiment.click_rating:g}",
                "--data=synthetic has clicks and no ratings: leave one of them out",
            )
        return synthetic_clicks(experiment.synthetic)
    if not experiment.data.lower().endswith(".csv"):
        raise wrong_value(
            "data", experiment.data, "wanted movielens, synthetic or a file named *.csv"
        )
    return read_ratings_csv(Path(experiment.data), experiment.click_rating)


def describe(console: Console, data: ClickData, trainer: Trainer, folds: list[ClickData]) -> None:
    """Says what is about to be trained on what, and what counts as a click."""
    test = len(data.labels) - data.train_size
    say(console, f"{data.name}: {data.train_size:,} examples to train on, {test:,} to test")
    share = f"{data.click_share:.1%} of the examples are clicks"
    if data.click_rating is None:
        say(console, share)
    else:
        rating = f"a click is a rating of at least {data.click_rating:g}"
        say(console, f"{rating} (--click_rating changes that): {share}")
    say(console, f"table: {data.vocab:,} rows; {trainer.handle.describe()}")
    if len(folds) < VALIDATION_FOLDS:
        penalties = "those choose its penalties" if folds else "its penalties are fixed"
        say(
            console,
            f"baseline: only {len(folds)} of {VALIDATION_FOLDS} validation folds have both clicks "
            f"and non-clicks; {penalties}",
        )


def train_with_bar(
    console: Console, trainer: Trainer, data: ClickData, config: TrainConfig
) -> tuple[TrainedModel, list[StepReport]]:
    """Trains with a progress bar; also returns what was told of each step."""
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

        return train(trainer, data, config, show), steps


def score_test_part(
    trained: TrainedModel, baseline: BiasModel, data: ClickData
) -> dict[str, np.ndarray]:
    """The log-odds of a click in the test part, by the model and by the baseline."""
    token_ids = data.token_ids[data.train_size :]
    model = predict(trained, token_ids)
    if not np.all(np.isfinite(model)):
        raise UserError(
            "the model's scores are not finite: lower --learning_rate or --dense_learning_rate"
        )
    return {"model": model, "biases": baseline.scores(token_ids)}


def final_loss(steps: list[StepReport]) -> float:
    """The mean loss of the last tenth of the steps, those not finite left out."""
    losses = [step.loss for step in steps[-math.ceil(len(steps) / 10) :] if np.isfinite(step.loss)]
    if not losses:
        raise UserError(
            "no loss of the last steps is finite: lower --learning_rate or --dense_learning_rate"
        )
    return float(np.mean(losses))
