"""The contract of every kernel, in jax.numpy: what runs where no Mosaic GPU kernel can.

All functions see one shard: they are called inside `shard_map`, or with plain arrays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

RowFunction = Callable[
    [tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array, ...]], tuple[jax.Array, ...]
]


def round_to(dtype: jax.typing.DTypeLike, x: jax.Array) -> jax.Array:
    """Rounds float32 values to those that `dtype` can hold; the result stays float32.

    `reduce_precision` and not a pair of casts: XLA may drop the pair (it allows excess precision).
    """
    info = jnp.finfo(dtype)
    if info.bits == 32:
        return x
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def gather_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of the table; zeros for an id outside of it. See `api.gather_rows`."""
    # Out-of-range ids are pointed behind the table first: `mode="fill"` alone would wrap -1.
    vocab = table.shape[0]
    rows = jnp.where((ids >= 0) & (ids < vocab), ids, vocab)

    def gather(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table.at[rows].get(mode="fill", fill_value=0)

    return jax.lax.platform_dependent(
        table, rows, cpu=_gather_rows_by_bits if _widens(table) else gather, default=gather
    )


def segment_sum(
    values: jax.Array, segment_ids: jax.Array, num_segments: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Sums of each segment and the square sums of those. See `api.segment_sum`."""
    values = values.astype(jnp.float32)
    inside = (segment_ids >= 0) & (segment_ids < num_segments)
    segments = jnp.where(inside, segment_ids, num_segments)
    sums = jax.lax.platform_dependent(
        values,
        segments,
        # A scatter-add is a loop in token order on CPU, but unordered atomics on a GPU.
        cpu=lambda v, s: _segment_sum_by_scatter(v, s, num_segments),
        default=lambda v, s: _segment_sum_by_scan(v, s, num_segments),
    )
    sums = round_to(dtype, sums)
    square_sums = jnp.sum(sums * sums, axis=1)
    has_sum = jnp.any(sums != 0, axis=1)
    return sums, jnp.where((square_sums == 0) & has_sum, -1.0, square_sums)


def update_rows(
    tables: tuple[jax.Array, ...],
    ids: jax.Array,
    operands: tuple[jax.Array, ...],
    scalars: tuple[jax.Array, ...],
    fn: RowFunction,
) -> tuple[jax.Array, ...]:
    """Writes `fn` of the rows named by `ids`, and no other row. See `api.update_rows`."""
    vocab = tables[0].shape[0]
    inside = (ids >= 0) & (ids < vocab)
    rows = tuple(gather_rows(table, ids).astype(jnp.float32) for table in tables)
    new_rows = fn(rows, operands, tuple(s[:, None] for s in scalars))
    targets = jnp.where(inside, ids, vocab)
    return tuple(
        _set_rows(table, targets, new.astype(table.dtype))
        for table, new in zip(tables, new_rows, strict=True)
    )


def _set_rows(table: jax.Array, targets: jax.Array, rows: jax.Array) -> jax.Array:
    """Sets rows in place; a target of `vocab` is skipped."""

    def scatter(table: jax.Array, targets: jax.Array, rows: jax.Array) -> jax.Array:
        return table.at[targets].set(rows, mode="drop")

    return jax.lax.platform_dependent(
        table,
        targets,
        rows,
        cpu=_set_rows_by_select if _widens(table) else scatter,
        default=scatter,
    )


def _widens(table: jax.Array) -> bool:
    """Whether XLA's CPU backend would gather from and scatter to a float32 copy of the table.

    That of JAX 0.10 does so for bfloat16; it also changes the bits of a NaN.
    """
    return table.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 11)


def _gather_rows_by_bits(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers rows of a bfloat16 table as uint16; a row of `vocab` reads zeros."""

    def read(table: jax.Array, rows: jax.Array) -> jax.Array:
        return as_bits(table).at[rows].get(mode="fill", fill_value=0)

    def zeros(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.zeros((rows.shape[0], table.shape[1]), jnp.uint16)

    # The branch keeps XLA from storing the bits of the whole table before a loop.
    bits = jax.lax.cond(jnp.any(rows < table.shape[0]), read, zeros, table, rows)
    return from_bits(bits, table.dtype)


def _set_rows_by_select(table: jax.Array, targets: jax.Array, rows: jax.Array) -> jax.Array:
    """Sets rows by one pass over a bfloat16 table.

    XLA's CPU backend of JAX 0.10 has no operation that writes a part of a bfloat16 array in place.
    This pass costs time in proportion to the table, and 2 bytes per row of it (4 bytes where 65,536
    targets or more are given).
    """
    vocab, count = table.shape[0], targets.shape[0]
    index_dtype = jnp.uint16 if count < 2**16 else jnp.uint32

    def write(table: jax.Array, targets: jax.Array, rows: jax.Array) -> jax.Array:
        source = jnp.full((vocab,), count, index_dtype)
        source = source.at[targets].set(jnp.arange(count, dtype=index_dtype), mode="drop")
        new = as_bits(rows).at[source.astype(jnp.int32)].get(mode="clip")
        return from_bits(jnp.where((source < count)[:, None], new, as_bits(table)), table.dtype)

    # The branch keeps XLA from fusing the reads of the old rows into the pass that writes.
    return jax.lax.cond(
        jnp.any(targets < vocab), write, lambda table, *_: table, table, targets, rows
    )


def as_bits(x: jax.Array) -> jax.Array:
    """A bfloat16 array as uint16: a cast through float32 would not keep the bits of a NaN."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Undoes `as_bits`."""
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _segment_sum_by_scatter(values: jax.Array, segments: jax.Array, num_segments: int) -> jax.Array:
    zeros = jnp.zeros((num_segments, values.shape[1]), jnp.float32)
    return zeros.at[segments].add(values, mode="drop")


def _segment_sum_by_scan(values: jax.Array, segments: jax.Array, num_segments: int) -> jax.Array:
    """Sorts the tokens by segment, then sums each run by a scan whose tree is fixed."""
    order = jnp.argsort(segments, stable=True)
    segments = segments[order]
    starts = jnp.concatenate([jnp.ones((1,), bool), segments[1:] != segments[:-1]])

    def join(
        left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (left_start, left_sum), (right_start, right_sum) = left, right
        # A select, not a product: an infinity must not leak into the segment behind it.
        total = jnp.where(right_start[:, None], right_sum, left_sum + right_sum)
        return left_start | right_start, total

    _, running = jax.lax.associative_scan(join, (starts, values[order]))
    wanted = jnp.arange(num_segments, dtype=segments.dtype)
    last = jnp.searchsorted(segments, wanted, side="right") - 1
    present = (last >= 0) & (segments[last] == wanted)
    return jnp.where(present[:, None], running[last], jnp.zeros((), jnp.float32))
