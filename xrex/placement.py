"""Every PartitionSpec of xrex, written once, and the way arrays get to them."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from xrex.checks import check_devices
from xrex.layout.handle import AsyncEmbContextHandle

REPLICATED = P()


def table_spec(handle: AsyncEmbContextHandle) -> P:
    """The table, (vocab, emb_width): its columns over the table axis."""
    return P(None, handle.table_axis)


def token_spec(handle: AsyncEmbContextHandle) -> P:
    """One value per token, (tokens_per_batch,): over the data axis."""
    return P(handle.data_axis)


def token_specs(handle: AsyncEmbContextHandle, tree: Any) -> Any:
    """`token_spec` for each leaf of a tree."""
    return jax.tree.map(lambda _: token_spec(handle), tree)


def token_rows_spec(handle: AsyncEmbContextHandle) -> P:
    """One row per token, (tokens_per_batch, emb_width): tokens over the data axis, rows whole."""
    return P(handle.data_axis, None)


def per_example_spec(handle: AsyncEmbContextHandle, ndim: int) -> P:
    """Any number of values per token or example, in `ndim` dimensions."""
    return P(handle.data_axis, *[None] * (ndim - 1))


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
    return jax.tree.map(
        lambda leaf: table_spec(handle) if np.ndim(leaf) == 2 else REPLICATED, state
    )


def shard_map(
    handle: AsyncEmbContextHandle, body: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` over the handle's mesh.

    Replication is not checked by type: the table is replicated over axes of size 1 and over axes
    outside of both tuples in ways that only the layout's requirements can see.
    """
    check_devices(handle)
    return jax.shard_map(
        body, mesh=handle.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def sharding(handle: AsyncEmbContextHandle, spec: P, ndim: int) -> NamedSharding:
    """The sharding of an array of so many dimensions: one object for each, in every call."""
    check_devices(handle)
    if AxisType.Explicit in handle.mesh.axis_types:
        # As computations on explicit axes return it: P() and P(None) are two types to jax.jit.
        spec = P(*spec, *[None] * (ndim - len(spec)))
    return NamedSharding(cast(Mesh, handle.mesh), spec)


def place(handle: AsyncEmbContextHandle, tree: Any, specs: Any) -> Any:
    """Brings arrays to their specs: by a transfer outside of jit, by resharding in a trace.

    What lies in NumPy's memory is copied: the caller may write to it as soon as this returns.
    """
    return jax.tree.map(
        lambda leaf, spec: _place_leaf(handle, leaf, spec),
        tree,
        specs,
        is_leaf=lambda leaf: leaf is None,
    )


def _place_leaf(handle: AsyncEmbContextHandle, leaf: Any, spec: P) -> Any:
    if leaf is None:
        return None
    wanted = sharding(handle, spec, np.ndim(leaf))
    if not isinstance(leaf, jax.core.Tracer):
        return put(leaf, wanted)
    if AxisType.Explicit in handle.mesh.axis_types:
        return jax.sharding.reshard(leaf, NamedSharding(wanted.mesh, _explicit_part(handle, spec)))
    return leaf


def as_returned(handle: AsyncEmbContextHandle, leaf: jax.Array) -> Sharding:
    """The sharding of an array on the mesh, as a program that keeps it returns it."""
    if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == handle.mesh:
        return sharding(handle, leaf.sharding.spec, leaf.ndim)
    return leaf.sharding


def put(leaf: Any, wanted: Sharding) -> jax.Array:
    """One array, or number, on its devices; with a type of its own, and no memory of NumPy's.

    Without the copy XLA takes over the memory of a NumPy array that happens to be aligned to 64
    bytes, and reads it some time after the call.
    """
    if not isinstance(leaf, jax.Array):
        leaf = np.array(leaf, dtype=jnp.result_type(leaf), copy=True)
    elif is_weak(leaf):  # As of jnp.asarray(1.0): a type that no step returns.
        leaf = leaf.astype(leaf.dtype)
    return jax.device_put(leaf, wanted)


def is_weak(leaf: jax.Array) -> bool:
    """Whether an array has a weak type, as Python numbers do; random keys have none."""
    return getattr(leaf, "weak_type", False)


def put_copy(leaf: Any, wanted: Sharding) -> jax.Array:
    """`put` for what a caller may write to later: JAX arrays on CPUs may be NumPy's memory, too.

    So are those of `jnp.from_dlpack` and, at times, of `jnp.asarray` and `jax.device_put`.
    """
    return put(unless_numpys(leaf), wanted)


def unless_numpys(leaf: Any) -> Any:
    """The leaf; a copy, or NumPy's, which is copied later, where it may be NumPy's memory."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
        return leaf
    devices: list[Any] = list(leaf.sharding.device_set)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    if is_key or not leaf.is_fully_addressable or devices[0].platform != "cpu":
        return leaf
    if len(devices) == 1:
        return np.asarray(leaf)
    # Ready before this returns: the caller may write to the memory that is read.
    return jax.block_until_ready(jnp.copy(leaf))


def constrain(handle: AsyncEmbContextHandle, x: jax.Array, spec: P) -> jax.Array:
    """Holds a traced array to its spec; explicit axes carry it in the type."""
    if AxisType.Explicit in handle.mesh.axis_types:
        return place(handle, x, spec)
    return jax.lax.with_sharding_constraint(x, sharding(handle, spec, x.ndim))


@jax.jit(static_argnums=(0, 2))
def first_entries(handle: AsyncEmbContextHandle, x: jax.Array, count: int) -> jax.Array:
    """The first entries of an array, replicated: they need not divide evenly."""
    return constrain(handle, x, REPLICATED)[:count]


def is_on_mesh(handle: AsyncEmbContextHandle, leaf: jax.Array) -> bool:
    """Whether an array lies on the devices of the mesh, all of them, in a sharding of its own."""
    return isinstance(leaf.sharding, NamedSharding) and leaf.sharding.device_set == set(
        cast(Mesh, handle.mesh).devices.flat
    )


def _explicit_part(handle: AsyncEmbContextHandle, spec: P) -> P:
    """The spec without the axes of type Auto, over which only the compiler may shard."""
    types = dict(zip(handle.mesh.axis_names, handle.mesh.axis_types, strict=True))

    def explicit(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(axis for axis in axes if types[axis] == AxisType.Explicit) or None

    return P(*map(explicit, spec))
