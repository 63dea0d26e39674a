"""Sums rows by segment, in float32 and in an order that depends on the segment ids alone.

    segment ids  (n,)                     1  0 -1  1
    values       (n, width)               a  b  c  d
    sums         (num_segments, width)    b  a+d  0 ...

The order. Tokens are sorted by segment, stably, and cut into chunks of `tuning.rows`. One block of
threads adds a chunk's rows one after the other, starting anew (from +0) at each segment. A segment
that lies within one chunk is then done. Of a segment that crosses chunks, each chunk leaves a
partial sum; the partial sums, at most two per chunk, are the tokens of the next level, and so on
until one chunk is left. No atomics: each sum is written once, by one block. No segment is slow,
however many tokens it has, because every block adds as many rows as any other.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat, row_blocks
from pallas_kernels.reference import round_to


@dataclasses.dataclass(frozen=True)
class SegmentSumTuning:
    """How the sums are cut into blocks.

    Attributes:
      rows: tokens per chunk, a multiple of 16 and of the tile's rows. It sets the order of the
        sums: another value may give other last bits.
      splits: parts into which the columns of a row are cut; each block handles one. It sets the
        order of the square sums.
    """

    rows: int
    splits: int

    # Shared memory of a block's values; ids and alignment take about 5 KiB more. At least three
    # blocks fit an H100's core; four do where the values take 48 KiB, as for widths of 32 to 128
    # that are powers of two.
    BLOCK_BYTES = 64 * 1024
    # Bytes per value in a block, at most: the token's value, its running sum, the rounded sum.
    VALUE_BYTES = 12

    @classmethod
    def choose(cls, width: int) -> "SegmentSumTuning":
        """Chunks of 32 to 128 rows, by the width alone: the number of tokens changes no order."""
        most_values = cls.BLOCK_BYTES // cls.VALUE_BYTES
        splits = 1
        while True:
            columns = width // splits
            # Fewer than 32 rows per chunk would make the partial sums a large part of the traffic.
            step = max(32, row_blocks.tile(columns).rows)
            if step * columns <= most_values or columns <= 8:
                rows = max(min(most_values // columns, 128) // step, 1) * step
                return cls(rows=rows, splits=splits)
            splits = row_blocks.splits(width, limit=columns - 1)


class _Items(NamedTuple):
    """What a level adds up: the tokens, or the partial sums of the level before."""

    values: jax.Array  # shape=(m, width)
    order: jax.Array  # shape=(n,), dtype=jnp.int32: rows of `values`; -1 is a row of zeros
    segments: jax.Array  # shape=(n,), dtype=jnp.int32: equal ones adjacent; outside is left out


def segment_sum(
    values: jax.Array,
    segment_ids: jax.Array,
    num_segments: int,
    *,
    dtype: jax.typing.DTypeLike,
    tuning: SegmentSumTuning | None = None,
    interpret: compat.Interpreter = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums rows by segment. See `pallas_kernels.api.segment_sum`; the order is this module's.

    Args:
      values: (n, width) bfloat16 or float32, per shard; only read.
      segment_ids: (n,) int32, in any order. Rows whose id is outside [0, num_segments) are left
        out.
      num_segments: how many sums there are.
      dtype: bfloat16 or float32: what the sums are rounded to, once, at the end.
      tuning: None chooses by the width.
      interpret: None compiles for a GPU.

    Returns:
      sums: (num_segments, width) float32, rounded to `dtype`; zeros for an empty segment.
      square_sums: (num_segments,) float32, the squares of the rounded sums added over the width; -1
        where all of them underflow to zero, though some sum is not zero.

    Bytes moved by the kernels: n * (row bytes + 8) read and num_segments * width * 4 written, and
    2 / `tuning.rows` of each again per level; beside them a sort of n keys and the zeroing of the
    result. Bound: that over the memory bandwidth, or what a core needs for n rows: about 30
    instructions of one warp to copy a row in, 20 of each of the four to add it to the last, 15 of
    one to pass over it and 45 to copy a sum out.

    Raises:
      NotImplementedError: the row is not a multiple of 16 bytes, or of another dtype.
      ValueError: the tuning does not fit the rows.
    """
    width = values.shape[1]
    row_blocks.check_rows(width, values.dtype)
    row_blocks.check_rows(width, dtype)
    tuning = tuning or SegmentSumTuning.choose(width)
    multiple = max(16, row_blocks.tile(width // tuning.splits).rows)
    row_blocks.check_tuning(tuning.rows, tuning.splits, width, multiple)
    sums = jnp.zeros((num_segments, width), jnp.float32)
    square_sums = jnp.zeros((num_segments, tuning.splits), jnp.float32)
    items = _sorted_tokens(values, segment_ids, num_segments)
    while items.segments.shape[0] > 0 and num_segments > 0:
        items = _padded(items, tuning.rows)
        body = functools.partial(_sum_chunk, dtype=dtype, tuning=tuning, interpret=interpret)
        (sums, square_sums), partials = _sum_level(
            body, (sums, square_sums), items, tuning, interpret
        )
        items = _next_level(partials, items.segments, num_segments, tuning.rows)
    return sums, _over_splits(square_sums)


def _sum_level(
    body: Callable[..., None],
    sums: tuple[jax.Array, ...],
    items: _Items,
    tuning: SegmentSumTuning,
    interpret: compat.Interpreter,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Adds up one level: the sums with those that are done, and the chunks' partial sums."""
    width, chunks = items.values.shape[1], items.segments.shape[0] // tuning.rows
    sums, (partials,) = compat.launch(
        body,
        updated=sums,
        operands=(
            items.values,
            jnp.zeros((1, width // tuning.splits), items.values.dtype),
            items.order,
            # Each chunk sees one neighbour on either side; copies are of 16 bytes.
            jnp.pad(items.segments, (1, 3), constant_values=-1),
        ),
        out_types=(jax.ShapeDtypeStruct((2 * chunks, width), jnp.float32),),
        scratch_types=_scratch_types(items.values.dtype, width, tuning),
        grid=(tuning.splits, chunks),
        grid_names=("split", "chunk"),
        name="segment_sum",
        interpret=interpret,
    )
    return sums, partials


def _over_splits(square_sums: jax.Array) -> jax.Array:
    """Adds up what each split of the columns left: (num_segments, splits) -> (num_segments,)."""
    total = jnp.sum(jnp.maximum(square_sums, 0.0), axis=1)
    return jnp.where((total == 0) & jnp.any(square_sums != 0, axis=1), -1.0, total)


def _sorted_tokens(values: jax.Array, segment_ids: jax.Array, num_segments: int) -> _Items:
    inside = (segment_ids >= 0) & (segment_ids < num_segments)
    keys = jnp.where(inside, segment_ids, num_segments)
    tokens = jnp.arange(keys.shape[0], dtype=jnp.int32)
    keys, order = jax.lax.sort((keys, tokens), num_keys=1, is_stable=True)
    return _Items(values, order, keys)


def _padded(items: _Items, rows: int) -> _Items:
    """Whole chunks: the padding belongs to no segment."""
    missing = -items.segments.shape[0] % rows
    pad = functools.partial(jnp.pad, pad_width=(0, missing), constant_values=-1)
    return _Items(items.values, pad(items.order), pad(items.segments))


def _next_level(partials: jax.Array, segments: jax.Array, num_segments: int, rows: int) -> _Items:
    """The partial sums that the chunks left: a head (row 2c) and a tail (row 2c + 1) each.

    A head belongs to a segment that began before the chunk, a tail to one that began in the chunk
    and goes on behind it. Where one of them is missing, the other may still have neighbours of its
    segment on both sides: then a row of zeros takes the place, so that the segment stays in one
    piece. All other missing ones belong to no segment.
    """
    if segments.shape[0] <= rows:
        return _Items(partials, jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.int32))
    chunks = segments.reshape(-1, rows)
    first, last = chunks[:, 0], chunks[:, -1]
    nobody = jnp.full((1,), -1, segments.dtype)
    before = jnp.concatenate([nobody, last[:-1]])
    behind = jnp.concatenate([first[1:], nobody])

    def inside(segment: jax.Array) -> jax.Array:
        return (segment >= 0) & (segment < num_segments)

    has_head = inside(first) & (first == before)
    goes_on = inside(last) & (last == behind)
    passes_through = has_head & goes_on & (first == last)
    has_tail = goes_on & jnp.logical_not(passes_through)
    row = 2 * jnp.arange(chunks.shape[0], dtype=jnp.int32)
    order = jnp.stack([jnp.where(has_head, row, -1), jnp.where(has_tail, row + 1, -1)], axis=1)
    segments = jnp.stack([jnp.where(has_head, first, -1), jnp.where(goes_on, last, -1)], axis=1)
    return _Items(partials, order.reshape(-1), segments.reshape(-1))


def _scratch_types(
    values_dtype: jax.typing.DTypeLike,
    width: int,
    tuning: SegmentSumTuning,
) -> tuple[Any, ...]:
    rows, columns = tuning.rows, width // tuning.splits
    return (
        plgpu.SMEM((rows,), jnp.int32),
        plgpu.SMEM((rows + 4,), jnp.int32),
        plgpu.SMEM((rows, columns), values_dtype),
        plgpu.SMEM((rows, columns), jnp.float32),
        plgpu.SMEM((rows, columns), jnp.float32),
        plgpu.SMEM((rows,), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=rows),
    )


def _sum_chunk(
    sums_gmem: Any,
    squares_gmem: Any,
    values_gmem: Any,
    zeros_gmem: Any,
    order_gmem: Any,
    segments_gmem: Any,
    partials_gmem: Any,
    order_smem: Any,
    segments_smem: Any,  # one neighbour before the chunk, the chunk, one neighbour behind it
    values_smem: Any,
    running_smem: Any,
    rounded_smem: Any,
    squares_smem: Any,
    ids_ready: Any,
    values_ready: Any,
    *,
    dtype: jax.typing.DTypeLike,
    tuning: SegmentSumTuning,
    interpret: compat.Interpreter,
) -> None:
    compat.keep_plain((values_smem, running_smem, rounded_smem), interpret)
    split = jax.lax.axis_index("split")
    columns = pl.ds(split * values_smem.shape[1], values_smem.shape[1])
    chunk = jax.lax.axis_index("chunk")
    first = chunk * tuning.rows
    inside = functools.partial(_inside, num_segments=sums_gmem.shape[0])
    row_blocks.copy_in(order_gmem.at[pl.ds(first, tuning.rows)], order_smem, ids_ready)
    row_blocks.copy_in(segments_gmem.at[pl.ds(first, tuning.rows + 4)], segments_smem, ids_ready)
    plgpu.barrier_wait(ids_ready)

    read = _Reader(values_gmem, zeros_gmem, columns, values_smem, values_ready)
    _read_values(read, order_smem, segments_smem, inside, interpret)
    plgpu.barrier_wait(values_ready)
    _add_rows(values_smem, segments_smem, running_smem, interpret)
    plgpu.commit_smem()
    _round_and_square(running_smem, rounded_smem, squares_smem, dtype, interpret)
    plgpu.commit_smem()

    @compat.loop_by_warp(tuning.rows, interpret)
    def _(i: jax.Array) -> None:
        segment, following = segments_smem[i + 1], segments_smem[i + 2]
        is_end = (i == tuning.rows - 1) | (segment != following)
        is_head = (segment == segments_smem[1]) & (segment == segments_smem[0])
        goes_on = (i == tuning.rows - 1) & (segment == following)

        def write_sum() -> None:
            _copy_row(rounded_smem, i, sums_gmem, segment, columns)
            squares_gmem[segment, split] = squares_smem[i]

        def write_partial() -> None:
            partial = 2 * chunk + 1 - is_head.astype(jnp.int32)
            _copy_row(running_smem, i, partials_gmem, partial, columns)

        @pl.when(inside(segment) & is_end)
        def _() -> None:
            jax.lax.cond(is_head | goes_on, write_partial, write_sum)

    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)


class _Reader(NamedTuple):
    """Where a chunk's values come from and go to."""

    values_gmem: Any
    zeros_gmem: Any
    columns: Any
    values_smem: Any
    ready: Any


def _inside(segment: jax.Array, *, num_segments: int) -> jax.Array:
    """Whether there is such a segment."""
    return (segment >= 0) & (segment < num_segments)


def _copy_row(source_smem: Any, i: Any, destination_gmem: Any, row: Any, columns: Any) -> None:
    plgpu.copy_smem_to_gmem(
        source_smem.at[pl.ds(i, 1)],
        destination_gmem.at[pl.ds(row, 1), columns],
        commit_group=False,
    )


def _read_values(
    reader: _Reader,
    order_smem: Any,
    segments_smem: Any,
    inside: Callable[[jax.Array], jax.Array],
    interpret: compat.Interpreter,
) -> None:
    """Starts the copies of a chunk's rows; what belongs to no segment arrives at once."""
    values_gmem, zeros_gmem, columns, values_smem, values_ready = reader

    @compat.loop_by_warp(order_smem.shape[0], interpret)
    def _(i: jax.Array) -> None:
        row = order_smem[i]
        destination = values_smem.at[pl.ds(i, 1)]

        def read() -> None:
            row_blocks.copy_in(values_gmem.at[pl.ds(row, 1), columns], destination, values_ready)

        def read_zeros() -> None:
            row_blocks.copy_in(zeros_gmem, destination, values_ready)

        def skip() -> None:
            plgpu.barrier_arrive(values_ready)

        jax.lax.cond(
            inside(segments_smem[i + 1]),
            lambda: jax.lax.cond(row >= 0, read, read_zeros),
            skip,
        )


def _add_rows(
    values_smem: Any, segments_smem: Any, running_smem: Any, interpret: compat.Interpreter
) -> None:
    """running[i] = values[i], plus running[i - 1] where that is of the same segment."""
    rows, width = values_smem.shape
    layout = row_blocks.row_layout(width)

    def add_row(i: jax.Array, total: jax.Array) -> jax.Array:
        row = pl.ds(i, 1)
        values = compat.load(values_smem.at[row], layout, interpret).astype(jnp.float32)
        begins = (i == 0) | (segments_smem[i + 1] != segments_smem[i])
        # A select, not a product: an infinity must not leak into the segment behind it.
        begins = jnp.broadcast_to(begins, total.shape)
        total = jnp.where(begins, jnp.zeros_like(total), total) + values
        compat.store(running_smem.at[row], total, interpret)
        return total

    zeros = compat.layout_cast(jnp.zeros((1, width), jnp.float32), layout, interpret)
    # Unrolled, a row takes 20 instructions of each warp, not 28.
    jax.lax.fori_loop(0, rows, add_row, zeros, unroll=4)


def _round_and_square(
    running_smem: Any,
    rounded_smem: Any,
    squares_smem: Any,
    dtype: jax.typing.DTypeLike,
    interpret: compat.Interpreter,
) -> None:
    """Rounds every row, and adds up its squares: tile by tile, in each column left to right.

    Squares that all underflow to zero, though a value is not zero, are told of by -1.
    """
    rows, width = running_smem.shape
    tile = row_blocks.tile(width)

    @pl.loop(0, rows // tile.rows)
    def _(down: jax.Array) -> None:
        these_rows = pl.ds(down * tile.rows, tile.rows)

        def add_tile(
            across: jax.Array, sums: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            squares, others = sums
            index = (these_rows, pl.ds(across * tile.columns, tile.columns))
            rounded = round_to(dtype, compat.load(running_smem.at[index], tile.layout, interpret))
            compat.store(rounded_smem.at[index], rounded, interpret)
            is_zero = rounded == 0
            return squares + rounded * rounded, others + jnp.where(is_zero, 0.0, 1.0)

        zeros = compat.layout_cast(
            jnp.zeros((tile.rows, tile.columns), jnp.float32), tile.layout, interpret
        )
        squares, others = jax.lax.fori_loop(0, width // tile.columns, add_tile, (zeros, zeros))
        total, count = jnp.sum(squares, axis=1), jnp.sum(others, axis=1)
        told = jnp.where(total == 0, jnp.where(count == 0, total, total - 1.0), total)
        compat.store(squares_smem.at[these_rows], told, interpret)
