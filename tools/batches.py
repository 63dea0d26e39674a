"""Batches of a training part, in an order that the seed alone decides."""

from collections.abc import Iterator

import numpy as np

from tools.click_model import ClickInputs
from tools.clicks import PADDING, ClickData


def training_batches(
    data: ClickData, *, batch: int, steps: int, seed: int, hide_users: float
) -> Iterator[ClickInputs]:
    """Yields `steps` batches, going over the training part anew as often as it takes.

    Each pass has its own order, and leaves out the last examples that fill no batch.

    Args:
      data: of which the training part is used.
      batch: examples a batch; at most the training part's.
      steps: how many batches.
      seed: of order and hiding.
      hide_users: share of the examples whose user becomes PADDING, so that the model learns to do
        without (Volkovs, Yu and Poutanen, 2017): most users of the test part are new.
    """
    rng = np.random.default_rng(seed)
    order, position = np.zeros(0, np.int64), 0
    for step in range(steps):
        if position + batch > len(order):
            order, position = rng.permutation(data.train_size), 0
        chosen = order[position : position + batch]
        position += batch
        token_ids = data.token_ids[chosen]
        user_slots = data.features[0].slots
        hidden = rng.random(batch) < hide_users
        token_ids[hidden, :user_slots] = PADDING
        yield ClickInputs(token_ids, data.grades[chosen], np.asarray(step, np.int32))


def padded_parts(token_ids: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """Cuts (examples, slots) into (batch, slots); PADDING fills the last one up."""
    for start in range(0, len(token_ids), batch):
        part = token_ids[start : start + batch]
        missing = ((0, batch - len(part)), (0, 0))
        yield np.pad(part, missing, constant_values=PADDING)
