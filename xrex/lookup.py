"""Looking rows up: `lookup_start` sends them on their way, `lookup_done` puts them together.

The global functions take whole arrays, eagerly or under `jax.jit`; those that end in `_per_shard`
are for people who write their own `shard_map`, and take one rank's arrays.
"""

from typing import Any, NamedTuple, NoReturn

import jax

from pallas_kernels import api as kernels
from xrex import exchange, placement
from xrex.checks import check_shape, check_table
from xrex.gate import gated
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.pooling import Bags, pool
from xrex.tokens import check_token_ids, gather_token_ids_per_shard, resolve_ids


class LookupPin(NamedTuple):
    """Rows in flight, as `lookup_done` takes them.

    Attributes:
      blocks: each rank's columns of the tokens.
        # shape=(group_size, tokens_per_batch, shard_width), the table's dtype, sharded over the
        # data axis (per shard: (group_size, tokens_per_rank, shard_width))
    """

    blocks: jax.Array


def lookup_start(
    handle: AsyncEmbContextHandle,
    token_ids: jax.typing.ArrayLike,
    table: jax.Array,
    *,
    gate: jax.Array | None = None,
) -> LookupPin:
    """Reads a batch's rows and starts their exchange. Global arrays.

    The rows are those of the table as it is passed in: updates that come later do not reach them.

    Args:
      handle: the layout.
      token_ids: (tokens_per_batch,) int32, or a host array of any integer type whose values fit.
      table: (vocab, emb_width) bfloat16 or float32, sharded `P(None, table_axis)`. Not donated.
      gate: an array that must be computed before the exchange may be issued; its value is unused.
        With it, a lookup waits for another one that is in flight:

          first = lookup_start(handle, token_ids, table)
          second = lookup_start(handle, more_ids, table, gate=first.blocks)

        An update of the table that is gated by `second.blocks` then waits for both.

    Raises:
      ValueError: a wrong shape, an id that does not fit in int32 or, with out_of_range="raise",
        one outside the table.
      TypeError: ids that are not integers, a table of another dtype, or `jax.grad` with respect to
        the table: its gradients are those of `lookup_done`'s rows, which `update_start` takes.
    """
    check_table(table, handle.emb_width)
    ids = check_token_ids(handle, token_ids, table.shape[0])
    table = placement.place(handle, table, placement.table_spec(handle))
    return _lookup_start(handle, ids, table, gate)


def lookup_done(handle: AsyncEmbContextHandle, pin: LookupPin) -> jax.Array:
    """Puts the rows of a lookup together. Global arrays.

    Args:
      handle: the layout with which the lookup was started.
      pin: what `lookup_start` returned.

    Returns:
      (tokens_per_batch, emb_width) of the table's dtype, sharded `P(data_axis, None)`: the table's
      rows bit for bit.
    """
    shape = (handle.group_size, handle.tokens_per_batch, handle.shard_width)
    check_shape("pin.blocks", pin.blocks, shape)
    return _lookup_done(handle, pin)


def lookup_start_per_shard(
    handle: AsyncEmbContextHandle,
    token_ids: jax.Array,
    table: jax.Array,
    *,
    gate: jax.Array | None = None,
) -> LookupPin:
    """`lookup_start` for one shard, inside `shard_map`.

    Args:
      handle: the layout.
      token_ids: (tokens_per_rank,) int32, this rank's.
      table: (vocab, shard_width), this rank's columns.
      gate: as in `lookup_start`.
    """
    check_table(table, handle.shard_width)
    all_ids = gather_token_ids_per_shard(handle, token_ids, table.shape[0])
    rows = gather_for_exchange(handle, all_ids, table)
    return LookupPin(exchange.exchange_blocks(handle, gated(handle, rows, gate)))


def lookup_done_per_shard(handle: AsyncEmbContextHandle, pin: LookupPin) -> jax.Array:
    """`lookup_done` for one shard, inside `shard_map`: (tokens_per_rank, emb_width)."""
    shape = (handle.group_size, handle.tokens_per_rank, handle.shard_width)
    check_shape("pin.blocks", pin.blocks, shape)
    return exchange.blocks_to_rows(pin.blocks)


def gather_for_exchange(
    handle: AsyncEmbContextHandle, all_ids: jax.Array, table: jax.Array, bags: Bags | None = None
) -> jax.Array:
    """This rank's columns of every rank's rows, bags pooled: (G * T,), (vocab, w) -> (G, O, w)."""
    rows = resolve_ids(handle, all_ids, table.shape[0]).read
    gathered = kernels.gather_rows(
        _not_differentiable(table), rows, implementation=handle.implementation
    )
    if bags is not None:
        return pool(handle, gathered, bags)
    return gathered.reshape(handle.group_size, -1, table.shape[1])


def exchange_rows(handle: AsyncEmbContextHandle, rows: jax.Array) -> LookupPin:
    """Exchanges gathered rows. Global arrays; in a trace.

    Args:
      handle: the layout.
      rows: (group_size, tokens_per_rank, emb_width), as `placement.send_spec` has it.
    """
    spec = placement.received_spec(handle)
    exchanged = placement.shard_map(
        handle,
        lambda rows: exchange.exchange_blocks(handle, rows),
        (placement.send_spec(handle),),
        spec,
    )
    with jax.named_scope("xrex.exchange_rows"):
        return LookupPin(exchanged(rows))


@jax.custom_jvp
def _not_differentiable(table: jax.Array) -> jax.Array:
    """The same table, for which `jax.grad` is an error: it would be zeros, or dense."""
    return table


@_not_differentiable.defjvp
def _refuse_tangent(primals: Any, tangents: Any) -> NoReturn:
    del primals, tangents
    error = TypeError("async_emb lookups cannot be differentiated with respect to the table")
    error.add_note(
        "Differentiate with respect to the rows that lookup_done returns, and pass those gradients "
        "to update_start."
    )
    raise error


@jax.jit(static_argnums=0)
def _lookup_start(
    handle: AsyncEmbContextHandle, ids: jax.Array, table: jax.Array, gate: jax.Array | None
) -> LookupPin:
    specs = (placement.token_spec(handle), placement.table_spec(handle))
    gather = placement.shard_map(
        handle,
        lambda ids, table: gather_for_exchange(handle, exchange.gather_tokens(handle, ids), table),
        specs,
        placement.send_spec(handle),
    )
    with jax.named_scope("xrex.lookup_start"):
        rows = gather(*placement.place(handle, (ids, table), specs))
        return exchange_rows(handle, gated(handle, rows, gate))


@jax.jit(static_argnums=0)
def _lookup_done(handle: AsyncEmbContextHandle, pin: LookupPin) -> jax.Array:
    spec = placement.received_spec(handle)
    assemble = placement.shard_map(
        handle, exchange.blocks_to_rows, (spec,), placement.token_rows_spec(handle)
    )
    with jax.named_scope("xrex.lookup_done"):
        return assemble(placement.place(handle, pin.blocks, spec))
