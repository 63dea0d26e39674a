"""Updates rows in place: reads the rows that ids name, applies a function, writes them back.

    ids       (u,)           2 -1  0      an id outside the table is skipped
    tables    (vocab, width) each: the table, then any number of slots (moments, accumulators)
    operands  (u, width)     each: sums of gradients
    scalars   (u,)           each: one value per row, such as a step size

No other row is read or written.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat, row_blocks
from pallas_kernels.reference import RowFunction


@dataclasses.dataclass(frozen=True)
class UpdateTuning:
    """What may be tuned; no choice changes a bit of the result.

    Attributes:
      rows: ids per block, a multiple of the tile's rows and of 4.
      splits: parts into which the columns of a row are cut; each block handles one.
    """

    rows: int
    splits: int

    # Shared memory of a block's values. With what is beside them (ptxas counts up to 51 KiB in all)
    # four blocks fit an H100's core.
    BLOCK_BYTES = 48 * 1024
    BLOCKS = 264

    @classmethod
    def choose(
        cls,
        u: int,
        width: int,
        table_dtypes: Sequence[jax.typing.DTypeLike],
        operand_dtypes: Sequence[jax.typing.DTypeLike],
    ) -> "UpdateTuning":
        """The widest split that fits, then as many rows as fit, fewer where there are few ids.

        A number that divides the ids is taken if more than half as many rows: then ids and scalars
        are used as they are, where a last block that is moved back needs a copy of them.
        """
        # Old and new rows of each table, and the operands.
        value_bytes = 2 * sum(jnp.dtype(dtype).itemsize for dtype in table_dtypes)
        value_bytes += sum(jnp.dtype(dtype).itemsize for dtype in operand_dtypes)
        most_values = cls.BLOCK_BYTES // value_bytes
        splits = row_blocks.splits(width, limit=width)
        while not _fits(width, splits, most_values):
            splits = row_blocks.splits(width, limit=width // splits - 1)
        step = row_blocks.tile(width // splits).rows
        most = most_values // (width // splits)
        wanted = row_blocks.ceil_to(-(-u // cls.BLOCKS), step)
        rows = min(wanted, max(most // step * step, step), 256)
        even = (fewer for fewer in range(rows, rows // 2, -step) if u % fewer == 0)
        return cls(rows=next(even, rows), splits=splits)


def _fits(width: int, splits: int, most_values: int) -> bool:
    columns = width // splits
    narrowest = columns <= 8
    return narrowest or row_blocks.tile(columns).rows * columns <= most_values


def update_rows(
    tables: tuple[jax.Array, ...],
    ids: jax.Array,
    operands: tuple[jax.Array, ...],
    scalars: tuple[jax.Array, ...],
    fn: RowFunction,
    *,
    tuning: UpdateTuning | None = None,
    interpret: compat.Interpreter = None,
) -> tuple[jax.Array, ...]:
    """Replaces the rows named by `ids`. See `pallas_kernels.api.update_rows`.

    Args:
      tables: (vocab, width) bfloat16 or float32 each, per shard. Updated in place: where the
        caller's program donates them, the result is the same buffer.
      ids: (u,) int32, those inside [0, vocab) distinct; any other is skipped.
      operands: (u, width) bfloat16 or float32 each.
      scalars: (u,) float32 each.
      fn: elementwise; called as `fn(rows, operands, scalars)` on float32 tiles, scalars broadcast
        to the tile's shape, and traced into the kernel. Returns one array per table.
      tuning: None chooses by shape.
      interpret: None compiles for a GPU.

    Returns:
      The tables.

    Bytes moved: u * (4 + 4 * scalars + operands' rows + 2 * tables' rows), rows of the tables in
    sectors of 32 bytes; an id that is skipped costs no row of a table. Bound: that over the memory
    bandwidth, or what a core needs to issue two copies per row and table, about 40 instructions of
    one warp, whichever is longer.

    Raises:
      NotImplementedError: the rows of an argument are not a multiple of 16 bytes, or of another
        dtype.
      ValueError: the tuning does not fit the rows.
    """
    width = tables[0].shape[1]
    (u,) = ids.shape
    for array in (*tables, *operands):
        row_blocks.check_rows(width, array.dtype)
    if u == 0:
        return tables
    if tuning is None:
        tuning = UpdateTuning.choose(
            u, width, [t.dtype for t in tables], [o.dtype for o in operands]
        )
    # A tile has a multiple of 4 rows.
    multiple = row_blocks.tile(width // tuning.splits).rows
    row_blocks.check_tuning(tuning.rows, tuning.splits, width, multiple)
    ids, operands, scalars = _at_least_one_block(ids, operands, scalars, tuning.rows)
    ids, scalars = _last_block_moved_back(ids, scalars, tuning.rows)
    new_tables, _ = compat.launch(
        functools.partial(
            _update_block,
            counts=(len(tables), len(operands), len(scalars)),
            fn=fn,
            tuning=tuning,
            interpret=interpret,
        ),
        updated=tables,
        operands=(ids, *operands, *scalars),
        out_types=(),
        scratch_types=_scratch_types(tables, operands, scalars, tuning),
        grid=(tuning.splits, ids.shape[0] // tuning.rows),
        grid_names=("split", "block"),
        name="update_rows",
        interpret=interpret,
    )
    return new_tables


def _at_least_one_block(
    ids: jax.Array, operands: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...], rows: int
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Pads what is less than one block: the padding is smaller than that."""
    missing = rows - ids.shape[0]
    if missing <= 0:
        return ids, operands, scalars
    return (
        jnp.pad(ids, (0, missing), constant_values=-1),
        tuple(jnp.pad(operand, ((0, missing), (0, 0))) for operand in operands),
        tuple(jnp.pad(scalar, (0, missing)) for scalar in scalars),
    )


def _scratch_types(
    tables: tuple[jax.Array, ...],
    operands: tuple[jax.Array, ...],
    scalars: tuple[jax.Array, ...],
    tuning: UpdateTuning,
) -> tuple[Any, ...]:
    """What a block holds: ids, old and new rows, operands, scalars, and a barrier for each kind."""
    rows, columns = tuning.rows, tables[0].shape[1] // tuning.splits
    return (
        plgpu.SMEM((rows,), jnp.int32),
        *(plgpu.SMEM((rows, columns), table.dtype) for table in tables),
        *(plgpu.SMEM((rows, columns), table.dtype) for table in tables),
        *(plgpu.SMEM((rows, columns), operand.dtype) for operand in operands),
        *(plgpu.SMEM((rows,), jnp.float32) for _ in scalars),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=rows * len(tables)),
        plgpu.Barrier(num_arrivals=_input_copies(tuning, len(operands), len(scalars))),
    )


def _last_block_moved_back(
    ids: jax.Array, scalars: tuple[jax.Array, ...], rows: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Makes whole blocks: the last one is moved back to end with the arrays.

    So no operand needs padding, which would copy it. The ids that the last block shares with the
    one before it are made -1 in the last; ids and scalars, small and copied, are laid out by block.
    """
    (u,) = ids.shape
    rest = u % rows
    if rest == 0:
        return ids, scalars
    whole = u - rest

    def by_block(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:whole], x[u - rows :]])

    shared = jnp.full((rows - rest,), -1, ids.dtype)
    return (
        jnp.concatenate([ids[:whole], shared, ids[whole:]]),
        tuple(by_block(scalar) for scalar in scalars),
    )


def _input_copies(tuning: UpdateTuning, operands: int, scalars: int) -> int:
    """Copies that fill a block's operands and scalars: a split of an operand goes row by row."""
    return operands * (1 if tuning.splits == 1 else tuning.rows) + scalars


def _update_block(
    *refs: Any,
    counts: tuple[int, int, int],
    fn: RowFunction,
    tuning: UpdateTuning,
    interpret: compat.Interpreter,
) -> None:
    t, o, s = counts
    take = row_blocks.taker(refs)
    tables_gmem, (ids_gmem,), operands_gmem, scalars_gmem = take(t), take(1), take(o), take(s)
    (ids_smem,), old_smem, new_smem = take(1), take(t), take(t)
    operands_smem, scalars_smem = take(o), take(s)
    ids_ready, rows_ready, inputs_ready = take(3)
    compat.keep_plain((*old_smem, *new_smem, *operands_smem), interpret)

    width = new_smem[0].shape[1]
    columns = pl.ds(jax.lax.axis_index("split") * width, width)
    slot = jax.lax.axis_index("block") * tuning.rows

    row_blocks.copy_in(ids_gmem.at[pl.ds(slot, tuning.rows)], ids_smem, ids_ready)
    for source, destination in zip(scalars_gmem, scalars_smem, strict=True):
        row_blocks.copy_in(source.at[pl.ds(slot, tuning.rows)], destination, inputs_ready)
    for source, destination in zip(operands_gmem, operands_smem, strict=True):
        first = jnp.minimum(slot, source.shape[0] - tuning.rows)
        _copy_operand(source, destination, inputs_ready, first, columns, tuning, interpret)
    plgpu.barrier_wait(ids_ready)

    _read_rows(tables_gmem, ids_smem, old_smem, rows_ready, columns, interpret)
    if o + s:
        plgpu.barrier_wait(inputs_ready)
    plgpu.barrier_wait(rows_ready)
    _apply(fn, old_smem, new_smem, operands_smem, scalars_smem, interpret)
    plgpu.commit_smem()
    _write_rows(tables_gmem, ids_smem, new_smem, columns, interpret)


def _inside(row: jax.Array, table_gmem: Any) -> jax.Array:
    """Whether the table has such a row."""
    return (row >= 0) & (row < table_gmem.shape[0])


def _read_rows(
    tables_gmem: Sequence[Any],
    ids_smem: Any,
    old_smem: Sequence[Any],
    rows_ready: Any,
    columns: Any,
    interpret: compat.Interpreter,
) -> None:
    """Starts the copies of the block's rows; one that is skipped arrives at once."""

    @compat.loop_by_warp(ids_smem.shape[0], interpret)
    def _(i: jax.Array) -> None:
        row = ids_smem[i]

        def read() -> None:
            for source, destination in zip(tables_gmem, old_smem, strict=True):
                row_blocks.copy_in(
                    source.at[pl.ds(row, 1), columns], destination.at[pl.ds(i, 1)], rows_ready
                )

        def skip() -> None:
            for _ in tables_gmem:
                plgpu.barrier_arrive(rows_ready)

        jax.lax.cond(_inside(row, tables_gmem[0]), read, skip)


def _write_rows(
    tables_gmem: Sequence[Any],
    ids_smem: Any,
    new_smem: Sequence[Any],
    columns: Any,
    interpret: compat.Interpreter,
) -> None:
    """Copies the block's new rows out, and waits for the copies."""

    @compat.loop_by_warp(ids_smem.shape[0], interpret)
    def _(i: jax.Array) -> None:
        row = ids_smem[i]

        @pl.when(_inside(row, tables_gmem[0]))
        def _() -> None:
            for source, destination in zip(new_smem, tables_gmem, strict=True):
                plgpu.copy_smem_to_gmem(
                    source.at[pl.ds(i, 1)],
                    destination.at[pl.ds(row, 1), columns],
                    commit_group=False,
                )

    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)


def _apply(
    fn: RowFunction,
    old_smem: Sequence[Any],
    new_smem: Sequence[Any],
    operands_smem: Sequence[Any],
    scalars_smem: Sequence[Any],
    interpret: compat.Interpreter,
) -> None:
    """Runs `fn` over the block, tile by tile. Rows that are skipped hold arbitrary values."""
    rows, width = new_smem[0].shape
    tile = row_blocks.tile(width)

    @pl.loop(0, rows // tile.rows)
    def _(down: jax.Array) -> None:
        these_rows = pl.ds(down * tile.rows, tile.rows)

        @pl.loop(0, width // tile.columns)
        def _(across: jax.Array) -> None:
            index = (these_rows, pl.ds(across * tile.columns, tile.columns))

            def load(ref: Any) -> jax.Array:
                return compat.load(ref.at[index], tile.layout, interpret).astype(jnp.float32)

            def load_scalar(ref: Any) -> jax.Array:
                values = compat.load(ref.at[these_rows], tile.layout.reduce(1), interpret)
                return jax.lax.broadcast_in_dim(values, (tile.rows, tile.columns), (0,))

            new_rows = fn(
                tuple(load(ref) for ref in old_smem),
                tuple(load(ref) for ref in operands_smem),
                tuple(load_scalar(ref) for ref in scalars_smem),
            )
            for ref, values in zip(new_smem, new_rows, strict=True):
                compat.store(ref.at[index], values.astype(ref.dtype), interpret)


def _copy_operand(
    source: Any,
    destination: Any,
    barrier: Any,
    first: Any,
    columns: Any,
    tuning: UpdateTuning,
    interpret: compat.Interpreter,
) -> None:
    if tuning.splits == 1:
        row_blocks.copy_in(source.at[pl.ds(first, tuning.rows)], destination, barrier)
        return

    @compat.loop_by_warp(tuning.rows, interpret)
    def _(i: jax.Array) -> None:
        row_blocks.copy_in(
            source.at[pl.ds(first + i, 1), columns], destination.at[pl.ds(i, 1)], barrier
        )
