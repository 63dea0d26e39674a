"""One step of the training pipeline, as pure functions of its state. In a trace.

`xrex.training.pipeline` says what a step does when; here is how.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xrex import exchange, placement
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.lookup import exchange_rows, gather_for_exchange, lookup_done
from xrex.rules.base import is_finite
from xrex.tokens import CompressedTokens, compress_gathered, compressed_specs
from xrex.training import dense_params
from xrex.training.config import StepConfig
from xrex.training.gradients import (
    NO_EXCHANGE,
    Exchange,
    Gradients,
    gradients_of,
    loss_and_aux,
)
from xrex.training.state import Batch, PipelineState, StartedLookup, StepMetrics
from xrex.update import GradientUpdate, UpdateResult, update_done, update_start


def start(
    config: StepConfig, token_ids: jax.Array, table: jax.Array
) -> tuple[StartedLookup, GradientUpdate]:
    """What a run's first batch puts in flight: its lookup, and no update; staleness 1 only."""
    tokens, gathered = _begin_lookup(config, token_ids, table)
    nothing = GradientUpdate(
        unique_tokens=tokens.unique_tokens,
        grads=_zero_rows(config.handle, table.dtype),
        segment_ids=tokens.segment_ids,
        pending=jnp.zeros((), bool),
    )
    return StartedLookup(tokens, exchange_rows(config.handle, gathered)), nothing


def step_now(
    config: StepConfig, state: PipelineState, batch: Batch
) -> tuple[PipelineState, StepMetrics]:
    """Reads a batch's rows, trains on them and applies both updates: staleness 0."""
    tokens, gathered = _begin_lookup(config, batch.token_ids, state.table)
    rows = lookup_done(config.handle, exchange_rows(config.handle, gathered))
    return _train_rows(config, state, rows, batch.inputs, tokens)


def step_ahead(
    config: StepConfig, state: PipelineState, inputs: Any, next_token_ids: jax.Array
) -> tuple[PipelineState, StepMetrics]:
    """Trains on the rows in flight, and starts the next batch's lookup: staleness 1."""
    tokens, rows = _arrived(config, state)
    state, result = flush(config, state)
    next_tokens, gathered = _begin_lookup(config, next_token_ids, state.table)
    next_rows = Exchange(gathered, partial(exchange_rows, config.handle))
    gradients, pin = _gradients(config, state, rows, inputs, next_rows)
    lookup = StartedLookup(next_tokens, pin)
    value_fn = _value_fn(config, state, rows, inputs)
    state, update = _apply_dense(config, state, gradients, tokens, value_fn)
    state = state._replace(current_lookup=lookup, previous_update=update)
    return state, _metrics(gradients, tokens, update, result)


def flush(config: StepConfig, state: PipelineState) -> tuple[PipelineState, UpdateResult]:
    """Applies the deferred update, and marks it as no longer pending."""
    update = state.previous_update
    if update is None:
        raise ValueError("there is no deferred update to flush")
    state, result = _apply_update(config, state, update, state.step - 1)
    update = update._replace(pending=jnp.zeros((), bool))
    return state._replace(previous_update=update), result


def finish(
    config: StepConfig,
    state: PipelineState,
    in_flight: tuple[StartedLookup, GradientUpdate],
    inputs: Any,
) -> tuple[PipelineState, StepMetrics]:
    """Trains on the rows in flight, and applies all updates: staleness 1."""
    lookup, update = in_flight
    state = state._replace(current_lookup=lookup, previous_update=update)
    tokens, rows = _arrived(config, state)
    state, _ = flush(config, state)
    state = state._replace(current_lookup=None, previous_update=None)
    return _train_rows(config, state, rows, inputs, tokens)


def _arrived(config: StepConfig, state: PipelineState) -> tuple[CompressedTokens, jax.Array]:
    """The distinct ids and the rows of the batch whose lookup was started."""
    lookup = state.current_lookup
    if lookup is None:
        raise ValueError("no lookup was started")
    return lookup.tokens, lookup_done(config.handle, lookup.rows)


def _train_rows(
    config: StepConfig, state: PipelineState, rows: jax.Array, inputs: Any, tokens: CompressedTokens
) -> tuple[PipelineState, StepMetrics]:
    gradients, _ = _gradients(config, state, rows, inputs)
    value_fn = _value_fn(config, state, rows, inputs)
    state, update = _apply_dense(config, state, gradients, tokens, value_fn)
    state, result = _apply_update(config, state, update, state.step - 1)
    return state, _metrics(gradients, tokens, update, result)


def _begin_lookup(
    config: StepConfig, token_ids: jax.Array, table: jax.Array
) -> tuple[CompressedTokens, jax.Array]:
    """The batch's distinct ids, and its rows gathered but not exchanged; ids travel once."""
    handle = config.handle

    def body(token_ids: jax.Array, table: jax.Array) -> tuple[CompressedTokens, jax.Array]:
        all_ids = exchange.gather_tokens(handle, token_ids)
        tokens = compress_gathered(handle, token_ids, all_ids, config.vocab)
        return tokens, gather_for_exchange(handle, all_ids, table)

    specs = (placement.token_spec(handle), placement.table_spec(handle))
    begin = placement.shard_map(
        handle, body, specs, (compressed_specs(handle), placement.send_spec(handle))
    )
    with jax.named_scope("xrex.begin_lookup"):
        return begin(*placement.place(handle, (token_ids, table), specs))


def _gradients(
    config: StepConfig,
    state: PipelineState,
    rows: jax.Array,
    inputs: Any,
    beside: Exchange = NO_EXCHANGE,
) -> tuple[Gradients, Any]:
    with jax.named_scope("xrex.dense_model"):
        return gradients_of(config, state.dense_params, rows, inputs, beside=beside)


def _value_fn(config: StepConfig, state: PipelineState, rows: jax.Array, inputs: Any) -> Any:
    """The loss of the batch by its trainable parameters, as optax's line searches ask for it."""
    _, fixed = dense_params.split(state.dense_params)

    def value(trainable: Any) -> jax.Array:
        params = dense_params.merge(trainable, fixed)
        return loss_and_aux(config.loss_fn(params, rows, inputs))[0]

    return value


def _apply_dense(
    config: StepConfig,
    state: PipelineState,
    gradients: Gradients,
    tokens: CompressedTokens,
    value_fn: Any,
) -> tuple[PipelineState, GradientUpdate]:
    """Updates the dense model and makes the table's update; neither is real unless both can be."""
    old, fixed = dense_params.split(state.dense_params)
    updates, optimizer_state = config.dense_optimizer.update(
        gradients.dense, state.optimizer_state, old, **_extra(config, gradients, value_fn)
    )
    new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), old, updates)
    optimizer_state = jax.tree.map(_as_before, optimizer_state, state.optimizer_state)
    before, after = (old, state.optimizer_state), (new, optimizer_state)
    accepted = (
        _sums_are_finite(gradients.rows, tokens.segment_ids)
        & _all_finite(gradients.dense)
        & is_finite(config.rule_at(state.step))
        & _stays_finite(before, after)
    )
    new, optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(accepted, new, old), after, before
    )
    state = state._replace(
        dense_params=dense_params.merge(new, fixed),
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )
    return state, GradientUpdate(tokens.unique_tokens, gradients.rows, tokens.segment_ids, accepted)


def _as_before(new: Any, old: jax.Array) -> jax.Array:
    """A leaf with the type that it had: an optimizer may return another, or a Python number."""
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):  # A random key.
        return new
    return jnp.asarray(new).astype(old.dtype)


def _extra(config: StepConfig, gradients: Gradients, value_fn: Any) -> dict[str, Any]:
    """What optax's transformations with extra arguments may ask for, such as `value`."""
    known = {"value": gradients.loss, "grad": gradients.dense, "value_fn": value_fn}
    parameters = inspect.signature(config.dense_optimizer.update).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known
    return {p.name: known[p.name] for p in parameters if p.name in known}


def _sums_are_finite(rows: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Whether no sum that the table's update takes of the tokens' gradients can overflow.

    The norm of all summed gradients is at most the sum of all gradients' absolute values: if the
    square of that is far from overflowing, so are the sums, their squares, and the squares' sum.
    """
    sizes = jnp.where((segment_ids >= 0)[:, None], jnp.abs(rows.astype(jnp.float32)), 0)
    bound = jnp.sum(sizes)
    return jnp.isfinite(4 * bound * bound)


def _all_finite(tree: Any) -> jax.Array:
    finite = jnp.ones((), bool)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.all(jnp.isfinite(leaf))
    return finite


def _stays_finite(before: Any, after: Any) -> jax.Array:
    """Whether no number becomes infinite or NaN: some optimizers start from an infinity."""
    finite = jnp.ones((), bool)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jnp.issubdtype(new.dtype, jnp.inexact):
            finite &= jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
    return finite


def _apply_update(
    config: StepConfig, state: PipelineState, update: GradientUpdate, step: jax.Array
) -> tuple[PipelineState, UpdateResult]:
    """Applies the gradients of batch `step` to the table; the result is zeros if it is not real."""
    table, rule_state, pin = update_start(
        config.handle, config.rule_at(step), update, state.table, state.rule_state
    )
    done = update_done(config.handle, pin)
    result = jax.tree.map(
        lambda value: jnp.where(update.pending, value, jnp.zeros_like(value)), done
    )
    return state._replace(table=table, rule_state=rule_state), result


def _metrics(
    gradients: Gradients, tokens: CompressedTokens, update: GradientUpdate, result: UpdateResult
) -> StepMetrics:
    skipped = ~jnp.asarray(update.pending)
    return StepMetrics(gradients.loss, skipped, tokens.dropped, result, gradients.aux)


def _zero_rows(handle: AsyncEmbContextHandle, dtype: jax.typing.DTypeLike) -> jax.Array:
    shape = (handle.tokens_per_rank, handle.emb_width)
    return placement.shard_map(
        handle, lambda: jnp.zeros(shape, dtype), (), placement.token_rows_spec(handle)
    )()
