"""The training pipeline: lookups start early, updates finish late, the dense model never waits.

With `staleness=0` a step is exact synchronous training. With `staleness=1`, in step k

1. the rows of batch k, asked for in step k - 1, arrive;
2. the table update with the gradients of batch k - 1 runs beside the forward pass of batch k;
3. the lookup of batch k + 1 is issued when the loss is known and the update is done, and its
   exchange travels beside the backward pass (`xrex.training.overlap` says how, and of which
   models).

So batch k is read from a table that holds the updates of batches up to k - 2. All that is in flight
is in the state, so that the halves of an exchange cannot be mismatched.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, Sharding

from xrex import placement
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.layout import is_positive_integer
from xrex.lookup import check_table
from xrex.tokens import check_token_ids, check_vocab
from xrex.training import step as train_step
from xrex.training.gradients import LossFunction
from xrex.training.state import Batch, PipelineState, StepMetrics
from xrex.training.step import DenseOptimizer, RuleOrSchedule, StepConfig
from xrex.update import UpdateResult

Shardings = tuple[Sharding | None, ...]


class Pipeline:
    """Compiled training steps of one model. Made by `make_pipeline`; holds no state of its own.

    A run starts idle (`init`), holds one batch from `start` on, and is idle again after `finish`;
    `run` does all of it. Each call takes the state over: its arrays, save those of the batch, are
    donated to the step, which updates them in place; use only the state that a call returns.
    """

    def __init__(self, config: StepConfig) -> None:
        """Use `make_pipeline`, which checks the configuration."""
        self.config = config

    def init(
        self,
        table: jax.typing.ArrayLike,
        dense_params: Any,
        *,
        rule_state: Any = None,
        optimizer_state: Any = None,
    ) -> PipelineState:
        """The idle state: no batch is held and nothing is in flight.

        Args:
          table: (vocab, emb_width) bfloat16 or float32, on the host or sharded
            `P(None, table_axis)`; the state takes it over.
          dense_params: any pytree, copied; leaves that are not on the mesh yet are replicated.
          rule_state: to go on from, taken over; a fresh one where None.
          optimizer_state: to go on from, copied; a fresh one where None.

        Raises:
          ValueError: the table's shape is not (vocab, emb_width).
          TypeError: the table is neither bfloat16 nor float32.
        """
        handle, vocab = self.config.handle, self.config.vocab
        array: Any = table if isinstance(table, jax.Array) else np.asarray(table)
        check_table(handle, array)
        if array.shape[0] != vocab:
            raise ValueError(
                f"async_emb table has {array.shape[0]} rows, and the pipeline has vocab={vocab}"
            )
        if rule_state is None:
            rule_state = self.config.rule_at(jnp.zeros((), jnp.int32)).init(vocab)
        if optimizer_state is None:
            optimizer_state = self.config.dense_optimizer.init(dense_params)
        copied = (dense_params, optimizer_state, jnp.zeros((), jnp.int32))
        dense_params, optimizer_state, step = jax.tree.map(self._copy_to_mesh, copied)
        specs = (placement.table_spec(handle), placement.state_specs(handle, rule_state))
        array, rule_state = placement.place(handle, (array, rule_state), specs)
        return PipelineState(array, rule_state, dense_params, optimizer_state, step)

    def start(self, state: PipelineState, batch: Batch) -> PipelineState:
        """Holds the first batch of a run; with staleness 1, starts its lookup.

        Raises:
          ValueError: a batch is held already; or as in `step`.
        """
        if state.current_batch is not None:
            raise ValueError("the pipeline holds a batch already: call step or finish, not start")
        batch = self._checked(batch)
        if self.config.staleness == 1:
            state = self._start(_shardings(state), state, batch.token_ids)
        return state._replace(current_batch=batch)

    def step(self, state: PipelineState, next_batch: Batch) -> tuple[PipelineState, StepMetrics]:
        """Trains on the batch that is held, and holds the next one.

        Raises:
          ValueError: no batch is held; ids of a wrong shape or that do not fit in int32; with
            accumulation, an input that micro-batches do not divide. The state stays usable.
          TypeError: ids that are not integers.
        """
        state, batch = self._release(state, "step")
        next_batch = self._checked(next_batch)
        if self.config.staleness == 1:
            arguments = (state, batch.inputs, next_batch.token_ids)
            state, metrics = self._step_ahead(_shardings(state), *arguments)
        else:
            state, metrics = self._step_now(_shardings(state), state, batch)
        return state._replace(current_batch=next_batch), metrics

    def flush(self, state: PipelineState) -> tuple[PipelineState, UpdateResult | None]:
        """Applies the deferred table update, so that the table holds all batches trained so far.

        Neutral: going on from the flushed state gives the same bits as never having flushed. The
        batch that is held stays so, with the rows that were read for it.

        Returns:
          The state, and the update's result; None where nothing is ever deferred (staleness 0, or
          an idle state).
        """
        if state.previous_update is None:
            return state, None
        batch = state.current_batch
        state = state._replace(current_batch=None)
        state, result = self._flush(_shardings(state), state)
        return state._replace(current_batch=batch), result

    def finish(self, state: PipelineState) -> tuple[PipelineState, StepMetrics]:
        """Trains on the batch that is held and applies all updates: the state is idle after it.

        Raises:
          ValueError: no batch is held.
        """
        state, batch = self._release(state, "finish")
        if self.config.staleness == 1:
            # What is in flight ends here: no output could take its buffers over.
            in_flight = (state.current_lookup, state.previous_update)
            state = state._replace(current_lookup=None, previous_update=None)
            return self._finish(_shardings(state), state, in_flight, batch.inputs)
        return self._step_now(_shardings(state), state, batch)

    def run(
        self, state: PipelineState, batches: Iterable[Batch]
    ) -> Iterator[tuple[PipelineState, StepMetrics]]:
        """Trains on each batch in turn, from an idle state to an idle state.

        Yields the state and the metrics after each batch. Read the state between two batches, but
        pass it to no other method: to flush in the middle of a run, call `step` yourself.
        """
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return
        state = self.start(state, first)
        for batch in iterator:
            state, metrics = self.step(state, batch)
            yield state, metrics
        yield self.finish(state)

    def lower_step(self, state: PipelineState, next_batch: Batch) -> Any:
        """The lowered step (`jax.stages.Lowered`), of a state that holds a batch.

        Takes shapes (`jax.ShapeDtypeStruct`) as well as arrays.
        """
        state, batch = self._release(state, "lower_step")
        if self.config.staleness == 1:
            arguments = (state, batch.inputs, next_batch.token_ids)
            return self._step_ahead.lower(_shardings(state), *arguments)
        return self._step_now.lower(_shardings(state), state, batch)

    @cached_property
    def _start(self) -> Any:
        return self._compiled(train_step.start)

    @cached_property
    def _step_now(self) -> Any:
        return self._compiled(train_step.step_now)

    @cached_property
    def _step_ahead(self) -> Any:
        return self._compiled(train_step.step_ahead)

    @cached_property
    def _flush(self) -> Any:
        return self._compiled(train_step.flush)

    @cached_property
    def _finish(self) -> Any:
        return self._compiled(train_step.finish)

    def _compiled(self, body: Callable[..., Any]) -> Any:
        """Compiles `body(config, state, ...)`; donates the state and keeps its shardings."""

        def call(shardings: Shardings, state: PipelineState, *arguments: Any) -> Any:
            result = body(self.config, state, *arguments)
            if isinstance(result, PipelineState):
                return self._constrained(result, shardings)
            return self._constrained(result[0], shardings), result[1]

        return jax.jit(call, static_argnums=0, donate_argnums=1)

    def _constrained(self, state: PipelineState, shardings: Shardings) -> PipelineState:
        """The state, in the shardings in which it came: XLA is free to choose others."""
        mesh = self.config.handle.mesh
        if AxisType.Explicit in mesh.axis_types:
            return state  # There, types carry shardings, and XLA has no choice.
        specs = (
            placement.table_spec(self.config.handle),
            placement.state_specs(self.config.handle, state.rule_state),
        )
        table, rule_state = jax.tree.map(
            lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
            (state.table, state.rule_state),
            specs,
        )
        leaves, treedef = jax.tree.flatten((state.dense_params, state.optimizer_state, state.step))
        leaves = [
            leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        dense_params, optimizer_state, step = jax.tree.unflatten(treedef, leaves)
        return state._replace(
            table=table,
            rule_state=rule_state,
            dense_params=dense_params,
            optimizer_state=optimizer_state,
            step=step,
        )

    def _release(self, state: PipelineState, call: str) -> tuple[PipelineState, Batch]:
        """The state without its batch, and the batch: it is the caller's, so never donated."""
        if state.current_batch is None:
            raise ValueError(f"the pipeline holds no batch: call start before {call}")
        return state._replace(current_batch=None), state.current_batch

    def _checked(self, batch: Batch) -> Batch:
        """The batch with its ids checked and its host arrays placed on the mesh."""
        token_ids, inputs = batch
        ids = check_token_ids(self.config.handle, token_ids, self.config.vocab)
        jax.tree_util.tree_map_with_path(self._check_splits, inputs)
        return Batch(ids, jax.tree.map(self._place_input, inputs))

    def _check_splits(self, path: Any, leaf: Any) -> None:
        steps, group_size = self.config.accumulation_steps, self.config.handle.group_size
        if steps > 1 and (np.ndim(leaf) == 0 or np.shape(leaf)[0] % (steps * group_size)):
            raise ValueError(
                f"inputs{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, and "
                f"accumulation_steps={steps} on {group_size} ranks needs a first axis that is a "
                f"multiple of {steps * group_size}"
            )

    def _place_input(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        handle = self.config.handle
        divides = np.ndim(leaf) > 0 and np.shape(leaf)[0] % handle.group_size == 0
        spec = placement.token_spec(handle) if divides else placement.REPLICATED
        return placement.place(handle, leaf, spec)

    def _copy_to_mesh(self, leaf: Any) -> jax.Array:
        mesh = self.config.handle.mesh
        leaf = jnp.array(leaf, copy=True)
        if isinstance(leaf, jax.core.Tracer) or leaf.sharding.device_set == set(mesh.devices.flat):
            return leaf
        return placement.place(self.config.handle, leaf, placement.REPLICATED)


def _shardings(state: PipelineState) -> Shardings:
    """Shardings of the leaves that a step must hand back as they came; None where unknown."""
    leaves = jax.tree.leaves((state.dense_params, state.optimizer_state, state.step))
    return tuple(
        None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        for leaf in leaves
    )


def make_pipeline(
    handle: AsyncEmbContextHandle,
    rule: RuleOrSchedule,
    loss_fn: LossFunction,
    dense_optimizer: DenseOptimizer,
    *,
    vocab: int,
    staleness: int = 0,
    accumulation_steps: int = 1,
) -> Pipeline:
    """Makes the training steps of a model with one sharded table.

    Args:
      handle: the layout.
      rule: the table's update rule, or a function from a batch's number (a traced int32) to one,
        for schedules: `lambda step: xrex.RowwiseAdagrad(learning_rate=schedule(step))`.
      loss_fn: `loss_fn(dense_params, rows, inputs)` returns the loss, a floating-point scalar;
        rows are (tokens_per_batch, emb_width) of the table's dtype, sharded over the data axis.
      dense_optimizer: any `optax.GradientTransformation`.
      vocab: rows of the table.
      staleness: 0 for exact synchronous training, 1 to overlap.
      accumulation_steps: micro-batches in a batch. The loss is called for each, with its part of
        the rows and of every leaf of the inputs (whose first axis must be the batch's); loss and
        gradients are averaged, and table and dense model are updated once.

    Raises:
      ValueError: a parameter is out of its range, or micro-batches do not divide a rank's tokens.
    """
    check_vocab(vocab)
    if staleness not in (0, 1) or isinstance(staleness, bool):
        raise ValueError(f"staleness={staleness!r} must be 0 (synchronous) or 1 (overlapped)")
    if not is_positive_integer(accumulation_steps):
        raise ValueError(f"accumulation_steps={accumulation_steps!r} must be a positive integer")
    if handle.tokens_per_rank % accumulation_steps:
        raise ValueError(
            f"accumulation_steps={accumulation_steps} does not divide the "
            f"{handle.tokens_per_rank} tokens of each rank"
        )
    return Pipeline(
        StepConfig(
            handle, rule, loss_fn, dense_optimizer, vocab, int(staleness), int(accumulation_steps)
        )
    )
