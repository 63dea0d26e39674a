"""Batches of a training part, in an order that the seed alone decides."""

from collections.abc import Iterator, Sequence

import numpy as np

from tools.recommender.click_model import ClickInputs
from tools.recommender.clicks import PADDING, ClickData


def training_batches(
    data: ClickData,
    *,
    batch_size: int,
    steps: int,
    seed: int,
    hide_users: float,
    penalties: Sequence[float],
) -> Iterator[ClickInputs]:
    """Yields `steps` batches, going over the training part anew as often as it takes.

    Each pass has its own order, and leaves out the last examples that fill no batch.

    Args:
      data: of which the training part is used.
      batch_size: examples per batch; at most those of the training part.
      steps: how many batches.
      seed: of order and hiding.
      hide_users: share of the examples whose user becomes PADDING, so that the model learns to do
        without (Volkovs, Yu and Poutanen, 2017): most users of the test part are new.
      penalties: of each feature's rows; see `row_penalties`.
    """
    weights = row_penalties(data, penalties)
    rng = np.random.default_rng(seed)
    order, position = np.zeros(0, np.int64), 0
    for step in range(steps):
        if position + batch_size > len(order):
            order, position = rng.permutation(data.train_size), 0
        chosen = order[position : position + batch_size]
        position += batch_size
        token_ids = data.token_ids[chosen]
        user_slots = data.features[0].slots
        hidden = rng.random(batch_size) < hide_users
        token_ids[hidden, :user_slots] = PADDING
        yield ClickInputs(
            token_ids, data.grades[chosen], weights[token_ids], np.asarray(step, np.int32)
        )


def row_penalties(data: ClickData, penalties: Sequence[float]) -> np.ndarray:
    """Weights for a token's row wherever it occurs, (vocab + 1,) float32; PADDING's is 0.

    Over one pass they add up to the feature's penalty, however often a token occurs: that of a
    row that is normal around zero with variance 1 / penalty. So a rare token is held back more.

    Args:
      data: of which the training part is counted.
      penalties: one per feature.
    """
    tokens = data.token_ids[: data.train_size]
    counts = np.bincount(tokens[tokens != PADDING], minlength=data.vocab)
    weights = np.zeros(data.vocab + 1, np.float32)
    for feature, penalty in zip(data.features, penalties, strict=True):
        rows = slice(feature.offset, feature.offset + feature.size)
        weights[rows] = penalty / np.maximum(counts[rows], 1)
    return weights


def padded_parts(token_ids: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Cuts (examples, slots) into (batch_size, slots); PADDING fills the last one up."""
    for start in range(0, len(token_ids), batch_size):
        part = token_ids[start : start + batch_size]
        missing = ((0, batch_size - len(part)), (0, 0))
        yield np.pad(part, missing, constant_values=PADDING)
