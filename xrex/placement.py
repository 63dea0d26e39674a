"""Every PartitionSpec of xrex, written once, and the way arrays get to them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xrex.layout.handle import AsyncEmbContextHandle

REPLICATED = P()


def table_spec(handle: AsyncEmbContextHandle) -> P:
    """The table, (vocab, emb_width): its columns over the table axis."""
    return P(None, handle.table_axis)


def token_spec(handle: AsyncEmbContextHandle) -> P:
    """One value a token, (tokens_per_batch,): over the data axis."""
    return P(handle.data_axis)


def token_rows_spec(handle: AsyncEmbContextHandle) -> P:
    """One row a token, (tokens_per_batch, emb_width): tokens over the data axis, rows whole."""
    return P(handle.data_axis, None)


def send_spec(handle: AsyncEmbContextHandle) -> P:
    """Rows about to be sent, (group_size, tokens_per_rank, emb_width).

    A rank holds its columns of every rank's tokens; axis 0 is the rank that wants them.
    """
    return P(None, None, handle.table_axis)


def received_spec(handle: AsyncEmbContextHandle) -> P:
    """Rows as they arrive, (group_size, tokens_per_batch, shard_width).

    A rank holds every rank's columns of its own tokens; axis 0 is the rank that sent them.
    """
    return P(None, handle.data_axis, None)


def micro_batch_spec(handle: AsyncEmbContextHandle) -> P:
    """Token arrays cut into micro-batches, (micro_batches, tokens, ...)."""
    return P(None, handle.data_axis)


def state_specs(handle: AsyncEmbContextHandle, state: Any) -> Any:
    """The specs of an update rule's state.

    A leaf of two dimensions is a slot table, sharded like the table; every other leaf (one value a
    row, a clock) is replicated.
    """
    return jax.tree.map(lambda leaf: table_spec(handle) if leaf.ndim == 2 else REPLICATED, state)


def shard_map(
    handle: AsyncEmbContextHandle, body: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` over the handle's mesh.

    Replication is not checked by type: the table is replicated over axes of size 1 and over axes
    outside of both tuples in ways that only the layout's rules can see.
    """
    return jax.shard_map(
        body, mesh=handle.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def place(handle: AsyncEmbContextHandle, tree: Any, specs: Any) -> Any:
    """Brings arrays to their specs: by a transfer outside of jit, by resharding in a trace."""
    return jax.tree.map(
        lambda leaf, spec: _place_leaf(handle, leaf, spec),
        tree,
        specs,
        is_leaf=lambda leaf: leaf is None,
    )


def _place_leaf(handle: AsyncEmbContextHandle, leaf: Any, spec: P) -> Any:
    if leaf is None:
        return None
    explicit = AxisType.Explicit in handle.mesh.axis_types
    if explicit:
        # As computations on explicit axes return it: P() and P(None) are two types to jax.jit.
        spec = P(*spec, *[None] * (np.ndim(leaf) - len(spec)))
    if not isinstance(leaf, jax.core.Tracer):
        return jax.device_put(leaf, NamedSharding(handle.mesh, spec))
    if explicit:
        return jax.sharding.reshard(leaf, NamedSharding(handle.mesh, _explicit_part(handle, spec)))
    return leaf


def _explicit_part(handle: AsyncEmbContextHandle, spec: P) -> P:
    """The spec without the axes of type Auto, over which only the compiler may shard."""
    types = dict(zip(handle.mesh.axis_names, handle.mesh.axis_types, strict=True))

    def explicit(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(axis for axis in axes if types[axis] == AxisType.Explicit) or None

    return P(*map(explicit, spec))
