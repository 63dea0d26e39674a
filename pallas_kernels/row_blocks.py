"""How rows are cut into blocks, copied and laid out in registers: what the row kernels share.

Words: a *split* is a part of a row's columns that one block of threads handles (most rows have one
split); a *tile* is the part of a block that the 128 threads of a warpgroup hold in registers, four
values per thread.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

LANES = 32
WARPS = 4
# Values of one thread that lie side by side in a row: 16 bytes of float32, 8 of bfloat16.
VECTOR = 4
# Bulk copies move multiples of 16 bytes between addresses that are multiples of 16.
COPY_BYTES = 16

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def unsupported_rows(width: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernels cannot handle such rows, or None if they can."""
    dtype = jnp.dtype(dtype)
    if dtype not in _DTYPES:
        return f"the kernels take bfloat16 and float32, not {dtype}"
    if width <= 0 or width * dtype.itemsize % COPY_BYTES:
        return (
            f"a row of {width} x {dtype} is {width * dtype.itemsize} bytes, "
            f"and the kernels need a positive multiple of {COPY_BYTES}"
        )
    return None


def check_rows(width: int, dtype: jax.typing.DTypeLike) -> None:
    """Raises NotImplementedError for rows that the kernels cannot handle."""
    reason = unsupported_rows(width, dtype)
    if reason is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")


class Tile(NamedTuple):
    """A block's part in registers: (rows, columns) of `VECTOR` values per thread."""

    rows: int
    columns: int
    layout: Any  # of a (rows, columns) array; `.reduce(1)` is that of one value per row


def _column_lanes(width: int, vector: int = VECTOR) -> int:
    """How many lanes of a warp share a row: a power of two that divides the row's vectors."""
    vectors = width // vector
    return min(LANES, vectors & -vectors)


def tile(width: int) -> Tile:
    """The tile for rows of `width` values; its columns divide the width."""
    across = _column_lanes(width)
    down = LANES // across
    rows, columns = WARPS * down, VECTOR * across
    layout = mgpu.TiledLayout(
        mgpu.fragmented_array.Tiling(((rows, columns), (down, columns), (1, VECTOR))),
        warp_dims=(-6,),
        lane_dims=(-4, -3),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return Tile(rows, columns, _as_layout(layout))


def row_layout(width: int) -> Any:
    """The layout of a single row, (1, width); threads left over hold copies."""
    # A row of one vector is given to two threads: JAX 0.10.2 cannot store what all threads hold.
    vector = VECTOR if width > VECTOR else VECTOR // 2
    across = _column_lanes(width, vector)
    vectors = width // vector // across
    warps = min(WARPS, vectors & -vectors)
    replicated = mgpu.fragmented_array.Replicated
    layout = mgpu.TiledLayout(
        mgpu.fragmented_array.Tiling(
            ((1, warps * across * vector), (1, across * vector), (1, vector))
        ),
        warp_dims=_spread(-5, warps, WARPS, replicated),
        lane_dims=_spread(-3, across, LANES, replicated),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return _as_layout(layout)


def _spread(dimension: int, size: int, of: int, replicated: Any) -> tuple[Any, ...]:
    """`of` lanes or warps over a dimension of that size; what is left over holds copies."""
    if size == of:
        return (dimension,)
    return (replicated(of),) if size == 1 else (dimension, replicated(of // size))


def _as_layout(layout: Any) -> Any:
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def splits(width: int, limit: int) -> int:
    """The smallest number of equal splits of a row that are at most `limit` values wide each.

    Splits are multiples of 8 values (4 if the row is an odd multiple of 4), so that the bytes of
    each are a multiple of 16. A row without fitting divisors gets narrower splits than it might.
    """
    unit = math.gcd(width, 8)
    units = width // unit
    for count in range(1, units + 1):
        if units % count == 0 and width // count <= limit:
            return count
    return units


def check_tuning(rows: int, splits: int, width: int, multiple: int) -> None:
    """Raises ValueError where the blocks of a tuning do not fit the rows."""
    if width % splits or rows <= 0 or rows % multiple:
        raise ValueError(
            f"tuning of {rows} rows and {splits} splits does not fit rows of {width} values: "
            f"splits must divide the width, and rows must be a positive multiple of {multiple}"
        )


def copy_in(source: Any, destination: Any, barrier: Any) -> None:
    """Starts a copy into shared memory, within the bounds of both arrays; `barrier` tells its end.

    Promising the bounds makes it a bulk copy: 16 bytes and up, at any address that is a multiple of
    16. Any other mode needs a tensor map, and addresses in shared memory that are multiples of 128.
    """
    plgpu.copy_gmem_to_smem(
        source, destination, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    )


def taker(refs: Sequence[Any]) -> Callable[[int], list[Any]]:
    """Hands out the references of a kernel from the front, as many as asked for."""
    remaining = list(refs)

    def take(n: int) -> list[Any]:
        taken = remaining[:n]
        del remaining[:n]
        return taken

    return take


def ceil_to(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple
