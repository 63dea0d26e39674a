"""One table and one vector of ids, as the training step sees them: nothing is packed or split."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xrex import placement
from xrex.checks import check_table
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.table_set import TableStack
from xrex.tokens import check_token_ids


@dataclass(frozen=True)
class SingleTable:
    """A `TableSet` of one table; its ids and rows are the batch's.

    Attributes:
      stacks: the table.
    """

    stacks: TableStack

    @property
    def handle(self) -> AsyncEmbContextHandle:
        """The table's layout."""
        return self.stacks.handle

    @property
    def batch_size(self) -> int:
        """Tokens of a batch."""
        return self.handle.tokens_per_batch

    def make_tables(self, given: Any) -> Any:
        """The table, checked; not the caller's NumPy memory.

        Raises:
          ValueError: its shape is not (vocab, emb_width).
          TypeError: it is neither bfloat16 nor float32.
        """
        table: Any = given if isinstance(given, jax.Array) else np.asarray(given)
        check_table(table, self.handle.emb_width)
        if table.shape[0] != self.stacks.vocab:
            raise ValueError(
                f"async_emb table has {table.shape[0]} rows, and the pipeline has "
                f"vocab={self.stacks.vocab}"
            )
        return placement.unless_numpys(table)

    def place(self, ids: Any) -> Any:
        """The ids, checked and copied to the mesh."""
        return check_token_ids(self.handle, ids, self.stacks.vocab)

    def place_part(self, ids: Any) -> tuple[Any, int]:
        """As `place`, of fewer ids: row 0 is read for those that are missing."""
        if np.ndim(ids) != 1 or not 0 < len(ids) <= self.batch_size:
            raise ValueError(
                f"async_emb token_ids has shape {np.shape(ids)}, and must have (n,) with n from 1 "
                f"to {self.batch_size}"
            )
        num_tokens = len(ids)
        if num_tokens < self.batch_size:
            ids = np.pad(np.asarray(ids), (0, self.batch_size - num_tokens))
        return self.place(ids), num_tokens

    def by_stack(self, placed: Any) -> Any:
        """The ids."""
        return placed

    def counts(self, placed: Any) -> dict[str, Any]:
        """Nothing is counted on the host: `metrics.update.dropped` has it."""
        del placed
        return {}

    def split(self, rows: Any) -> Any:
        """The rows."""
        return rows

    def join(self, embedded: Any) -> Any:
        """The rows."""
        return embedded
