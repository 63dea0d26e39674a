"""Tables begin on the devices that hold them, shard by shard; none is ever whole on a host."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from xrex import placement
from xrex.embeddings.stack import Plan
from xrex.embeddings.table import Table
from xrex.layout.handle import AsyncEmbContextHandle


def make_stack_table(
    plan: Plan, tables: Mapping[str, Table], handle: AsyncEmbContextHandle, key: jax.Array
) -> jax.Array:
    """The stack's table before the first update, (vocab, width).

    A table's values depend on the key and its name alone. One table after the other is written into
    the stack, so that there is room for the stack and one table.
    """
    width, dtype = handle.emb_width, next(iter(tables.values())).dtype
    spec = placement.table_spec(handle)
    # Under explicit axes random numbers are not sharded by themselves.
    mesh = cast(Mesh, handle.mesh)
    mesh = Mesh(mesh.devices, mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    # An array of one device would not go together with those of others.
    key = placement.put_copy(key, NamedSharding(mesh, placement.REPLICATED))
    stack = jax.jit(partial(jnp.zeros, (plan.vocab, width), dtype), out_shardings=sharding)()
    for name, table in tables.items():
        first = plan.first_rows[name]

        def write(stack: jax.Array, key: jax.Array, table: Table, first: int) -> jax.Array:
            values = jax.lax.with_sharding_constraint(table.begin(key), sharding)
            return jax.lax.dynamic_update_slice(stack, values, (first, 0))

        write_table = jax.jit(
            partial(write, table=table, first=first), donate_argnums=0, out_shardings=sharding
        )
        stack = write_table(stack, key_of(key, name))
    return jax.device_put(stack, placement.sharding(handle, spec, 2))


def key_of(key: jax.Array, name: str) -> jax.Array:
    """A table's own key."""
    digest = hashlib.sha256(name.encode()).digest()
    for start in (0, 4):
        key = jax.random.fold_in(key, int.from_bytes(digest[start : start + 4], "little"))
    return key
