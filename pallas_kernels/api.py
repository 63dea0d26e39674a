"""The row kernels: one function each, over the implementation that was chosen beforehand.

Arrays are one shard's: call these inside `shard_map`, or with plain arrays. `width` is the row's
width in that shard; tables are bfloat16 or float32.
"""

from typing import Literal, NamedTuple, get_args

import jax

from pallas_kernels import reference
from pallas_kernels.reference import RowFunction, round_to

__all__ = [
    "Choice",
    "Implementation",
    "RowFunction",
    "choose",
    "gather_rows",
    "round_to",
    "segment_sum",
    "update_rows",
]

Implementation = Literal["mosaic_gpu", "reference"]


class Choice(NamedTuple):
    """An implementation and, for people, why it was chosen."""

    implementation: Implementation
    reason: str


def choose(implementation: str, *, platform: str) -> Choice:
    """Decides which implementation serves a platform.

    Args:
      implementation: "auto", or one of the implementations, which is then chosen or refused but
        never replaced by another.
      platform: as `jax.Device.platform` has it, such as "cpu" or "gpu".

    Raises:
      ValueError: `implementation` is none of the known names.
      NotImplementedError: the implementation asked for cannot run there.
    """
    if implementation == "reference":
        return Choice("reference", "asked for")
    if implementation == "auto":
        return Choice("reference", f"there is no kernel for platform {platform!r} yet")
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            "implementation='mosaic_gpu' is not available in this version; "
            "use implementation='auto' or 'reference'"
        )
    known = ("auto", *get_args(Implementation))
    raise ValueError(f"implementation={implementation!r} is not known; use one of {known}")


def gather_rows(table: jax.Array, ids: jax.Array, *, implementation: Implementation) -> jax.Array:
    """Reads rows of a table.

    Args:
      table: (vocab, width) bfloat16 or float32.
      ids: (n,) int32. An id outside [0, vocab) reads a row of zeros.
      implementation: as `choose` returned it.

    Returns:
      (n, width) of the table's dtype, bit for bit.
    """
    del implementation
    return reference.gather_rows(table, ids)


def segment_sum(
    values: jax.Array,
    segment_ids: jax.Array,
    num_segments: int,
    *,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """Sums rows by segment, in float32 and in a fixed order, so that a rerun gives the same bits.

    Args:
      values: (n, width) bfloat16 or float32.
      segment_ids: (n,) int32, in any order. Rows whose id is outside [0, num_segments) are left
        out.
      num_segments: how many sums there are.
      dtype: bfloat16 or float32: what the sums are rounded to.
      implementation: as `choose` returned it.

    Returns:
      sums: (num_segments, width) float32, rounded to `dtype`; zeros for an empty segment.
      square_sums: (num_segments,) float32, the sums' squares added over the width.
    """
    del implementation
    return reference.segment_sum(values, segment_ids, num_segments, dtype)


def update_rows(
    tables: tuple[jax.Array, ...],
    ids: jax.Array,
    operands: tuple[jax.Array, ...],
    scalars: tuple[jax.Array, ...],
    fn: RowFunction,
    *,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Replaces the rows named by `ids` with an elementwise function of them; no other bit changes.

    In place where the tables are donated to the program: it holds no second table.

    Args:
      tables: (vocab, width) each: the table and any number of slot tables of the same shape.
      ids: (u,) int32, those inside [0, vocab) distinct; any other is skipped.
      operands: (u, width) float32 each.
      scalars: (u,) float32 each.
      fn: called as `fn(rows, operands, scalars)` with float32 tuples that broadcast against each
        other (scalars as columns); returns one float32 array a table, cast to the table's dtype.
      implementation: as `choose` returned it.

    Returns:
      The new tables.
    """
    del implementation
    return reference.update_rows(tables, ids, operands, scalars, fn)
