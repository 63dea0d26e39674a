"""Training rows: `update_start` exchanges and applies gradients, `update_done` tells how it went.

The global functions take whole arrays, eagerly or under `jax.jit`; those that end in `_per_shard`
are for people who write their own `shard_map`, and take one rank's arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import api as kernels
from xrex import exchange, placement
from xrex.checks import TABLE_DTYPES, as_int32, check_shape, check_table
from xrex.gate import gated
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.pooling import Bags, gather_ids_and_bags, spread
from xrex.rules.base import TouchedRows, UpdateRule, check_state, is_finite
from xrex.tokens import UniqueTokens


class GradientUpdate(NamedTuple):
    """One batch's gradients, as `update_start` takes them.

    Attributes:
      unique_tokens: ids of the rows to train, those inside the table distinct; any other is
        dropped. `UniqueTokens`, as `compress_token_ids` makes them, or an array.
        # shape=(num_unique,), dtype=jnp.int32, replicated
      grads: each token's gradient.
        # shape=(tokens_per_batch, emb_width), bfloat16 or float32, sharded `P(data_axis, None)`
      segment_ids: the position of each token's id in `unique_tokens`; -1 for a token that has no
        gradient.  # shape=(tokens_per_batch,), dtype=jnp.int32, sharded `P(data_axis)`
      pending: whether the update is real; table and state keep every bit if it is not.
        # shape=(), dtype=bool
      bags: where ids are pooled: `grads` are those of the rows that travelled, and there are as
        many `segment_ids` as ids. None where each id has a row of its own.
    """

    unique_tokens: Any
    grads: jax.Array
    segment_ids: jax.Array
    pending: jax.Array | bool = True
    bags: Bags | None = None


class UpdateResult(NamedTuple):
    """How an update went, replicated.

    Attributes:
      norm: the root of all summed gradients' squares; may be infinite or NaN, and then the update
        was skipped.  # shape=(), dtype=jnp.float32
      valid: whether the update was applied: it was pending, and its norm and every number that the
        rule brings in (a traced learning rate) are finite.
        # shape=(), dtype=bool
      dropped: tokens whose gradient has no row to go to: out of range, padding, or left out for
        lack of room.  # shape=(), dtype=jnp.int32
    """

    norm: jax.Array
    valid: jax.Array
    dropped: jax.Array


class UpdatePin(NamedTuple):
    """An update in flight, as `update_done` takes it.

    Attributes:
      result: what `update_done` returns; its arrays are ready when the update is.
    """

    result: UpdateResult


def update_start(
    handle: AsyncEmbContextHandle,
    rule: UpdateRule,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
    *,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, Any, UpdatePin]:
    """Exchanges a batch's gradients and applies the rule to the rows they touch. Global arrays.

    A row is touched when its id is inside the table and its summed gradient, rounded to the
    table's dtype, is not zero, however small. Rows that are not touched keep every bit of row and
    state. Sums are float32 and in a fixed order: the same bits in every run. If the norm of the
    sums or the rule's learning rate is not finite, nothing changes at all.

    Args:
      handle: the layout.
      rule: the update rule.
      update: the gradients and where they belong; `compress_token_ids` makes its ids.
      table: (vocab, emb_width) bfloat16 or float32, sharded `P(None, table_axis)`. Updated in
        place in a program to which it is donated (`jax.jit(..., donate_argnums=...)`); copied
        when called eagerly, so that the old table stays usable.
      state: the rule's state, `rule.init(vocab)` at first; donated likewise.
      gate: an array that must be computed before the exchange may be issued; its value is unused.
        With it, an update waits for a lookup of the old table that is still in flight; without it,
        XLA may copy the table, so that neither has to wait:

          pin = lookup_start(handle, token_ids, table)
          table, state, update_pin = update_start(
              handle, rule, update, table, state, gate=pin.blocks
          )
          rows = lookup_done(handle, pin)  # Of the table as it was.

        After a loop of lookups, the gate is what the loop returns. None is needed where the
        gradients are computed from the rows.

    Returns:
      The new table, the new state, and the pin for `update_done`.

    Raises:
      ValueError: a wrong shape, a state that is not the rule's, or ids inside the table that are
        listed twice (checked where their values are known: not in a trace).
      TypeError: a wrong dtype.
    """
    check_table(table, handle.emb_width)
    update = _checked_update(handle, update, handle.tokens_per_batch, table.shape[0])
    check_state(rule, state, table.shape[0], handle.emb_width)
    _check_distinct(update.unique_tokens, table.shape[0])
    arrays = placement.place(handle, (update, table, state), _specs(handle, update, state))
    return _update_start(handle, rule, *arrays, gate)


def update_done(handle: AsyncEmbContextHandle, pin: UpdatePin) -> UpdateResult:
    """The result of an update. Global arrays, or inside `shard_map`.

      table, state, pin = update_start(handle, rule, update, table, state)
      result = update_done(handle, pin)
      skipped = ~result.valid

    Args:
      handle: the layout with which the update was started.
      pin: what `update_start` returned.
    """
    del handle
    return pin.result


def update_start_per_shard(
    handle: AsyncEmbContextHandle,
    rule: UpdateRule,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
    *,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, Any, UpdatePin]:
    """`update_start` for one shard, inside `shard_map`.

    Args:
      handle: the layout.
      rule: the update rule.
      update: `unique_tokens` and `pending` of the whole batch, the same on every rank; `grads`
        (tokens_per_rank, emb_width) and `segment_ids` (tokens_per_rank,) of this rank's tokens.
      table: (vocab, shard_width), this rank's columns.
      state: the rule's state, the same on every rank; slot tables (vocab, shard_width).
      gate: as in `update_start`.

    Raises:
      ValueError, TypeError: as `update_start`, for shapes and types; values are not looked at.
    """
    check_table(table, handle.shard_width)
    update = _checked_update(handle, update, handle.tokens_per_rank, table.shape[0])
    check_state(rule, state, table.shape[0], handle.shard_width)
    update = update._replace(grads=gated(handle, update.grads, gate))
    return apply_update(handle, rule, update, table, state)


def apply_update(
    handle: AsyncEmbContextHandle,
    rule: UpdateRule,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
) -> tuple[jax.Array, Any, UpdatePin]:
    """The body of `update_start`, one shard's."""
    vocab = table.shape[0]
    unique = update.unique_tokens
    in_table = (unique >= 0) & (unique < vocab)
    segments, bags = gather_ids_and_bags(handle, update.segment_ids, update.bags)
    received = _exchange_gradients(handle, update.grads)
    if bags is not None:
        received = spread(handle, received, bags, len(segments))
    gradients, square_sums = kernels.segment_sum(
        received,
        segments,
        handle.num_unique,
        dtype=table.dtype,
        implementation=handle.implementation,
    )
    # Masked before the exchange: what has no row must count neither in the norm nor as an overflow.
    square_sums = jnp.where(in_table, square_sums, jnp.zeros((), jnp.float32))
    square_sums, has_gradient = _sum_square_sums(handle, square_sums)
    norm = jnp.sqrt(jnp.sum(square_sums))
    valid = jnp.isfinite(norm) & is_finite(rule) & jnp.asarray(update.pending)
    touched = in_table & has_gradient & valid
    rows = TouchedRows(jnp.where(touched, unique, vocab), gradients, square_sums, valid)
    table, state = rule.apply(
        table, state, rows, emb_width=handle.emb_width, implementation=handle.implementation
    )
    segments = jnp.where(segments >= 0, segments, handle.num_unique)
    kept = in_table.at[segments].get(mode="fill", fill_value=False)
    dropped = jnp.sum(~kept, dtype=jnp.int32)
    return table, state, UpdatePin(UpdateResult(norm, valid, dropped))


def _sum_square_sums(
    handle: AsyncEmbContextHandle, square_sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each row's square sum over all ranks, and whether some rank has a sum that is not zero.

    A rank whose squares underflow sends the smallest normal number for them: it is lost beside
    larger ones, and a total of nothing else counts as zero.
    """
    smallest = jnp.finfo(jnp.float32).tiny
    told = jnp.where(square_sums < 0, smallest, square_sums)
    total = exchange.sum_over_ranks(handle, told)
    return jnp.where(total <= handle.group_size * smallest, 0.0, total), total != 0


def _exchange_gradients(handle: AsyncEmbContextHandle, grads: jax.Array) -> jax.Array:
    """This rank's columns of the gradients of all ranks' rows: (T, emb_width) -> (G * T, w)."""
    blocks = exchange.rows_to_blocks(grads, handle.group_size)
    received = exchange.exchange_blocks(handle, blocks)
    return received.reshape(-1, received.shape[-1])


def update_specs(handle: AsyncEmbContextHandle, bags: Bags | None = None) -> GradientUpdate:
    """The specs of a batch's gradients, and of its bags if it has any."""
    return GradientUpdate(
        unique_tokens=placement.REPLICATED,
        grads=placement.token_rows_spec(handle),  # type: ignore[arg-type]
        segment_ids=placement.token_spec(handle),  # type: ignore[arg-type]
        pending=placement.REPLICATED,  # type: ignore[arg-type]
        bags=placement.token_specs(handle, bags),
    )


def _specs(
    handle: AsyncEmbContextHandle, update: GradientUpdate, state: Any
) -> tuple[GradientUpdate, P, Any]:
    """The specs of an update, a table and a state."""
    return (
        update_specs(handle, update.bags),
        placement.table_spec(handle),
        placement.state_specs(handle, state),
    )


@jax.jit(static_argnums=0)
def _update_start(
    handle: AsyncEmbContextHandle,
    rule: UpdateRule,
    update: GradientUpdate,
    table: jax.Array,
    state: Any,
    gate: jax.Array | None,
) -> tuple[jax.Array, Any, UpdatePin]:
    specs = _specs(handle, update, state)
    rule_specs = jax.tree.map(lambda _: placement.REPLICATED, rule)
    apply = placement.shard_map(
        handle,
        lambda rule, update, table, state: apply_update(handle, rule, update, table, state),
        (rule_specs, *specs),
        (*specs[1:], placement.REPLICATED),
    )
    with jax.named_scope("xrex.update_start"):
        update = update._replace(grads=gated(handle, update.grads, gate))
        return apply(rule, *placement.place(handle, (update, table, state), specs))


def _checked_update(
    handle: AsyncEmbContextHandle, update: GradientUpdate, num_tokens: int, vocab: int
) -> GradientUpdate:
    """The update of so many tokens, with its ids as int32 and `pending` as an array."""
    if isinstance(update.unique_tokens, UniqueTokens):
        if update.unique_tokens.vocab != vocab:
            error = ValueError(
                f"async_emb unique_tokens were found with vocab={update.unique_tokens.vocab}, and "
                f"the table has {vocab} rows"
            )
            error.add_note(f"Pass vocab={vocab} to compress_token_ids.")
            raise error
        update = update._replace(unique_tokens=update.unique_tokens.ids)
    check_shape("unique_tokens", update.unique_tokens, (handle.num_unique,))
    check_shape("grads", update.grads, (num_tokens, handle.emb_width))
    if update.bags is None:  # Else there are as many as ids, which the layout does not know.
        check_shape("segment_ids", update.segment_ids, (num_tokens,))
    check_shape("pending", update.pending, ())
    if update.grads.dtype not in TABLE_DTYPES:
        raise TypeError(f"async_emb grads must be bfloat16 or float32, not {update.grads.dtype}")
    pending = jnp.asarray(update.pending)
    if pending.dtype != jnp.bool_:
        raise TypeError(f"async_emb pending must be a bool, not {pending.dtype}")
    return update._replace(
        unique_tokens=as_int32("unique_tokens", update.unique_tokens),
        segment_ids=as_int32("segment_ids", update.segment_ids),
        pending=pending,
    )


def _check_distinct(unique_tokens: jax.Array, vocab: int) -> None:
    """Raises for a row listed twice, where the values are at hand."""
    if isinstance(unique_tokens, jax.core.Tracer):
        return
    if isinstance(unique_tokens, jax.Array) and not unique_tokens.is_fully_addressable:
        return
    tokens = np.asarray(unique_tokens)
    inside = tokens[(tokens >= 0) & (tokens < vocab)]
    values, counts = np.unique(inside, return_counts=True)
    if (counts > 1).any():
        token = values[np.argmax(counts > 1)]
        positions = np.flatnonzero(tokens == token).tolist()
        error = ValueError(f"async_emb unique_tokens lists id {token} at positions {positions}")
        error.add_note("List each row once; compress_token_ids does.")
        raise error
