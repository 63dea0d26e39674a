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
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.checks import INT32
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.layout import is_positive_integer
from xrex.rules.base import UpdateRule, check_state
from xrex.table_set import TableStack, for_each
from xrex.training import dense_params as dense
from xrex.training import inputs, state_placement
from xrex.training import step as train_step
from xrex.training.config import StepConfig
from xrex.training.prefetch import PlacedBatch, Prefetch
from xrex.training.run import Run
from xrex.training.state import Batch, PipelineState, StepMetrics, detach_bags


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
        table: Any,
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
          table: of `Embeddings` a random key, from which each table begins on its devices, or a
            saved state's `table`; else the one table, (vocab, emb_width) bfloat16 or float32.
            Arrays are copied, save JAX arrays on GPUs that are sharded `P(None, table_axis)`, which
            the state takes over.
          dense_params: any pytree of arrays and numbers, copied; leaves that are not on the mesh
            yet are replicated. Those that are no floating-point numbers are left alone.
          rule_state: to go on from, copied or taken over like the table; a fresh one where None.
          optimizer_state: to go on from, copied; a fresh one where None.
          step: batches trained so far, which schedules of the rule count; goes with the two states,
            and is 0 where there are none.

        Raises:
          ValueError: a table's shape is not (vocab, width); a state is not the rule's; `step` is
            given and a state that goes with it is not, or the other way round.
          TypeError: a table has another dtype; a dense leaf is no array.
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
        # Not the caller's: what the first step donates, and NumPy's memory in a JAX array.
        fresh = jax.tree.map(placement.unless_numpys, fresh)
        fresh = fresh._replace(step=np.int32(count), table=config.tables.make_tables(table))
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

    def flush(self, state: PipelineState) -> tuple[PipelineState, Any]:
        """Applies the deferred table update, so that the table holds all batches trained so far.

        Neutral: going on from the flushed state gives the same bits as never having flushed. The
        batch that is held stays so, with the rows that were read for it. The result is in no later
        step's metrics.

        Returns:
          The state, and the update's result; None where nothing is ever deferred (staleness 0, or
          an idle state).
        """
        batch = None if state.current_batch is None else self._held(state.current_batch)
        state = self._in_place(state._replace(current_batch=None))
        if state.previous_update is None:
            return state._replace(current_batch=batch), None
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

    def run(self, state: PipelineState, batches: Iterable[Batch]) -> Run:
        """Trains on each batch in turn; yields the state and the metrics after each.

        From an idle state, or one that holds a batch, to an idle state. Each step takes the state
        over, so that the one that was passed is used up by the first. An exception, of the source
        or of a step, loses nothing: `state` of what this returns is the newest state, and so is the
        one that was yielded last (or, before the first, the one that was passed). See `Run`.
        """
        return Run(self, state, batches)

    def predict(
        self,
        state: PipelineState,
        batch: Batch,
        apply_fn: Callable[[Any, Any, Any], Any],
        *,
        per_example: Any = None,
    ) -> Any:
        """What a model makes of a batch: forward only. The state is not changed.

        Sees every update trained so far. A deferred one (staleness 1, in the middle of a run) is
        applied to a copy of the tables: call `flush` first where there is no room for one.

        Args:
          state: at any point of a run.
          batch: of any size up to a whole batch's; it is padded. Its inputs may be others than
            those of training.
          apply_fn: `apply_fn(dense_params, embedded, inputs)` returns any pytree of arrays with an
            entry for each example; `embedded` is what the loss function sees. Compiled once: pass
            the same function in each call.
          per_example: which leaves of the inputs are per example, as of `make_pipeline`; by default
            those whose first axis has an entry for each.

        Returns:
          What `apply_fn` returned, of the batch's own examples.

        Raises:
          ValueError: as in `step`; an output has no entry for each example.
        """
        config = dataclasses.replace(self.config, per_example=per_example, accumulation_steps=1)
        ids, examples = config.tables.place_part(batch.token_ids)
        padded = inputs.pad(config, batch.inputs, examples)
        placed = Batch(config.tables.by_stack(ids), inputs.place(config, padded))
        state = self._in_place(state._replace(current_batch=None, current_lookup=None))
        state = state._replace(optimizer_state=None)
        if not state.has_pending_update:
            state = state._replace(previous_update=None)
        key = (train_step.predict, apply_fn)
        if key not in self._programs:
            self._programs[key] = jax.jit(partial(train_step.predict, config, apply_fn))
        outputs = self._programs[key](state, placed)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _of_examples(config, path, leaf, examples), outputs
        )

    def prefetch(self, batches: Iterable[Batch], size: int = 2) -> Prefetch:
        """The batches, packed and placed by a thread up to `size` ahead of their steps.

          for state, metrics in pipeline.run(state, pipeline.prefetch(batches)):
              ...

        The source is read by the thread, one batch after the other. An error, of the source or of
        a batch, is raised by the step that needs the batch, and nothing before it is lost.

        Args:
          batches: the source.
          size: how many batches may wait.

        Raises:
          ValueError: `size` is not a positive integer.
        """
        if not is_positive_integer(size):
            raise ValueError(f"size={size!r} must be a positive integer")
        return Prefetch(lambda batch: PlacedBatch(*self._placed(batch)), batches, int(size))

    def lower_step(self, state: PipelineState, next_batch: Batch) -> Any:
        """The lowered step (`jax.stages.Lowered`), of a state that holds a batch.

        Takes shapes (`jax.ShapeDtypeStruct`) as well as arrays; of shapes, what is in flight may be
        left out.
        """
        state, batch = self._release(state, "lower_step")
        if self.config.staleness == 1 and state.current_lookup is None:
            ids = self.config.tables.by_stack(batch.token_ids)
            lookup, update = _with_shardings(*self._started(ids, state.table))
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
            _, shardings = self._started(ids, tables)
            self._programs[key] = self._program(train_step.start, shardings, donates=False)
        return self._programs[key]

    def _started(self, ids: Any, tables: Any) -> tuple[Any, Any]:
        """What `start` puts in flight, as shapes, and the shardings of it."""
        shapes = jax.eval_shape(partial(train_step.start, self.config), ids, tables)
        return shapes, state_placement.in_flight_shardings(self.config.handle, shapes)

    def _step_program(
        self, state: PipelineState, batch: Batch, next_batch: Batch
    ) -> tuple[Any, tuple[Any, ...]]:
        """The program of a step, and what to call it with."""
        by_stack = self.config.tables.by_stack
        if self.config.staleness == 1:
            next_ids = by_stack(next_batch.token_ids)
            program = self._program(train_step.step_ahead, self._returned(state))
            return program, (*detach_bags(state), batch.inputs, next_ids)
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
        self._check_in_flight(state)
        batch = self._held(state.current_batch)
        return self._in_place(state._replace(current_batch=None)), batch

    def _held(self, batch: Any) -> Any:
        """The batch that a state holds, placed if it was put together by the caller."""
        handle = self.config.handle
        if all(_is_settled(handle, leaf) for leaf in jax.tree.leaves(batch)):
            return batch
        return self._placed(batch)

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
        if isinstance(batch, PlacedBatch):
            return Batch(*batch)
        token_ids, batch_inputs = batch
        return Batch(self.config.tables.place(token_ids), inputs.place(self.config, batch_inputs))

    def _counted(self, metrics: StepMetrics, batch: Batch) -> StepMetrics:
        """The metrics with what was counted while the batch was packed."""
        return metrics._replace(**self.config.tables.counts(batch.token_ids))


def _of_examples(config: StepConfig, path: Any, output: jax.Array, examples: int) -> jax.Array:
    """The entries of an output that are of the batch's own examples."""
    if jnp.shape(output)[:1] != (config.batch_size,):
        raise ValueError(
            f"apply_fn returned an array of shape {jnp.shape(output)}"
            f"{' at ' + jax.tree_util.keystr(path) if path else ''}, and must return an entry for "
            f"each of {config.batch_size} examples"
        )
    whole = examples == config.batch_size
    return output if whole else placement.first_entries(config.handle, output, examples)


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


def _is_settled(handle: AsyncEmbContextHandle, leaf: Any) -> bool:
    """Whether a leaf of a held batch is as `start` and `step` leave it, or in a trace."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, jax.Array) and placement.is_on_mesh(handle, leaf)
