"""The layouts that the unit tests go through, and inputs whose arithmetic is exact on all of them.

Random layouts are the property suite's; these are the ones worth a name in a failure.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xrex

TOKENS = 48
WIDTH = 24
VOCAB = 32


@dataclass(frozen=True)
class LayoutCase:
    """One layout: 48 tokens and 24 columns divide over 1, 2, 3, 4, 6 and 8 ranks."""

    name: str
    axes: tuple[tuple[str, int], ...]
    table_axis: tuple[str, ...]
    data_axis: tuple[str, ...]
    axis_type: AxisType = AxisType.Auto
    reverse_devices: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def mesh(self) -> Mesh:
        return mesh(dict(self.axes), axis_type=self.axis_type, reverse=self.reverse_devices)

    def handle(self, **changes: Any) -> xrex.AsyncEmbContextHandle:
        arguments = {
            "data_axis": self.data_axis,
            "tokens_per_batch": TOKENS,
            "emb_width": WIDTH,
            "num_unique": VOCAB,
            "num_devices_per_node": 8,
        }
        return xrex.make_context_handle(self.mesh, self.table_axis, **(arguments | changes))


def _line(size: int, **options: Any) -> LayoutCase:
    return LayoutCase(f"{size}", (("x", size),), ("x",), ("x",), **options)


_GRID = (("a", 2), ("b", 4))
_TALL = (("a", 4), ("b", 2))
_CUBE = (("a", 2), ("b", 2), ("c", 2))

LAYOUTS = (
    *(_line(size) for size in (1, 2, 3, 4, 6, 8)),
    LayoutCase("2x4", _GRID, ("a", "b"), ("a", "b")),
    LayoutCase("2x4-swapped", _GRID, ("b", "a"), ("a", "b")),
    LayoutCase("2x4-copies", _GRID, ("b",), ("b",)),
    LayoutCase("4x2-data-swapped", _TALL, ("a", "b"), ("b", "a"), reverse_devices=True),
    LayoutCase("4x2-copies-explicit", _TALL, ("b",), ("b",), AxisType.Explicit),
    LayoutCase("2x2x2-permuted", _CUBE, ("c", "a", "b"), ("b", "c", "a")),
    LayoutCase("2x2x2-copies", _CUBE, ("c", "a"), ("a", "c")),
    LayoutCase("2x2x2-explicit", _CUBE, ("b", "c", "a"), ("a", "b", "c"), AxisType.Explicit),
    LayoutCase("4x2-four-copies", _TALL, ("b",), ("b",), reverse_devices=True),
    LayoutCase("ones", (("r", 1), ("x", 2), ("s", 1)), ("x", "s"), ("s", "r", "x")),
)

# A line, a permuted order, a layout with copies, explicit axes: for what does not depend on more.
FEW_LAYOUTS = tuple(
    case for case in LAYOUTS if case.name in ("4", "2x2x2-permuted", "4x2-copies-explicit")
)


def mesh(axes: dict[str, int], *, axis_type: Any = AxisType.Auto, reverse: bool = False) -> Mesh:
    """A mesh of the first CPU devices."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    devices = devices[::-1] if reverse else devices
    return Mesh(
        np.array(devices).reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(axis_type,) * len(axes),
    )


def line(size: int, **arguments: Any) -> xrex.AsyncEmbContextHandle:
    """A handle on one axis "x" of that many ranks."""
    defaults = {"data_axis": "x", "num_devices_per_node": 8}
    return xrex.make_context_handle(mesh({"x": size}), "x", **(defaults | arguments))


def put(handle: xrex.AsyncEmbContextHandle, array: Any, *spec: Any) -> jax.Array:
    """Places a host array; `spec` as of a PartitionSpec, nothing for replicated."""
    return jax.device_put(array, NamedSharding(handle.mesh, P(*spec)))


def put_table(handle: xrex.AsyncEmbContextHandle, table: np.ndarray) -> jax.Array:
    """Places a table by its columns."""
    return put(handle, table, None, handle.table_axis)


@functools.cache
def jitted(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """`jax.jit` of the function over its leading static arguments, compiled once a session."""
    return jax.jit(functools.partial(function, *static))


def random_table(seed: int, dtype: Any, vocab: int = VOCAB, width: int = WIDTH) -> np.ndarray:
    """Small integers, exact in both table types."""
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 9, (vocab, width)).astype(dtype)


def random_bits(seed: int, dtype: Any, vocab: int = VOCAB, width: int = WIDTH) -> np.ndarray:
    """Any bits at all: NaNs with payloads, infinities, subnormals and both zeros."""
    rng = np.random.default_rng(seed)
    itemsize = np.dtype(dtype).itemsize
    table = np.frombuffer(rng.bytes(vocab * width * itemsize), dtype).reshape(vocab, width).copy()
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-40], np.float32).astype(dtype)
    table.ravel()[: len(special)] = special[: table.size]
    return table


def random_ids(seed: int, tokens: int = TOKENS, vocab: int = VOCAB) -> np.ndarray:
    """Ids with many repeats, some of them outside the table."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-3, vocab + 3, tokens).astype(np.int32)
    ids[:2] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return rng.permutation(ids)


def exact_gradients(seed: int, ids: np.ndarray, width: int = WIDTH, dtype: Any = np.float32) -> Any:
    """Gradients, (tokens, width), with which updates without decay have one right answer in bits.

    Integers, so that sums and their squares are exact in any order; and each id's sum is a power of
    two in each column, of either sign, so that its product with the step size is exact, and fusing
    that product with the addition to the row changes nothing.
    """
    rng = np.random.default_rng(seed)
    grads = rng.integers(-2, 3, (len(ids), width))
    for token in np.unique(ids):
        positions = np.flatnonzero(ids == token)
        wanted = rng.choice([-8, -4, -2, -1, 1, 2, 4, 8], width)
        grads[positions[0]] = wanted - grads[positions[1:]].sum(axis=0)
    return grads.astype(dtype)
