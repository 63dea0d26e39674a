"""Programs that update a donated table: what the documentation shows, and what users write.

Each takes a handle on the axis "x" and `Arguments`, of which table and state are donated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xrex

TOKENS, WIDTH = 256, 64


class Arguments(NamedTuple):
    """What the programs are given."""

    ids: Any
    update: xrex.GradientUpdate
    table: Any
    state: Any


RULE = xrex.RowwiseAdagrad(learning_rate=0.1)
Program = Callable[[xrex.AsyncEmbContextHandle, Arguments], Any]


def look(handle: xrex.AsyncEmbContextHandle, ids: Any, table: Any) -> Any:
    return xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table))


def apply(
    handle: xrex.AsyncEmbContextHandle, update: Any, table: Any, state: Any, gate: Any = None
) -> Any:
    table, state, pin = xrex.update_start(handle, RULE, update, table, state, gate=gate)
    return table, state, xrex.update_done(handle, pin)


def an_update_alone(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    return apply(handle, a.update, a.table, a.state)


def two_updates(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    table, state, _ = apply(handle, a.update, a.table, a.state)
    return apply(handle, a.update, table, state)


def a_lookup_in_flight(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    pin = xrex.lookup_start(handle, a.ids, a.table)
    updated = apply(handle, a.update, a.table, a.state, gate=pin.blocks)
    return *updated, xrex.lookup_done(handle, pin)


def two_lookups_in_flight(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    first = xrex.lookup_start(handle, a.ids, a.table)
    second = xrex.lookup_start(handle, a.ids + 7, a.table, gate=first.blocks)
    updated = apply(handle, a.update, a.table, a.state, gate=second.blocks)
    return *updated, xrex.lookup_done(handle, first), xrex.lookup_done(handle, second)


def after_a_fori_loop(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    def body(i: Any, total: Any) -> Any:
        return total + look(handle, a.ids + i, a.table)

    total = jax.lax.fori_loop(0, 3, body, jnp.zeros_like(a.update.grads))
    return *apply(handle, a.update, a.table, a.state, gate=total), total


def after_a_scan(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    def body(largest: Any, i: Any) -> Any:
        rows = look(handle, a.ids + i, a.table)
        return jnp.maximum(largest, jnp.max(rows)), rows

    largest, rows = jax.lax.scan(body, jnp.zeros((), a.table.dtype), jnp.arange(3))
    return *apply(handle, a.update, a.table, a.state, gate=rows), rows, largest


def after_a_while_loop(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    """The gradients are computed from the rows: no gate is needed."""

    def body(carry: Any) -> Any:
        i, total = carry
        return i + 1, total + look(handle, a.ids + i, a.table)

    def more(carry: Any) -> Any:
        return (carry[0] < 9) & (jnp.sum(carry[1]) < 100)

    _, total = jax.lax.while_loop(more, body, (0, jnp.zeros_like(a.update.grads)))
    return apply(handle, a.update._replace(grads=total), a.table, a.state)


def a_loop_of_steps(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    def step(carry: Any, i: Any) -> Any:
        table, state = carry
        grads = look(handle, a.ids + i, table)
        table, state, result = apply(handle, a.update._replace(grads=grads), table, state)
        return (table, state), result.norm

    return jax.lax.scan(step, (a.table, a.state), jnp.arange(3))


def a_loop_with_a_lookup_in_flight(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    """Each lookup is started before the update and done in the next step."""

    def step(carry: Any, i: Any) -> Any:
        table, state, pin = carry
        update = a.update._replace(grads=xrex.lookup_done(handle, pin))
        pin = xrex.lookup_start(handle, a.ids + i, table)
        table, state, result = apply(handle, update, table, state, gate=pin.blocks)
        return (table, state, pin), result.norm

    first = xrex.lookup_start(handle, a.ids, a.table)
    return jax.lax.scan(step, (a.table, a.state, first), jnp.arange(3))


def per_shard(handle: xrex.AsyncEmbContextHandle, a: Arguments) -> Any:
    """In a `shard_map` of the caller's own, with a lookup in flight."""

    def body(ids: Any, update: Any, table: Any, state: Any) -> Any:
        pin = xrex.lookup_start_per_shard(handle, ids, table)
        table, state, update_pin = xrex.update_start_per_shard(
            handle, RULE, update, table, state, gate=pin.blocks
        )
        rows = xrex.lookup_done_per_shard(handle, pin)
        return table, state, xrex.update_done(handle, update_pin), rows

    tokens, token_rows, columns = P("x"), P("x", None), P(None, "x")
    mapped = jax.shard_map(
        body,
        mesh=handle.mesh,
        in_specs=(tokens, xrex.GradientUpdate(P(), token_rows, tokens, P()), columns, P()),
        out_specs=(columns, P(), P(), token_rows),
        check_vma=False,
    )
    return mapped(*a)


PROGRAMS: tuple[Program, ...] = (
    an_update_alone,
    two_updates,
    a_lookup_in_flight,
    two_lookups_in_flight,
    after_a_fori_loop,
    after_a_scan,
    after_a_while_loop,
    a_loop_of_steps,
    a_loop_with_a_lookup_in_flight,
    per_shard,
)


def shapes_of(handle: xrex.AsyncEmbContextHandle, dtype: Any, vocab: int) -> Arguments:
    """Shapes of the arguments, with their shardings."""

    def shape(size: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(handle.mesh, P(*spec)))

    ids = shape((TOKENS,), jnp.int32, "x")
    return Arguments(
        ids=ids,
        update=xrex.GradientUpdate(
            unique_tokens=shape((TOKENS,), jnp.int32),  # type: ignore[arg-type]
            grads=shape((TOKENS, WIDTH), dtype, "x", None),  # type: ignore[arg-type]
            segment_ids=ids,  # type: ignore[arg-type]
            pending=shape((), jnp.bool_),  # type: ignore[arg-type]
        ),
        table=shape((vocab, WIDTH), dtype, None, "x"),
        state=jax.tree.map(
            lambda leaf: shape(leaf.shape, leaf.dtype), jax.eval_shape(lambda: RULE.init(vocab))
        ),
    )
