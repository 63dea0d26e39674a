"""Rows out of a stack and into it, on the devices that hold them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from xrex import placement
from xrex.layout.handle import AsyncEmbContextHandle


class TablePlace(NamedTuple):
    """Where a table lies.

    Attributes:
      name: the table's
      handle: the layout of its stack
      stack: the stack's name
      first: its first row there
      vocab: its rows
    """

    name: str
    handle: AsyncEmbContextHandle
    stack: str
    first: int
    vocab: int

    def row_numbers(self, ids: Any) -> np.ndarray:
        """The rows of the stack that ids of the table name, (n,) int32.

        Raises:
          ValueError: an id is outside the table, or they are no integers.
        """
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
            raise ValueError(
                f"table {self.name!r}: ids must be integers of shape (n,), not "
                f"{numbers.dtype}{numbers.shape}"
            )
        outside = (numbers < 0) | (numbers >= self.vocab)
        if outside.any():
            raise ValueError(
                f"table {self.name!r} has {self.vocab} rows, and id "
                f"{numbers[np.argmax(outside)]} is outside"
            )
        return numbers.astype(np.int32) + np.int32(self.first)


def check_flushed(state: Any) -> None:
    """Raises ValueError where a deferred update is not in the tables yet."""
    if state.has_pending_update:
        error = ValueError("the gradients of the last batch are not in the table yet")
        error.add_note("Call flush or finish first.")
        raise error


def check_idle(state: Any) -> None:
    """Raises ValueError for a state that holds a batch: its rows may be read already."""
    if state.current_batch is not None or state.previous_update is not None:
        error = ValueError("the state holds a batch, whose rows may be read already")
        error.add_note("Call finish first: only an idle state's table can be set.")
        raise error


def check_values(name: str, rows: np.ndarray, values: Any, width: int) -> None:
    """Raises ValueError unless there is a row of values for each of those rows, which differ."""
    if len(np.unique(rows)) != len(rows):
        raise ValueError(f"table {name!r}: an id is given twice")
    if np.shape(values) != (len(rows), width):
        raise ValueError(
            f"table {name!r}: the values have shape {np.shape(values)}, and must have "
            f"{(len(rows), width)}"
        )


@jax.jit(static_argnums=(0, 2, 3))
def slice_rows(
    handle: AsyncEmbContextHandle, stack: jax.Array, first: int, count: int
) -> jax.Array:
    """So many rows from the first on, (count, width), sharded like the stack; a copy."""
    spec = placement.table_spec(handle)
    body = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count)
    return placement.shard_map(handle, body, (spec,), spec)(stack)


@jax.jit(static_argnums=0)
def take_rows(handle: AsyncEmbContextHandle, stack: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows of these numbers, (n, width), sharded like the stack."""
    spec = placement.table_spec(handle)

    def body(stack: jax.Array, rows: jax.Array) -> jax.Array:
        return stack.at[rows].get(mode="fill", fill_value=0)

    return placement.shard_map(handle, body, (spec, placement.REPLICATED), spec)(stack, rows)


@jax.jit(static_argnums=0, donate_argnums=1)
def write_rows(
    handle: AsyncEmbContextHandle, stack: jax.Array, rows: jax.Array, values: jax.Array
) -> jax.Array:
    """The stack, in place, with other values in the rows of these numbers, which are distinct."""
    spec = placement.table_spec(handle)

    def body(stack: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        return stack.at[rows].set(values.astype(stack.dtype), mode="drop", unique_indices=True)

    write = placement.shard_map(handle, body, (spec, placement.REPLICATED, spec), spec)
    return write(stack, rows, values)
