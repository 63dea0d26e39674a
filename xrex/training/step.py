"""One step of the training pipeline, as pure functions of its state. In a trace.

`xrex.training.pipeline` says what a step does when; here is how.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from xrex import exchange, placement
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.lookup import exchange_rows, gather_for_exchange, lookup_done
from xrex.rules.base import UpdateRule
from xrex.tokens import CompressedTokens, compress_gathered, compressed_specs
from xrex.training.gradients import (
    NO_EXCHANGE,
    Exchange,
    Gradients,
    LossFunction,
    accumulated_gradients,
)
from xrex.training.state import Batch, PipelineState, StartedLookup, StepMetrics
from xrex.update import GradientUpdate, UpdateResult, update_done, update_start

RuleOrSchedule = UpdateRule | Callable[[jax.Array], UpdateRule]


class DenseOptimizer(Protocol):
    """What is used of an `optax.GradientTransformation`."""

    @property
    def init(self) -> Callable[..., Any]:
        """`init(params) -> state`."""

    @property
    def update(self) -> Callable[..., Any]:
        """`update(gradients, state, params) -> (updates, state)`."""


@dataclass(frozen=True)
class StepConfig:
    """What a step is made of; see `xrex.training.pipeline.make_pipeline`."""

    handle: AsyncEmbContextHandle
    rule: RuleOrSchedule
    loss_fn: LossFunction
    dense_optimizer: DenseOptimizer
    vocab: int
    staleness: int
    accumulation_steps: int

    def rule_at(self, step: jax.Array) -> UpdateRule:
        """The update rule for the gradients of batch `step`."""
        return self.rule(step) if callable(self.rule) else self.rule


def start(config: StepConfig, state: PipelineState, token_ids: jax.Array) -> PipelineState:
    """Starts the lookup of a run's first batch; staleness 1 only."""
    tokens, gathered = _begin_lookup(config, token_ids, state.table)
    nothing = GradientUpdate(
        unique_tokens=tokens.unique_tokens,
        grads=_zero_rows(config.handle, state.table.dtype),
        segment_ids=tokens.segment_ids,
        pending=jnp.zeros((), bool),
    )
    lookup = StartedLookup(tokens, exchange_rows(config.handle, gathered))
    return state._replace(current_lookup=lookup, previous_update=nothing)


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
    state, update = _apply_dense(config, state, gradients, tokens)
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
    state, update = _apply_dense(config, state, gradients, tokens)
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
        return accumulated_gradients(
            config.handle,
            config.loss_fn,
            state.dense_params,
            rows,
            inputs,
            steps=config.accumulation_steps,
            beside=beside,
        )


def _apply_dense(
    config: StepConfig, state: PipelineState, gradients: Gradients, tokens: CompressedTokens
) -> tuple[PipelineState, GradientUpdate]:
    """Updates the dense model and makes the table's update; neither is real unless both can be."""
    finite = _all_finite(gradients, tokens.segment_ids)
    updates, optimizer_state = config.dense_optimizer.update(
        gradients.dense, state.optimizer_state, state.dense_params
    )
    params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), state.dense_params, updates)
    params, optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, optimizer_state),
        (state.dense_params, state.optimizer_state),
    )
    state = state._replace(
        dense_params=params, optimizer_state=optimizer_state, step=state.step + 1
    )
    return state, GradientUpdate(tokens.unique_tokens, gradients.rows, tokens.segment_ids, finite)


def _all_finite(gradients: Gradients, segment_ids: jax.Array) -> jax.Array:
    """Whether the dense gradients are finite, and those of all tokens that train a row."""
    rows_finite = jnp.isfinite(gradients.rows) | (segment_ids < 0)[:, None]
    finite = jnp.all(rows_finite)
    for leaf in jax.tree.leaves(gradients.dense):
        finite &= jnp.all(jnp.isfinite(leaf))
    return finite


def _apply_update(
    config: StepConfig, state: PipelineState, update: GradientUpdate, step: jax.Array
) -> tuple[PipelineState, UpdateResult]:
    """Applies the gradients of batch `step` to the table."""
    table, rule_state, pin = update_start(
        config.handle, config.rule_at(step), update, state.table, state.rule_state
    )
    result = update_done(config.handle, pin)
    return state._replace(table=table, rule_state=rule_state), result


def _metrics(
    gradients: Gradients, tokens: CompressedTokens, update: GradientUpdate, result: UpdateResult
) -> StepMetrics:
    return StepMetrics(gradients.loss, ~jnp.asarray(update.pending), tokens.dropped, result)


def _zero_rows(handle: AsyncEmbContextHandle, dtype: jax.typing.DTypeLike) -> jax.Array:
    shape = (handle.tokens_per_rank, handle.emb_width)
    return placement.shard_map(
        handle, lambda: jnp.zeros(shape, dtype), (), placement.token_rows_spec(handle)
    )()
