"""training.png: what a run's loss did, and how well the model ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tools.recommender.metrics import roc_curve
from tools.recommender.report import PLOT, write_whole


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
    return write_whole(folder / PLOT, lambda path: figure.savefig(path, dpi=120, format="png"))
