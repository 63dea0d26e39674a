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

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.checks import INT32, check_devices, check_vocab
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.layout import is_positive_integer
from xrex.rules.base import RuleOrSchedule, UpdateRule, check_state
from xrex.training import dense_params as dense
from xrex.training import inputs, state_placement
from xrex.training import step as train_step
from xrex.training.config import DenseOptimizer, LossFunction, StepConfig
from xrex.training.single_table import SingleTable
from xrex.training.state import Batch, PipelineState, StepMetrics
from xrex.training.table_set import TableStack, for_each
from xrex.update import UpdateResult


class Pipeline:
    """Compiled training steps of one model. Made by `make_pipeline`; holds no state of its own.

    A run starts idle (`init`), holds one batch from `start` on, and is idle again after `finish`;
    `run` does all of it. `step`, `flush` and `finish` take the state over: its arrays, save those
    of the batch, are donated to the program, which updates them in place; use only the state that
    a call returns. Whatever a call raises before it launches its program leaves the state as it
    was, to be used again: a bad batch, an error of the loss function, calls out of order.

    A state may be put together from saved arrays, of NumPy or JAX, as a whole (`PipelineState`) or
    in parts (`init`, `state._replace`), idle or with a batch held: training goes on with the same
    bits as if it had never stopped.
    """

    def __init__(self, config: StepConfig) -> None:
        """Use `make_pipeline`, which checks the configuration."""
        self.config = config
        # Compiled programs, by what they are called with; and the batches known to be trainable.
        self._programs: dict[Hashable, Any] = {}
        self._trainable: set[Hashable] = set()

    def without_donation(self) -> "Pipeline":
        """The same steps, but each leaves the state that it was given usable.

        With it, an error of a device in the middle of a step (of a callback in the loss, or for
        lack of memory) loses nothing either: `run` waits for each step, and its `state` is the last
        one that is whole. The price is a second table and state while a step runs.
        """
        return Pipeline(dataclasses.replace(self.config, donate=False))

    def init(
        self,
        tables: Any,
        dense_params: Any,
        *,
        rule_state: Any = None,
        optimizer_state: Any = None,
        step: Any = None,
    ) -> PipelineState:
        """The idle state: no batch is held and nothing is in flight.

        To go on with a run that was saved, pass all five. For example, after
        `saved = jax.tree.map(np.asarray, state)` of an idle state,
        `init(saved.table, saved.dense_params, rule_state=saved.rule_state,
        optimizer_state=saved.optimizer_state, step=saved.step)` goes on where it stopped.

        Args:
          table: (vocab, emb_width) bfloat16 or float32. Copied, unless it is a JAX array sharded
            `P(None, table_axis)` over several devices or on a GPU, which the state takes over.
          dense_params: any pytree of arrays and numbers, copied; leaves that are not on the mesh
            yet are replicated. Those that are no floating-point numbers are left alone.
          rule_state: to go on from, copied or taken over like the table; a fresh one where None.
          optimizer_state: to go on from, copied; a fresh one where None.
          step: batches trained so far, which schedules of the rule count; goes with the two states,
            and is 0 where there are none.

        Raises:
          ValueError: the table's shape is not (vocab, emb_width); a state is not the rule's; `step`
            is given and a state that goes with it is not, or the other way round.
          TypeError: the table is neither bfloat16 nor float32; a dense leaf is no array.
        """
        config, stacks = self.config, self.config.tables.stacks
        dense.check("dense_params", dense_params)
        rules = for_each(stacks, lambda stack: stack.rule_at(jnp.zeros((), jnp.int32)))
        count: Any = np.int32(0) if step is None else step
        fresh = PipelineState(None, rule_state, dense_params, optimizer_state, count)  # type: ignore[arg-type]
        if step is None:
            _check_begins(fresh)
        else:
            self._check_goes_on(fresh, rules)
        fresh = fresh._replace(table=config.tables.make_tables(tables))
        # Not the caller's: what the first step donates, and NumPy's memory in a JAX array.
        fresh = jax.tree.map(placement.unless_numpys, fresh)._replace(step=np.int32(count))
        if fresh.rule_state is None:
            fresh = fresh._replace(
                rule_state=for_each(stacks, lambda stack, rule: rule.init(stack.vocab), rules)
            )
        _check_rule_states(stacks, rules, fresh.rule_state)
        fresh = state_placement.in_place(config.handle, fresh._replace(optimizer_state=None))
        fresh = fresh._replace(dense_params=jax.tree.map(jnp.copy, fresh.dense_params))
        if optimizer_state is None:
            trainable, _ = dense.split(fresh.dense_params)
            optimizer_state = config.dense_optimizer.init(trainable)
        # A copy: some optimizers keep the parameters themselves.
        optimizer_state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), optimizer_state)
        return state_placement.in_place(
            config.handle, fresh._replace(optimizer_state=optimizer_state)
        )

    def start(self, state: PipelineState, batch: Batch) -> PipelineState:
        """Holds the first batch of a run; with staleness 1, starts its lookup.

        The state that is passed stays usable.

        Raises:
          ValueError: a batch is held already; or as in `step`.
        """
        if state.current_batch is not None:
            raise ValueError("the pipeline holds a batch already: call step or finish, not start")
        state = self._in_place(state)
        batch = self._placed(batch)
        if self.config.staleness == 1:
            ids = self.config.tables.by_stack(batch.token_ids)
            lookup, update = self._start_program(ids, state.table)(ids, state.table)
            state = state._replace(current_lookup=lookup, previous_update=update)
        self._check_trainable(state, batch)
        return state._replace(current_batch=batch)

    def step(self, state: PipelineState, next_batch: Batch) -> tuple[PipelineState, StepMetrics]:
        """Trains on the batch that is held, and holds the next one.

        The state is donated, save its batch.

        Raises:
          ValueError: no batch is held; ids of a wrong shape or that do not fit in int32; an input
            that cannot be cut into micro-batches; a loss that is no floating-point scalar.
          TypeError: ids that are not integers, an input that is no array.
          Whatever the loss function raises for such a batch. The state stays usable in each case.
        """
        state, batch = self._release(state, "step")
        next_batch = self._placed(next_batch)
        self._check_trainable(state, next_batch)
        program, arguments = self._step_program(state, batch, next_batch)
        state, metrics = program(*arguments)
        return state._replace(current_batch=next_batch), self._counted(metrics, batch)

    def flush(self, state: PipelineState) -> tuple[PipelineState, UpdateResult | None]:
        """Applies the deferred table update, so that the table holds all batches trained so far.

        Neutral: going on from the flushed state gives the same bits as never having flushed. The
        batch that is held stays so, with the rows that were read for it. The result is in no later
        step's metrics.

        Returns:
          The state, and the update's result; None where nothing is ever deferred (staleness 0, or
          an idle state).
        """
        state = self._in_place(state)
        if state.previous_update is None:
            return state, None
        batch, state = state.current_batch, state._replace(current_batch=None)
        state, result = self._program(train_step.flush, self._returned(state))(state)
        return state._replace(current_batch=batch), result

    def finish(self, state: PipelineState) -> tuple[PipelineState, StepMetrics]:
        """Trains on the batch that is held and applies all updates: the state is idle after it.

        The state is donated, save its batch.

        Raises:
          ValueError: no batch is held.
        """
        state, batch = self._release(state, "finish")
        if self.config.staleness == 0:
            program, arguments = self._step_program(state, batch, batch)
            state, metrics = program(*arguments)
            return state, self._counted(metrics, batch)
        # What is in flight ends here: no output could take its buffers over.
        in_flight = (state.current_lookup, state.previous_update)
        state = state._replace(current_lookup=None, previous_update=None)
        finish = self._program(train_step.finish, self._returned(state))
        state, metrics = finish(state, in_flight, batch.inputs)
        return state, self._counted(metrics, batch)

    def run(self, state: PipelineState, batches: Iterable[Batch]) -> "Run":
        """Trains on each batch in turn; yields the state and the metrics after each.

        From an idle state, or one that holds a batch, to an idle state. Each step takes the state
        over, so that the one that was passed is used up by the first. An exception, of the source
        or of a step, loses nothing: `state` of what this returns is the newest state, and so is the
        one that was yielded last (or, before the first, the one that was passed). See `Run`.
        """
        return Run(self, state, batches)

    def lower_step(self, state: PipelineState, next_batch: Batch) -> Any:
        """The lowered step (`jax.stages.Lowered`), of a state that holds a batch.

        Takes shapes (`jax.ShapeDtypeStruct`) as well as arrays; of shapes, what is in flight may be
        left out.
        """
        state, batch = self._release(state, "lower_step")
        if self.config.staleness == 1 and state.current_lookup is None:
            ids = self.config.tables.by_stack(batch.token_ids)
            started = jax.eval_shape(partial(train_step.start, self.config), ids, state.table)
            shardings = state_placement.in_flight_shardings(self.config.handle, started)
            lookup, update = _with_shardings(started, shardings)
            state = state._replace(current_lookup=lookup, previous_update=update)
        program, arguments = self._step_program(state, batch, next_batch)
        return program.lower(*arguments)

    def _check_goes_on(self, state: PipelineState, rules: Any) -> None:
        """Raises for a step that is none, or comes without the states that counted up to it."""
        count = np.asarray(state.step)
        if count.shape or count.dtype.kind not in "iu" or not 0 <= count <= INT32.max:
            raise ValueError(f"step={state.step!r} must be a non-negative integer")
        stacks = self.config.tables.stacks
        trainable, _ = dense.split(state.dense_params)
        for name, fresh in (
            ("rule_state", lambda: for_each(stacks, lambda s, rule: rule.init(s.vocab), rules)),
            ("optimizer_state", lambda: self.config.dense_optimizer.init(trainable)),
        ):
            if getattr(state, name) is None and jax.tree.leaves(jax.eval_shape(fresh)):
                error = ValueError(f"step={state.step} goes on with a run, and {name} is missing")
                error.add_note(f"Pass the saved {name} too, or a fresh one if that is meant.")
                raise error

    def _start_program(self, ids: Any, tables: Any) -> Any:
        key = (train_step.start, _kind((ids, tables)))
        if key not in self._programs:
            started = jax.eval_shape(partial(train_step.start, self.config), ids, tables)
            shardings = state_placement.in_flight_shardings(self.config.handle, started)
            self._programs[key] = self._program(train_step.start, shardings, donates=False)
        return self._programs[key]

    def _step_program(
        self, state: PipelineState, batch: Batch, next_batch: Batch
    ) -> tuple[Any, tuple[Any, ...]]:
        """The program of a step, and what to call it with."""
        by_stack = self.config.tables.by_stack
        if self.config.staleness == 1:
            next_ids = by_stack(next_batch.token_ids)
            program = self._program(train_step.step_ahead, self._returned(state))
            return program, (state, batch.inputs, next_ids)
        batch = batch._replace(token_ids=by_stack(batch.token_ids))
        return self._program(train_step.step_now, self._returned(state)), (state, batch)

    def _returned(self, state: PipelineState) -> tuple[Any, None]:
        """The shardings of such a state and of whatever else a program returns with it."""
        return state_placement.state_shardings(self.config.handle, state), None

    def _program(self, body: Callable[..., Any], shardings: Any, *, donates: bool = True) -> Any:
        """`body(config, ...)` compiled; donates its first argument, and returns these shardings.

        With the shardings of results left to XLA, the next call would find others than it was
        compiled for.
        """
        leaves, treedef = jax.tree.flatten(shardings)
        key = (body, treedef, tuple(leaves))
        if key not in self._programs:

            def call(*arguments: Any) -> Any:
                return body(self.config, *arguments)

            call.__name__ = f"xrex_{body.__name__}"
            donated = 0 if donates and self.config.donate else ()
            self._programs[key] = jax.jit(call, donate_argnums=donated, out_shardings=shardings)
        return self._programs[key]

    def _check_trainable(self, state: PipelineState, batch: Batch) -> None:
        """Traces the step that will train on a batch, so that what is wrong with it shows now.

        Once for each kind of batch; the trace is the one that the step is compiled from.
        """
        key = _kind((self.config.tables.by_stack(batch.token_ids), batch.inputs))
        if key in self._trainable:
            return
        program, arguments = self._step_program(state, batch, batch)
        try:
            program.trace(*arguments)
        except Exception as error:
            error.add_note("The batch was not taken, and the state is as it was.")
            raise
        self._trainable.add(key)

    def _in_place(self, state: PipelineState) -> PipelineState:
        return state_placement.in_place(self.config.handle, state)

    def _release(self, state: PipelineState, call: str) -> tuple[PipelineState, Batch]:
        """The state without its batch, and the batch: it is the caller's, so never donated."""
        if state.current_batch is None:
            raise ValueError(f"the pipeline holds no batch: call start before {call}")
        batch = state.current_batch
        self._check_in_flight(state)
        if not all(map(_is_settled, jax.tree.leaves(batch))):
            batch = self._placed(batch)
        return self._in_place(state._replace(current_batch=None)), batch

    def _check_in_flight(self, state: PipelineState) -> None:
        """Raises for a state of a run with another staleness: its update would be lost."""
        deferred = state.previous_update is not None
        only_shapes = isinstance(state.step, jax.ShapeDtypeStruct)  # Of `lower_step`.
        if deferred != (self.config.staleness == 1) and not only_shapes:
            error = ValueError(
                f"the state is of a run with staleness={int(deferred)}, and the pipeline has "
                f"staleness={self.config.staleness}"
            )
            error.add_note("Call finish of a pipeline with the run's staleness first.")
            raise error

    def _placed(self, batch: Batch) -> Batch:
        """The batch with its ids checked, copied to the mesh."""
        token_ids, batch_inputs = batch
        return Batch(self.config.tables.place(token_ids), inputs.place(self.config, batch_inputs))

    def _counted(self, metrics: StepMetrics, batch: Batch) -> StepMetrics:
        """The metrics with what was counted while the batch was packed."""
        return metrics._replace(**self.config.tables.counts(batch.token_ids))


def _kind(tree: Any) -> Hashable:
    """What selects a program: structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), dense.dtype_of(leaf)) for leaf in leaves)


def _check_rule_states(stacks: Any, rules: Any, states: Any) -> None:
    """Raises for a state that is not its rule's."""

    def check(stack: TableStack, rule: UpdateRule, state: Any) -> None:
        check_state(rule, state, stack.vocab, stack.handle.emb_width)

    for_each(stacks, check, rules, states)


def _check_begins(state: PipelineState) -> None:
    """Raises for states that counted up to a step, where no step is given."""
    for name in ("rule_state", "optimizer_state"):
        if getattr(state, name) is not None:
            error = ValueError(f"{name} goes on with a run, and step is missing")
            error.add_note("Pass the saved step too: schedules of the rule count it.")
            raise error


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    """Shapes with their shardings; those are a tree prefix."""
    return jax.tree.map(
        lambda sharding, part: jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
        ),
        shardings,
        shapes,
    )


def _is_settled(leaf: Any) -> bool:
    """Whether a leaf of a held batch is as `start` and `step` leave it, or in a trace."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, jax.Array) and isinstance(leaf.sharding, jax.sharding.NamedSharding)


class Run(Iterator[tuple[PipelineState, StepMetrics]]):
    """A run over batches: an iterator over the state and the metrics after each.

    The yielded state may be read, and the loop may be left at any point: go on from the state with
    `step`, `finish` or another `run`. To change it in the middle, set `state`:
    `run.state, result = pipeline.flush(run.state)`.

    Attributes:
      state: the newest state; after an exception, the one to go on from. A batch that it holds
        (`current_batch`) was taken from the source and is trained next.
    """

    def __init__(self, pipeline: Pipeline, state: PipelineState, batches: Iterable[Batch]) -> None:
        """Use `Pipeline.run`."""
        self.state = state
        self._pipeline = pipeline
        self._steps = self._train(batches)

    def __next__(self) -> tuple[PipelineState, StepMetrics]:
        """Trains on the next batch."""
        return next(self._steps)

    def _train(self, batches: Iterable[Batch]) -> Iterator[tuple[PipelineState, StepMetrics]]:
        pipeline = self._pipeline
        for batch in batches:
            if self.state.current_batch is None:
                self.state = self._whole(pipeline.start(self.state, batch))
            else:
                yield self._advance(pipeline.step(self.state, batch))
        if self.state.current_batch is not None:
            yield self._advance(pipeline.finish(self.state))

    def _advance(
        self, done: tuple[PipelineState, StepMetrics]
    ) -> tuple[PipelineState, StepMetrics]:
        self.state = self._whole(done)[0]
        return done

    def _whole(self, done: Any) -> Any:
        """What a call returned; without donation, once no error of a device can come any more."""
        return done if self._pipeline.config.donate else jax.block_until_ready(done)


def make_pipeline(
    handle: AsyncEmbContextHandle,
    rule: RuleOrSchedule,
    loss_fn: LossFunction,
    dense_optimizer: DenseOptimizer,
    *,
    vocab: int,
    staleness: int = 0,
    accumulation_steps: int = 1,
    per_example: Any = None,
) -> Pipeline:
    """Makes the training steps of a model with one sharded table.

    Args:
      handle: the layout.
      rule: the table's update rule, or a function from a batch's number (a traced int32) to one,
        for schedules: `lambda step: xrex.RowwiseAdagrad(learning_rate=schedule(step))`.
      loss_fn: `loss_fn(dense_params, rows, inputs)` returns the loss, a floating-point scalar, or
        (loss, aux) with any pytree of arrays as aux, which reaches the metrics; rows are
        (tokens_per_batch, emb_width) of the table's dtype, sharded over the data axis.
      dense_optimizer: any `optax.GradientTransformation`; one with extra arguments gets `value`
        (the loss), `grad` and `value_fn`.
      vocab: rows of the table.
      staleness: 0 for exact synchronous training, 1 to overlap.
      accumulation_steps: micro-batches in a batch. The loss is called for each, with its part of
        the rows and of every leaf of the inputs that is per example, and with all other leaves
        (constants, counters, random keys) whole; loss and gradients are averaged in float32, and
        table and dense model are updated once.
      per_example: which leaves of the inputs are per example: a tree prefix of booleans, such as
        {"labels": True, "class_weights": False}. By default those whose first axis is
        `tokens_per_batch` long. Name them where examples have several tokens each, or where a
        constant happens to be as long. Matters to `accumulation_steps` alone.

    Raises:
      ValueError: a parameter is out of its range, micro-batches do not divide a rank's tokens, or
        the handle's mesh has no devices.
    """
    check_devices(handle)
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
    steps = int(accumulation_steps)
    tables = SingleTable(TableStack(handle, rule, vocab))
    return Pipeline(
        StepConfig(tables, loss_fn, dense_optimizer, int(staleness), steps, per_example)
    )
