"""What is checked of a caller's arrays before anything is launched."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from xrex.layout.handle import AsyncEmbContextHandle

INT32 = np.iinfo(np.int32)
TABLE_DTYPES = (jnp.bfloat16, jnp.float32)


def check_devices(handle: AsyncEmbContextHandle) -> None:
    """Raises ValueError for a handle that is only good for planning."""
    if isinstance(handle.mesh, AbstractMesh):
        error = ValueError(
            f"async_emb needs devices, and the handle's mesh has none: {handle.mesh} is abstract"
        )
        error.add_note("Make the handle with a jax.sharding.Mesh, such as jax.make_mesh returns.")
        raise error


def check_vocab(vocab: int) -> None:
    """Raises ValueError unless `vocab` is a positive integer that int32 ids can reach."""
    is_integer = isinstance(vocab, int | np.integer) and not isinstance(vocab, bool)
    if not is_integer or not 0 < vocab <= INT32.max:
        raise ValueError(
            f"async_emb vocab={vocab!r} must be a positive integer of at most {INT32.max}"
        )


def check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the array has the shape."""
    if np.shape(x) != shape:
        raise ValueError(f"async_emb {name} has shape {np.shape(x)}, and must have {shape}")


def check_table(table: jax.Array | np.ndarray, width: int) -> None:
    """Raises unless a table, or one shard of it, has the width and a dtype that tables may have.

    Raises:
      ValueError: a wrong shape.
      TypeError: a wrong dtype.
    """
    if table.ndim != 2 or table.shape[1] != width:
        raise ValueError(f"async_emb table has shape {table.shape}, and must have (vocab, {width})")
    check_vocab(table.shape[0])
    if table.dtype not in TABLE_DTYPES:
        raise TypeError(f"async_emb table must be bfloat16 or float32, not {table.dtype}")


def as_int32(name: str, ids: jax.typing.ArrayLike) -> Any:
    """Integers as int32, never truncated: NumPy for a host array, else a device array or tracer.

    Raises:
      ValueError: a value that does not fit in int32.
      TypeError: not integers, or a traced array of a type wider than int32.
    """
    array: Any = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"async_emb {name} must be integers, not {array.dtype}")
    if not np.can_cast(array.dtype, np.int32):
        if isinstance(array, jax.core.Tracer):
            error = TypeError(
                f"async_emb {name} of type {array.dtype} cannot be checked in a traced function"
            )
            error.add_note("Cast them to int32, or pass them to xrex outside of jit.")
            raise error
        array = host_values(name, array)
        raise_first(name, array, (array < INT32.min) | (array > INT32.max), "does not fit in int32")
    return array.astype(np.int32, copy=False)


def host_values(name: str, ids: Any) -> np.ndarray:
    """The values of a concrete array, for a check on the host.

    Raises:
      TypeError: the array is spread over several processes.
    """
    if isinstance(ids, jax.Array) and not ids.is_fully_addressable:
        error = TypeError(
            f"async_emb {name} are spread over several processes, so their values cannot be "
            "checked on the host"
        )
        error.add_note("Pass int32 ids, and out_of_range='zero' or 'clip'.")
        raise error
    return np.asarray(ids)


def raise_first(name: str, values: np.ndarray, bad: np.ndarray, complaint: str) -> None:
    """Raises ValueError for the first bad value, if there is one."""
    if bad.any():
        position = int(np.argmax(bad.ravel()))
        value = values.ravel()[position]
        raise ValueError(f"async_emb {name}: id {value} at position {position} {complaint}")


def check_fits(name: str, leaf: Any) -> None:
    """Raises ValueError for host integers that JAX would wrap: with x64 off, types have 32 bits."""
    if isinstance(leaf, bool | jax.Array | jax.ShapeDtypeStruct):
        return
    if isinstance(leaf, int):  # Of any size: NumPy has no type for the largest.
        extremes, narrow = [leaf], jnp.result_type(int)
    else:
        array = np.asarray(leaf)
        if array.dtype.kind not in "iu" or not array.size:
            return
        extremes, narrow = [array.min(), array.max()], jnp.result_type(array)
    info = np.iinfo(narrow)
    for extreme in extremes:
        if not info.min <= extreme <= info.max:
            raise ValueError(
                f"{name} has the value {extreme}, which does not fit in {jnp.dtype(narrow).name}, "
                "as integers do on device"
            )
