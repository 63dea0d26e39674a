"""Gathers rows of a table: one bulk copy per row into shared memory, one copy out per block.

    ids     (n,)           2  0 -1  2
    table   (vocab, width) [a b c ...]
    result  (n, width)     c  a  0  c

The result is laid out as the all-to-all sends it: the ids of all ranks, rank by rank, along the
first axis.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat, row_blocks


@dataclasses.dataclass(frozen=True)
class GatherTuning:
    """What may be tuned; no choice changes a bit of the result.

    Attributes:
      rows: ids per block, a multiple of 4.
      splits: parts into which the columns of a row are cut; each block handles one.
    """

    rows: int
    splits: int

    # A block keeps this much in flight. With what is beside it (ptxas counts 17 KiB in all, and a
    # block reserves 1 KiB) 12 of them fit the shared memory of an H100's core, several times what
    # its memory needs to stay busy (3.35 TB/s for about 1 us is 25 KB per core).
    BLOCK_BYTES = 16 * 1024
    # As many blocks as two waves over an H100's 132 cores, before blocks are made larger.
    BLOCKS = 264

    @classmethod
    def choose(cls, n: int, width: int, dtype: jax.typing.DTypeLike) -> "GatherTuning":
        """Blocks of 16 KiB at most, smaller ones where there are few ids."""
        itemsize = jnp.dtype(dtype).itemsize
        splits = row_blocks.splits(width, limit=cls.BLOCK_BYTES // 4 // itemsize)
        most = cls.BLOCK_BYTES // (width // splits * itemsize)
        wanted = -(-n // cls.BLOCKS)
        return cls(rows=max(4, min(most, wanted, 256) // 4 * 4), splits=splits)


def gather_rows(
    table: jax.Array,
    ids: jax.Array,
    *,
    tuning: GatherTuning | None = None,
    interpret: compat.Interpreter = None,
) -> jax.Array:
    """Reads rows of a table. See `pallas_kernels.api.gather_rows`.

    Args:
      table: (vocab, width) bfloat16 or float32, per shard; only read.
      ids: (n,) int32. An id outside [0, vocab) reads a row of zeros.
      tuning: None chooses by shape.
      interpret: None compiles for a GPU.

    Returns:
      (n, width) of the table's dtype, bit for bit; aliases nothing.

    Bytes moved: n * (4 + 2 * row bytes), a row of the table in sectors of 32 bytes. Bound: that
    over the memory bandwidth, or what a core needs to issue n copies, about 25 instructions of one
    warp each, whichever is longer.

    Raises:
      NotImplementedError: the row is not a multiple of 16 bytes, or of another dtype.
      ValueError: the tuning does not fit the rows.
    """
    width = table.shape[1]
    (n,) = ids.shape
    row_blocks.check_rows(width, table.dtype)
    if n == 0:
        return jnp.zeros((0, width), table.dtype)
    tuning = tuning or GatherTuning.choose(n, width, table.dtype)
    row_blocks.check_tuning(tuning.rows, tuning.splits, width, multiple=4)
    blocks = -(-n // tuning.rows)
    # The copies of ids are whole blocks; the padding reads the row of zeros and is not written.
    ids = jnp.pad(ids, (0, blocks * tuning.rows - n), constant_values=-1)
    columns = width // tuning.splits
    _, (rows,) = compat.launch(
        functools.partial(_gather_block, tuning=tuning, interpret=interpret),
        updated=(),
        operands=(table, jnp.zeros((columns,), table.dtype), ids),
        out_types=(jax.ShapeDtypeStruct((n, width), table.dtype),),
        scratch_types=(
            plgpu.SMEM((tuning.rows,), jnp.int32),
            plgpu.SMEM((tuning.rows, columns), table.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=tuning.rows),
        ),
        grid=(tuning.splits, blocks),
        grid_names=("split", "block"),
        name="gather_rows",
        interpret=interpret,
    )
    return rows


def _gather_block(
    table_gmem: Any,
    zeros_gmem: Any,
    ids_gmem: Any,
    out_gmem: Any,
    ids_smem: Any,
    rows_smem: Any,
    ids_ready: Any,
    rows_ready: Any,
    *,
    tuning: GatherTuning,
    interpret: compat.Interpreter,
) -> None:
    vocab, width = table_gmem.shape
    n = out_gmem.shape[0]
    columns = pl.ds(jax.lax.axis_index("split") * rows_smem.shape[1], rows_smem.shape[1])
    first = jax.lax.axis_index("block") * tuning.rows

    row_blocks.copy_in(ids_gmem.at[pl.ds(first, tuning.rows)], ids_smem, ids_ready)
    plgpu.barrier_wait(ids_ready)

    @compat.loop_by_warp(tuning.rows, interpret)
    def _(i: jax.Array) -> None:
        row = ids_smem[i]

        def copy_row() -> None:
            row_blocks.copy_in(table_gmem.at[row, columns], rows_smem.at[i], rows_ready)

        def copy_zeros() -> None:
            row_blocks.copy_in(zeros_gmem, rows_smem.at[i], rows_ready)

        jax.lax.cond((row >= 0) & (row < vocab), copy_row, copy_zeros)

    plgpu.barrier_wait(rows_ready)
    is_whole = first + tuning.rows <= n

    if rows_smem.shape[1] == width:

        @pl.when(is_whole)
        def _() -> None:
            plgpu.copy_smem_to_gmem(rows_smem, out_gmem.at[pl.ds(first, tuning.rows)])

    by_row = jnp.logical_not(is_whole) if rows_smem.shape[1] == width else True

    @pl.when(by_row)
    def _() -> None:
        @pl.loop(0, jnp.minimum(tuning.rows, n - first))
        def _(i: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(
                rows_smem.at[i], out_gmem.at[first + i, columns], commit_group=False
            )

        plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)
