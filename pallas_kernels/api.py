"""The row kernels: one function each, over the implementation that was chosen beforehand.

Arrays are one shard's: call these inside `shard_map`, or with plain arrays. `width` is the row's
width in that shard; tables are bfloat16 or float32.

The Mosaic GPU kernels are imported when they are first used: they take a while to load, and most
machines that import this module have no GPU.
"""

from typing import Literal, NamedTuple, get_args

import jax

from pallas_kernels import reference
from pallas_kernels.reference import RowFunction, as_bits, from_bits, round_to

__all__ = [
    "Choice",
    "Implementation",
    "RowFunction",
    "as_bits",
    "choose",
    "from_bits",
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


def choose(
    implementation: str,
    *,
    platform: str,
    compute_capability: str | None = None,
    shard_width: int | None = None,
) -> Choice:
    """Decides which implementation serves a platform.

    The Mosaic GPU kernels are right for every shape they accept; which shapes they are faster for
    than XLA's own gather and scatter is not known yet, so "auto" takes them wherever they run.

    Args:
      implementation: "auto", or one of the implementations, which is then chosen or refused but
        never replaced by another.
      platform: as `jax.Device.platform` has it, such as "cpu" or "gpu".
      compute_capability: as `jax.Device.compute_capability` has it, such as "9.0"; None if unknown.
      shard_width: columns of the table in one shard; None if unknown. The kernels need rows of a
        multiple of 16 bytes: "auto" takes them from a multiple of 8 columns, which suits either
        dtype; asked for by name, they also serve float32 tables of an odd multiple of 4.

    Raises:
      ValueError: `implementation` is none of the known names.
      NotImplementedError: the implementation asked for cannot run there.
    """
    known = ("auto", *get_args(Implementation))
    if implementation not in known:
        raise ValueError(f"implementation={implementation!r} is not known; use one of {known}")
    if implementation == "reference":
        return Choice("reference", "asked for")
    missing = _missing_for_mosaic_gpu(platform, compute_capability)
    multiple = 8 if implementation == "auto" else 4
    if missing is None and shard_width is not None and shard_width % multiple:
        missing = f"rows of a multiple of {multiple} columns per shard, not of {shard_width}"
    if missing is None:
        return Choice(
            "mosaic_gpu",
            f"a GPU of compute capability {compute_capability}"
            if implementation == "auto"
            else "asked for",
        )
    if implementation == "auto":
        return Choice("reference", f"the Mosaic GPU kernels need {missing}")
    raise NotImplementedError(
        f"implementation='mosaic_gpu' needs {missing}; use implementation='auto' or 'reference'"
    )


def _missing_for_mosaic_gpu(platform: str, compute_capability: str | None) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"an NVIDIA GPU, not platform {platform!r}"
    if compute_capability is None:
        return "devices of a known compute capability"
    # AMD's are named "gfx942" and the like.
    major = compute_capability.split(".")[0]
    if not major.isdecimal() or int(major) < 9:
        return f"an NVIDIA GPU of compute capability 9.0 or newer, not {compute_capability}"
    return None


def gather_rows(table: jax.Array, ids: jax.Array, *, implementation: Implementation) -> jax.Array:
    """Reads rows of a table.

    Args:
      table: (vocab, width) bfloat16 or float32.
      ids: (n,) int32. An id outside [0, vocab) reads a row of zeros.
      implementation: as `choose` returned it.

    Returns:
      (n, width) of the table's dtype, bit for bit.
    """
    if implementation == "mosaic_gpu":
        from pallas_kernels import gather_rows_mgpu

        return gather_rows_mgpu.gather_rows(table, ids)
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
      square_sums: (num_segments,) float32, the sums' squares added over the width; -1 where all of
        them underflow to zero, though some sum is not zero.
    """
    if implementation == "mosaic_gpu":
        from pallas_kernels import segment_sum_mgpu

        return segment_sum_mgpu.segment_sum(values, segment_ids, num_segments, dtype=dtype)
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
        other (scalars as columns); returns one float32 array per table, cast to the table's dtype.
      implementation: as `choose` returned it.

    Returns:
      The new tables.
    """
    if implementation == "mosaic_gpu":
        from pallas_kernels import update_rows_mgpu

        return update_rows_mgpu.update_rows(tables, ids, operands, scalars, fn)
    return reference.update_rows(tables, ids, operands, scalars, fn)
