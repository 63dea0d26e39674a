"""One step of the training pipeline, as pure functions of its state. In a trace.

`xrex.training.pipeline` says what a step does when; here is how.
"""

import inspect
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrex import placement
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.lookup import LookupPin, exchange_rows, gather_for_exchange, lookup_done
from xrex.pooling import Bags, gather_ids_and_bags, ids_and_bags, sum_of_sizes
from xrex.rules.base import is_finite
from xrex.table_set import TableStack, for_each, for_each_unzip
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
from xrex.training.state import (
    Batch,
    PipelineState,
    StartedLookup,
    StepMetrics,
    attach_bags,
)
from xrex.update import GradientUpdate, update_done, update_start


def start(config: StepConfig, ids: Any, tables: Any) -> tuple[Any, Any]:
    """What a run's first batch puts in flight: its lookup, and no update; staleness 1 only."""

    def of_stack(stack: TableStack, ids: Any, table: jax.Array) -> Any:
        lookup = _look_up(stack, ids, table)
        nothing = GradientUpdate(
            unique_tokens=lookup.tokens.unique_tokens,
            grads=_zero_rows(stack.handle, table.dtype),
            segment_ids=lookup.tokens.segment_ids,
            pending=jnp.zeros((), bool),
            bags=lookup.bags,
        )
        return lookup, nothing

    lookups, updates = for_each_unzip(config.tables.stacks, of_stack, ids, tables)
    return lookups, updates


def step_now(
    config: StepConfig, state: PipelineState, batch: Batch
) -> tuple[PipelineState, StepMetrics]:
    """Reads a batch's rows, trains on them and applies both updates: staleness 0."""
    lookups = for_each(config.tables.stacks, _look_up, batch.token_ids, state.table)
    return _train(config, state, _arrived(config, lookups), lookups, batch.inputs)


def step_ahead(
    config: StepConfig, state: PipelineState, bags: Any, inputs: Any, next_ids: Any
) -> tuple[PipelineState, StepMetrics]:
    """Trains on the rows in flight, and starts the next batch's lookup: staleness 1.

    The bags of what is in flight come apart from the state: see `detach_bags`.
    """
    state = attach_bags(state, bags)
    stacks, lookups = config.tables.stacks, _in_flight(state)
    embedded = _arrived(config, lookups)
    state, results = flush(config, state)
    begun, gathered = for_each_unzip(stacks, _begin_lookup, next_ids, state.table)
    next_rows = Exchange(gathered, partial(for_each, stacks, _exchange_rows))
    gradients, pins = _gradients(config, state, embedded, inputs, next_rows)
    next_lookups = for_each(stacks, lambda _, begun, pin: begun._replace(rows=pin), begun, pins)
    value_fn = _value_fn(config, state, embedded, inputs)
    state, trained = _apply_dense(config, state, gradients, lookups, value_fn)
    state = state._replace(current_lookup=next_lookups, previous_update=trained.updates)
    return state, _metrics(config, gradients, lookups, trained, results)


def flush(config: StepConfig, state: PipelineState) -> tuple[PipelineState, Any]:
    """Applies the deferred update, and marks it as no longer pending."""
    updates = state.previous_update
    if updates is None:
        raise ValueError("there is no deferred update to flush")
    state, results = _apply_updates(config, state, updates, state.step - 1)
    updates = for_each(
        config.tables.stacks,
        lambda _, update: update._replace(pending=jnp.zeros((), bool)),
        updates,
    )
    return state._replace(previous_update=updates), results


def finish(
    config: StepConfig, state: PipelineState, in_flight: tuple[Any, Any], inputs: Any
) -> tuple[PipelineState, StepMetrics]:
    """Trains on the rows in flight, and applies all updates: staleness 1."""
    lookups, updates = in_flight
    embedded = _arrived(config, lookups)
    state, _ = flush(config, state._replace(previous_update=updates))
    state = state._replace(previous_update=None)
    return _train(config, state, embedded, lookups, inputs)


def predict(
    config: StepConfig,
    apply_fn: Callable[[Any, Any, Any], Any],
    state: PipelineState,
    batch: Batch,
) -> Any:
    """What a model makes of a batch, with every update trained so far. The state is not changed."""
    if state.previous_update is not None:
        state, _ = flush(config, state)
    lookups = for_each(config.tables.stacks, _look_up, batch.token_ids, state.table)
    return apply_fn(state.dense_params, _arrived(config, lookups), batch.inputs)


def _in_flight(state: PipelineState) -> Any:
    if state.current_lookup is None:
        raise ValueError("no lookup was started")
    return state.current_lookup


def _arrived(config: StepConfig, lookups: Any) -> Any:
    """What the loss function sees, of the rows whose lookups were started."""
    rows = for_each(
        config.tables.stacks, lambda stack, lookup: lookup_done(stack.handle, lookup.rows), lookups
    )
    return config.tables.split(rows)


def _train(
    config: StepConfig, state: PipelineState, embedded: Any, lookups: Any, inputs: Any
) -> tuple[PipelineState, StepMetrics]:
    gradients, _ = _gradients(config, state, embedded, inputs)
    value_fn = _value_fn(config, state, embedded, inputs)
    state, trained = _apply_dense(config, state, gradients, lookups, value_fn)
    state, results = _apply_updates(config, state, trained.updates, state.step - 1)
    return state, _metrics(config, gradients, lookups, trained, results)


def _look_up(stack: TableStack, ids: Any, table: jax.Array) -> StartedLookup:
    """Starts the lookup of one stack."""
    begun, gathered = _begin_lookup(stack, ids, table)
    return begun._replace(rows=_exchange_rows(stack, gathered))


def _exchange_rows(stack: TableStack, gathered: jax.Array) -> LookupPin:
    return exchange_rows(stack.handle, gathered)


def _begin_lookup(
    stack: TableStack, packed: Any, table: jax.Array
) -> tuple[StartedLookup, jax.Array]:
    """A stack's distinct ids, and its rows gathered but not exchanged; ids travel once."""
    handle = stack.handle
    ids, bags = ids_and_bags(packed)

    def body(
        ids: jax.Array, bags: Bags | None, table: jax.Array
    ) -> tuple[CompressedTokens, jax.Array]:
        all_ids, all_bags = gather_ids_and_bags(handle, ids, bags)
        tokens = compress_gathered(handle, ids, all_ids, stack.vocab)
        return tokens, gather_for_exchange(handle, all_ids, table, all_bags)

    token_spec = placement.token_spec(handle)
    specs = (token_spec, placement.token_specs(handle, bags), placement.table_spec(handle))
    begin = placement.shard_map(
        handle, body, specs, (compressed_specs(handle), placement.send_spec(handle))
    )
    with jax.named_scope("xrex.begin_lookup"):
        tokens, gathered = begin(*placement.place(handle, (ids, bags, table), specs))
    no_rows: Any = None  # Until they are exchanged.
    return StartedLookup(tokens, no_rows, bags), gathered


def _gradients(
    config: StepConfig,
    state: PipelineState,
    embedded: Any,
    inputs: Any,
    beside: Exchange = NO_EXCHANGE,
) -> tuple[Gradients, Any]:
    with jax.named_scope("xrex.dense_model"):
        return gradients_of(config, state.dense_params, embedded, inputs, beside=beside)


def _value_fn(config: StepConfig, state: PipelineState, embedded: Any, inputs: Any) -> Any:
    """The loss of the batch by its trainable parameters, as optax's line searches ask for it."""
    _, fixed = dense_params.split(state.dense_params)

    def value(trainable: Any) -> jax.Array:
        params = dense_params.merge(trainable, fixed)
        return loss_and_aux(config.loss_fn(params, embedded, inputs))[0]

    return value


class _Trained(NamedTuple):
    """What became of a batch's gradients."""

    updates: Any  # of the tables; a tree of GradientUpdate
    accepted: jax.Array  # whether they and the dense update are real


def _apply_dense(
    config: StepConfig, state: PipelineState, gradients: Gradients, lookups: Any, value_fn: Any
) -> tuple[PipelineState, _Trained]:
    """Updates the dense model and makes the tables' updates; none is real unless all can be."""
    old, fixed = dense_params.split(state.dense_params)
    updates, optimizer_state = config.dense_optimizer.update(
        gradients.dense, state.optimizer_state, old, **_extra(config, gradients, value_fn)
    )
    new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), old, updates)
    optimizer_state = jax.tree.map(_as_before, optimizer_state, state.optimizer_state)
    before, after = (old, state.optimizer_state), (new, optimizer_state)
    rows = config.tables.join(gradients.embedded)
    sums_are_finite = for_each(config.tables.stacks, _sums_are_finite, rows, lookups)
    accepted = (
        _all(sums_are_finite)
        & _all_finite(gradients.dense)
        & _all([is_finite(rule) for rule in config.rules_at(state.step)])
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

    def update_of(stack: TableStack, rows: jax.Array, lookup: StartedLookup) -> GradientUpdate:
        del stack
        tokens = lookup.tokens
        return GradientUpdate(tokens.unique_tokens, rows, tokens.segment_ids, accepted, lookup.bags)

    return state, _Trained(for_each(config.tables.stacks, update_of, rows, lookups), accepted)


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


def _sums_are_finite(stack: TableStack, rows: jax.Array, lookup: StartedLookup) -> jax.Array:
    """Whether no sum that a stack's update takes of its ids' gradients can overflow.

    The norm of all summed gradients is at most the sum of all gradients' absolute values: if the
    square of that is far from overflowing, so are the sums, their squares, and the squares' sum.
    """
    segment_ids = lookup.tokens.segment_ids
    if lookup.bags is None:
        sizes = jnp.where((segment_ids >= 0)[:, None], jnp.abs(rows.astype(jnp.float32)), 0)
        bound = jnp.sum(sizes)
    else:
        bound = jnp.sum(_sizes_per_rank(stack.handle, rows, segment_ids, lookup.bags))
    return jnp.isfinite(4 * bound * bound)


def _sizes_per_rank(
    handle: AsyncEmbContextHandle, rows: jax.Array, segment_ids: jax.Array, bags: Bags
) -> jax.Array:
    """The absolute values of each rank's ids' gradients, added up: (group_size,)."""
    token_spec = placement.token_spec(handle)

    def body(rows: jax.Array, segment_ids: jax.Array, bags: Bags) -> jax.Array:
        sizes = jnp.sum(jnp.abs(rows.astype(jnp.float32)), axis=1)
        return sum_of_sizes(handle, sizes, bags, segment_ids)[None]

    specs = (
        placement.token_rows_spec(handle),
        token_spec,
        placement.token_specs(handle, bags),
    )
    sizes = placement.shard_map(handle, body, specs, token_spec)
    return sizes(*placement.place(handle, (rows, segment_ids, bags), specs))


def _all(flags: Any) -> jax.Array:
    return reduce(jnp.logical_and, jax.tree.leaves(flags), jnp.ones((), bool))


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


def _apply_updates(
    config: StepConfig, state: PipelineState, updates: Any, step: jax.Array
) -> tuple[PipelineState, Any]:
    """Applies the gradients of batch `step` to the tables; results are zeros if it is not real."""

    def of_stack(stack: TableStack, update: GradientUpdate, table: jax.Array, state: Any) -> Any:
        table, state, pin = update_start(stack.handle, stack.rule_at(step), update, table, state)
        done = update_done(stack.handle, pin)
        result = jax.tree.map(
            lambda value: jnp.where(update.pending, value, jnp.zeros_like(value)), done
        )
        return table, state, result

    table, rule_state, results = for_each_unzip(
        config.tables.stacks, of_stack, updates, state.table, state.rule_state
    )
    return state._replace(table=table, rule_state=rule_state), results


def _metrics(
    config: StepConfig, gradients: Gradients, lookups: Any, trained: _Trained, results: Any
) -> StepMetrics:
    dropped = for_each(config.tables.stacks, lambda _, lookup: lookup.tokens.dropped, lookups)
    return StepMetrics(
        gradients.loss,
        ~trained.accepted,
        reduce(jnp.add, jax.tree.leaves(dropped)),
        results,
        gradients.aux,
    )


def _zero_rows(handle: AsyncEmbContextHandle, dtype: jax.typing.DTypeLike) -> jax.Array:
    shape = (handle.tokens_per_rank, handle.emb_width)
    return placement.shard_map(
        handle, lambda: jnp.zeros(shape, dtype), (), placement.token_rows_spec(handle)
    )()
