"""What a feature is: ids of a table, one per example or several, alone, in sequence or in a bag."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from xrex.layout.layout import is_positive_integer

Combiner = Literal["sum", "mean", "sqrtn"]


@dataclass(frozen=True)
class Feature:
    """Ids of a table.

    Without `max_ids` an example has one id, and gets its row: (batch, width). With `max_ids` it has
    up to so many: without a combiner they are a sequence, and it gets their rows and zeros behind
    them, (batch, max_ids, width); with one they are a bag, and it gets their sum, (batch, width):

    * "sum": each row times its weight;
    * "mean": that, over the number of ids, or over the sum of their weights;
    * "sqrtn": that, over the root of the number of ids, or of the sum of their weights' squares.

    A bag without ids is zeros, and so is one whose divisor is zero. An id outside the table counts
    as one, and its row is zeros. Weights get no gradient.

    Attributes:
      table: the table's name.
      max_ids: how many ids an example may have; None for one each.
      combiner: of a bag.
      padding_id: the id that means "no id"; it counts as none.

    Raises:
      ValueError: a field is out of its range, or a combiner has no `max_ids`.
    """

    table: str
    max_ids: int | None = None
    combiner: Combiner | None = None
    padding_id: int | None = -1

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not isinstance(self.table, str):
            raise ValueError(f"table={self.table!r} must be the name of a table")
        if self.max_ids is not None and not is_positive_integer(self.max_ids):
            raise ValueError(f"max_ids={self.max_ids!r} must be a positive integer or None")
        if self.combiner is not None and self.combiner not in get_args(Combiner):
            raise ValueError(
                f"combiner={self.combiner!r} must be one of {get_args(Combiner)} or None"
            )
        if self.combiner is not None and self.max_ids is None:
            raise ValueError(
                f"combiner={self.combiner!r} needs max_ids: how many ids an example may have"
            )
        is_integer = isinstance(self.padding_id, int | np.integer)
        if self.padding_id is not None and (not is_integer or isinstance(self.padding_id, bool)):
            raise ValueError(f"padding_id={self.padding_id!r} must be an integer or None")

    @property
    def is_bag(self) -> bool:
        """Whether the rows of an example are pooled."""
        return self.combiner is not None

    @property
    def rows_per_example(self) -> int:
        """How many rows an example gets."""
        return 1 if self.is_bag or self.max_ids is None else int(self.max_ids)

    def row_shape(self, width: int) -> tuple[int, ...]:
        """What an example gets: a row, or those of a sequence."""
        is_sequence = self.max_ids is not None and not self.is_bag
        return (self.rows_per_example, width) if is_sequence else (width,)


class Ragged(NamedTuple):
    """Any number of ids for each example, one example after the other.

    For example, [[5, 2], [], [7]] is `Ragged([5, 2, 7], lengths=[2, 0, 1])`, or
    `Ragged([5, 2, 7], row_splits=[0, 2, 2, 3])`.

    Attributes:
      ids: shape=(n,), integers
      lengths: ids of each example.  # shape=(batch,), integers
      weights: of each id, in a bag; None means 1.  # shape=(n,), floating point
      row_splits: in place of `lengths`: where each example begins, and n.
        # shape=(batch + 1,), integers
    """

    ids: Any
    lengths: Any = None
    weights: Any = None
    row_splits: Any = None
