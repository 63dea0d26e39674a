"""The area under the ROC curve, and that curve."""

import numpy as np
from scipy.stats import rankdata  # type: ignore[import-untyped]


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a random click outscores a random non-click; a tie counts one half. Exact.

    For example, labels [0, 1, 1] and scores [.2, .2, .7] give 0.75.

    Args:
      labels: (examples,) 1 or 0.
      scores: (examples,) finite numbers; only their order matters.

    Raises:
      ValueError: shapes that differ, a score that is not finite, or labels of one kind only.
    """
    labels, scores = np.asarray(labels) > 0.5, np.asarray(scores)
    if labels.shape != scores.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be (examples,)")
    if not np.all(np.isfinite(scores)):
        raise ValueError(f"{np.sum(~np.isfinite(scores))} of {len(scores)} scores are not finite")
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        raise ValueError(f"the AUC needs labels of both kinds: {positives} ones of {len(labels)}")
    # Mann and Whitney's U, from ranks that ties share.
    rank_sum = rankdata(scores)[labels].sum()
    return float((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))


def roc_curve(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every threshold from high to low."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(labels[order] > 0.5)
    # Tied scores are passed at once.
    last = np.append(np.diff(scores[order]) != 0, True)
    hits, passed = hits[last], (np.arange(len(labels)) + 1)[last]
    misses = passed - hits
    return np.append(0, misses / misses[-1]), np.append(0, hits / hits[-1])
