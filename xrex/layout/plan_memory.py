"""Bytes that a layout takes on each rank: table, state, what is in flight, what a step holds."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.plan_wire import RankIds
from xrex.rules.base import UpdateRule

# What GPUs are sold with, in the units of their makers.
DEVICE_BYTES = (80 * 10**9, 141 * 10**9)
_MOST_ROWS = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class ArrayPlan:
    """One array that a rank holds.

    Attributes:
      group: "table", "state", "pins" (what is in flight between two steps: a started lookup, and
        the gradients of the deferred update) or "temporary".
      name: what it is.
      shape: a rank's.
      dtype: its name.
      bytes: of a rank.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Capacity:
    """The largest table that fits a device: beside state, pins, temporary and what is reserved.

    Attributes:
      device_bytes: of the device.
      vocab: rows; 0 if nothing fits.
    """

    device_bytes: int
    vocab: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a rank.

    `table`, `state` and `pins` are arguments of the compiled step, to the byte. `temporary` is what
    an update holds at its peak with the reference kernels: gradients as they arrive, the same in
    float32, their sums by row, and the segment ids. A program compiled for GPUs holds about as much
    or less (`tools/compile_for_gpu.py` says how much). It leaves out the dense model, with the rows
    and gradients that this holds while it runs.

    Attributes:
      table: None when the vocabulary is not known.
      state: of the update rule; None when the vocabulary is not known.
      pins: what is in flight between two steps.
      temporary: what a step holds beside, at its peak.
      bytes_per_row: of table and state together, for each row of the vocabulary.
      reserved: left to the dense model, by the caller's word.
      arrays: all of the above, one by one.
      largest_vocab: for each size of device.
    """

    table: int | None
    state: int | None
    pins: int
    temporary: int
    bytes_per_row: int
    reserved: int
    arrays: tuple[ArrayPlan, ...]
    largest_vocab: tuple[Capacity, ...]

    @property
    def total(self) -> int | None:
        """Table, state, pins and temporary; None when the vocabulary is not known."""
        if self.table is None or self.state is None:
            return None
        return self.table + self.state + self.pins + self.temporary


def plan_memory(
    handle: AsyncEmbContextHandle,
    vocab: int | None,
    dtype: np.dtype,
    rule: UpdateRule,
    reserved_bytes: int,
) -> MemoryPlan:
    """Plans the bytes of a rank; see `xrex.layout.plan.plan_layout` for the arguments."""
    arrays = plan_arrays(handle, vocab, dtype, rule)
    pins, temporary = group_bytes(arrays, "pins"), group_bytes(arrays, "temporary")
    one_row, two_rows = (
        sum(array.bytes for array in (_table(handle, dtype, rows), *_state(handle, rule, rows)))
        for rows in (1, 2)
    )
    bytes_per_row = two_rows - one_row
    fixed = one_row - bytes_per_row + reserved_bytes + pins + temporary
    return MemoryPlan(
        table=None if vocab is None else group_bytes(arrays, "table"),
        state=None if vocab is None else group_bytes(arrays, "state"),
        pins=pins,
        temporary=temporary,
        bytes_per_row=bytes_per_row,
        reserved=reserved_bytes,
        arrays=arrays,
        largest_vocab=tuple(
            Capacity(device, min(_MOST_ROWS, max(0, (device - fixed) // bytes_per_row)))
            for device in DEVICE_BYTES
        ),
    )


def plan_arrays(
    handle: AsyncEmbContextHandle,
    vocab: int | None,
    dtype: np.dtype,
    rule: UpdateRule,
    rank_ids: RankIds | None = None,
) -> tuple[ArrayPlan, ...]:
    """What a rank holds; see `plan_memory` for the arguments, and `plan_wire` for `rank_ids`."""
    ids = rank_ids or RankIds(handle.tokens_per_rank)
    known = () if vocab is None else (_table(handle, dtype, vocab), *_state(handle, rule, vocab))
    return (*known, *_pins(handle, dtype, ids), *_temporary(handle, dtype, ids))


def group_bytes(arrays: Iterable[ArrayPlan], group: str) -> int:
    """The bytes of all arrays of a group."""
    return sum(array.bytes for array in arrays if array.group == group)


def state_bytes_per_row(handle: AsyncEmbContextHandle, rule: UpdateRule) -> int:
    """What a rule's state grows by with each row of the vocabulary."""
    one, two = (sum(array.bytes for array in _state(handle, rule, rows)) for rows in (1, 2))
    return two - one


def _table(handle: AsyncEmbContextHandle, dtype: np.dtype, vocab: int) -> ArrayPlan:
    return _array("table", "table", (vocab, handle.shard_width), dtype)


def _state(handle: AsyncEmbContextHandle, rule: UpdateRule, vocab: int) -> Iterator[ArrayPlan]:
    """The state's leaves; those of two dimensions are sharded like the table."""
    shapes = jax.eval_shape(lambda: rule.init(vocab))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        shape = (
            (leaf.shape[0], leaf.shape[1] // handle.group_size) if leaf.ndim == 2 else leaf.shape
        )
        yield _array("state", jax.tree_util.keystr(path).lstrip("."), shape, leaf.dtype)


def _pins(handle: AsyncEmbContextHandle, dtype: np.dtype, rank_ids: RankIds) -> Iterator[ArrayPlan]:
    """`current_lookup` and `previous_update` of `xrex.training.state.PipelineState`, a rank's."""
    rows, width, int32 = handle.tokens_per_rank, handle.shard_width, np.dtype(np.int32)
    for name, shape, kind in (
        ("lookup: rows in flight", (handle.group_size, rows, width), dtype),
        ("lookup: unique tokens", (handle.num_unique,), int32),
        ("lookup: segment ids", (rank_ids.ids,), int32),
        ("lookup: dropped", (), int32),
        *_bags("lookup", rank_ids),
        ("update: gradients", (rows, handle.emb_width), dtype),
        ("update: unique tokens", (handle.num_unique,), int32),
        ("update: segment ids", (rank_ids.ids,), int32),
        ("update: pending", (), np.dtype(bool)),
        *_bags("update", rank_ids),
    ):
        yield _array("pins", name, shape, kind)


def _bags(of: str, rank_ids: RankIds) -> Iterator[tuple[str, tuple[int, ...], np.dtype]]:
    """The bags of what is in flight, where there are any."""
    if rank_ids.bags:
        yield f"{of}: lengths of bags", (rank_ids.bags,), np.dtype(np.int32)
        yield f"{of}: scales of bags", (rank_ids.bags,), np.dtype(np.float32)
    if rank_ids.weights:
        yield f"{of}: weights in bags", (rank_ids.weights,), np.dtype(np.float32)


def _temporary(
    handle: AsyncEmbContextHandle, dtype: np.dtype, rank_ids: RankIds
) -> Iterator[ArrayPlan]:
    """What an update holds at its peak, beside its arguments."""
    rows, ids = handle.tokens_per_batch, rank_ids.ids * handle.group_size
    width = handle.shard_width
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    for name, shape, kind in (
        ("gradients received", (rows, width), dtype),
        ("gradients in float32", (ids, width), float32),
        ("sums by row", (handle.num_unique, width), float32),
        ("square sums by row", (handle.num_unique,), float32),
        ("segment ids of all ranks", (ids,), int32),
        ("rows to sum into", (ids,), int32),
    ):
        yield _array("temporary", name, shape, kind)


def _array(group: str, name: str, shape: tuple[int, ...], dtype: Any) -> ArrayPlan:
    dtype = np.dtype(dtype)
    return ArrayPlan(group, name, shape, dtype.name, math.prod(shape) * dtype.itemsize)
