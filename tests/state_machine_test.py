"""The pipeline through any order of calls, against the oracle that does one thing at a time.

Every number of the model is exact, so each comparison is bit for bit. The rows' gradients turn with
the sign of the rows that the model saw: one that is read too early or too late shows in the table.
Buffers are refilled as soon as a call returns, the state is saved and put together again at any
point, gradients overflow, the table's rate is NaN at times, calls are illegal, and sources fail.
"""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from jax.sharding import AxisType, Mesh

import xrex
from tests import oracle, strategies, trial
from tests.assertions import assert_same_bits_on_every_device
from tests.suite_report import Tally, examples

pytestmark = pytest.mark.property

VOCAB = 8
WIDTH = 8
TOKENS = 8
BFLOAT16 = strategies.DTYPES[1]
DENSE_RATE = 0.5
TABLE_RULE = xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30, lazy=True)


def rate_is_finite(step: Any) -> Any:
    """Whether the schedule of the table has a rate for a step."""
    return step % 7 != 3


def scheduled_rule(step: jax.Array) -> xrex.RowwiseAdagrad:
    """`TABLE_RULE`, but in some steps its rate is NaN."""
    rate = jnp.where(rate_is_finite(step), TABLE_RULE.learning_rate, jnp.nan)
    return dataclasses.replace(TABLE_RULE, learning_rate=rate.astype(jnp.float32))


class SourceError(Exception):
    """Raised by a source of batches."""


@dataclass(frozen=True)
class Setup:
    """One pipeline to drive."""

    sizes: tuple[int, ...]
    table_axis: tuple[str, ...]
    axis_type: AxisType
    dtype: Any
    accumulation_steps: int
    policy: oracle.IdPolicy
    num_unique: int
    staleness: int


# A line; copies of the table on a permuted square, with room for three ids; explicit axes; eight
# devices. Each synchronous and overlapped.
SETUPS = tuple(
    Setup(*setup, staleness)
    for setup in (
        ((2,), ("a",), AxisType.Auto, np.dtype(np.float32), 1, oracle.ZERO, 8),
        ((2, 2), ("b",), AxisType.Auto, BFLOAT16, 2, oracle.IdPolicy("clip"), 3),
        ((2, 2), ("b", "a"), AxisType.Explicit, np.dtype(np.float32), 1, oracle.ZERO, 8),
        ((4, 2), ("a", "b"), AxisType.Auto, BFLOAT16, 1, oracle.IdPolicy("zero", 3), 8),
    )
    for staleness in (0, 1)
)


class Inputs(NamedTuple):
    """What the loss makes gradients of; integers."""

    rows: Any  # (tokens, width): a row's gradient, up to its sign
    dense: Any  # (tokens, width): sums to the dense gradient


def loss_fn(params: Any, rows: jax.Array, inputs: Inputs) -> jax.Array:
    signs = jnp.where(jax.lax.stop_gradient(rows) >= 0, 1, -1).astype(jnp.float32)
    of_rows = jnp.sum(rows.astype(jnp.float32) * signs * inputs.rows)
    return of_rows + jnp.sum(params["w"][None] * inputs.dense)


@functools.cache
def pipeline_of(setup: Setup) -> xrex.Pipeline:
    """Compiled once per process."""
    names = strategies.NAMES[: len(setup.sizes)]
    devices = np.array(jax.devices()[: int(np.prod(setup.sizes))])[::-1].reshape(setup.sizes)
    handle = xrex.make_context_handle(
        Mesh(devices, names, axis_types=(setup.axis_type,) * len(names)),
        setup.table_axis,
        data_axis=setup.table_axis[::-1],
        tokens_per_batch=TOKENS,
        emb_width=WIDTH,
        num_unique=setup.num_unique,
        num_devices_per_node=8,
        out_of_range=setup.policy.out_of_range,
        padding_id=setup.policy.padding_id,
    )
    return xrex.make_pipeline(
        handle,
        scheduled_rule,
        loss_fn,
        optax.sgd(DENSE_RATE),
        vocab=VOCAB,
        staleness=setup.staleness,
        accumulation_steps=setup.accumulation_steps,
    )


class Snapshot(NamedTuple):
    """Where a run began, on the host."""

    table: np.ndarray
    rule_state: oracle.State
    w: np.ndarray
    step: int


@st.composite
def batches(draw: st.DrawFn, setup: Setup) -> xrex.Batch:
    """A batch; in some a gradient is not finite or overflows: a row's, the model's, a padding's."""
    ids = draw(strategies.id_streams(TOKENS, pipeline_of(setup).config.handle.group_size, VOCAB))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    rows = trial.exact_gradients(rng, trained_rows(setup, ids), WIDTH)
    dense = rng.integers(-4, 5, (TOKENS, WIDTH)).astype(np.float32)
    bad = draw(st.sampled_from(["", "", "", "", "rows", "dense"]))
    # The last is finite, and its square is not.
    value = draw(st.sampled_from([np.inf, -np.inf, np.nan, 3e38]))
    if bad:
        {"rows": rows, "dense": dense}[bad][draw(st.integers(0, TOKENS - 1)), 0] = value
    return xrex.Batch(ids, Inputs(rows, dense))


def trained_rows(setup: Setup, ids: np.ndarray) -> np.ndarray:
    """The row that each token trains; -1 where it has none, or found no room."""
    rows = oracle.resolve(ids, VOCAB, setup.policy).trained
    segments = oracle.compress(ids, VOCAB, setup.num_unique, setup.policy).segment_ids
    return np.where(segments >= 0, rows, -1)


def is_applied(setup: Setup, batch: xrex.Batch, step: int) -> bool:
    """Whether a step on the batch changes anything."""
    segments = np.where(trained_rows(setup, batch.token_ids) >= 0, 0, -1)
    rows, dense = batch.inputs
    # As micro-batches add it up; SGD keeps what is finite so.
    with np.errstate(over="ignore", invalid="ignore"):
        dense = dense.sum(axis=0, dtype=np.float32)
    parts = setup.accumulation_steps
    return bool(
        oracle.bounded(rows / np.float32(parts), segments)
        and np.isfinite(dense).all()
        and rate_is_finite(step)
    )


class PipelineMachine(RuleBasedStateMachine):
    """Calls a pipeline in any legal order; what it must hold follows from the batches alone."""

    tally: Tally
    lag = 0  # how much more stale the oracle is than the pipeline

    @initialize(setup=st.sampled_from(SETUPS), seed=st.integers(0, 2**16))
    def begin(self, setup: Setup, seed: int) -> None:
        rng = np.random.default_rng(seed)
        table = rng.integers(-4, 5, (VOCAB, WIDTH)).astype(setup.dtype)
        adagrad = oracle.init(oracle.Adagrad(**vars(TABLE_RULE)), VOCAB)
        self.setup = setup
        self.pipeline = pipeline_of(setup)
        self.snapshot = Snapshot(table, adagrad, np.zeros(WIDTH, np.float32), 0)
        buffers = xrex.Batch(
            np.zeros(TOKENS, np.int32), Inputs(*np.zeros((2, TOKENS, WIDTH), np.float32))
        )
        self.buffers = buffers
        self.restart_from_snapshot()

    def take_snapshot(self) -> None:
        self.snapshot = Snapshot(
            np.array(self.state.table),
            oracle.State(*map(np.array, self.state.rule_state)),
            np.array(self.state.dense_params["w"]),
            int(self.state.step),
        )
        self.trained = []

    def restart_from_snapshot(self) -> None:
        """A new state from host arrays, as after a restart of the program."""
        rule_state = xrex.RowwiseAdagradState(*map(jnp.asarray, self.snapshot.rule_state))
        params = {"w": self.snapshot.w}
        self.state = self.pipeline.init(
            self.snapshot.table, params, rule_state=rule_state, step=self.snapshot.step
        )
        self.trained: list[xrex.Batch] = []
        self.held: xrex.Batch | None = None

    @precondition(lambda self: self.held is None)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.hold(data.draw(batches(self.setup)))

    def hold(self, batch: xrex.Batch) -> None:
        self.state = self.pipeline.start(self.state, self.refilled(batch))
        self.spoil()
        self.held = batch

    def refilled(self, batch: xrex.Batch) -> xrex.Batch:
        """The batch in the buffers of the one before, as a loader may hand it out."""
        jax.tree.map(np.copyto, self.buffers, batch)
        return self.buffers

    def spoil(self) -> None:
        for buffer in jax.tree.leaves(self.buffers):
            buffer[...] = 1

    @precondition(lambda self: self.held is not None)
    @rule(data=st.data())
    def steps(self, data: st.DataObject) -> None:
        for batch in data.draw(st.lists(batches(self.setup), min_size=1, max_size=4)):
            self.state, metrics = self.pipeline.step(self.state, self.refilled(batch))
            self.spoil()
            self.check_metrics(metrics)
            self.held = batch
        if self.setup.staleness == 0:
            self.check_state()

    @precondition(lambda self: self.held is not None)
    @rule()
    def finish(self) -> None:
        self.state, metrics = self.pipeline.finish(self.state)
        self.check_metrics(metrics)
        self.check_state()
        self.held = None
        self.take_snapshot()  # Nothing is owed now: what follows is a run of its own.

    @precondition(lambda self: self.held is not None)
    @rule()
    def flush(self) -> None:
        self.state, _ = self.pipeline.flush(self.state)
        self.check_state()

    @rule(
        kind=st.sampled_from(
            [np.array, jnp.asarray, lambda x: jax.device_put(x, jax.devices()[-1])]
        )
    )
    def save_and_restore(self, kind: Any) -> None:
        """The same state of saved arrays, whatever is in flight."""
        self.state = jax.tree.map(lambda leaf: kind(np.array(leaf)), self.state)
        self.tally("pipeline states put together from saved arrays")

    @precondition(lambda self: self.held is not None)
    @rule(data=st.data(), bad=st.sampled_from(["short", "wide", "inputs"]))
    def refuse(self, data: st.DataObject, bad: str) -> None:
        """A call that raises changes nothing."""
        batch = data.draw(batches(self.setup))
        if bad == "short":
            batch = batch._replace(token_ids=batch.token_ids[1:])
        elif bad == "wide":
            batch = batch._replace(token_ids=batch.token_ids.astype(np.int64) + 2**40)
        else:
            batch = batch._replace(inputs=jax.tree.map(lambda x: x[:, 1:], batch.inputs))
        with pytest.raises((TypeError, ValueError)):
            self.pipeline.step(self.state, batch)
        self.tally("pipeline calls refused")

    @rule(data=st.data())
    def run_until_the_source_fails(self, data: st.DataObject) -> None:
        drawn = data.draw(st.lists(batches(self.setup), max_size=3))

        def source() -> Iterator[xrex.Batch]:
            for batch in drawn:
                yield self.refilled(batch)
                self.spoil()
            raise SourceError

        run = self.pipeline.run(self.state, source())
        waiting = drawn if self.held is not None else drawn[1:]
        self.held = drawn[0] if self.held is None and drawn else self.held
        for batch in waiting:
            _, metrics = next(run)
            self.check_metrics(metrics)
            self.held = batch
        with pytest.raises(SourceError):
            next(run)
        self.state = run.state
        self.tally("pipeline sources failed")

    @precondition(lambda self: self.trained or self.snapshot.step)
    @rule()
    def flush_and_restart(self) -> None:
        """Goes on in a new state from what the flushed one holds; a batch held is started again."""
        self.flush()
        held = self.held
        self.take_snapshot()
        self.restart_from_snapshot()
        if held is not None:
            self.hold(held)
        self.tally("pipeline restarts")

    def check_metrics(self, metrics: xrex.StepMetrics) -> None:
        assert self.held is not None
        applied = is_applied(self.setup, self.held, self.snapshot.step + len(self.trained))
        assert bool(metrics.skipped) == (not applied)
        room = oracle.compress(self.held.token_ids, VOCAB, self.setup.num_unique, self.setup.policy)
        assert int(metrics.dropped) == room.dropped
        self.trained.append(self.held)
        self.tally("pipeline steps" + ", cancelled" * (not applied))

    def check_state(self) -> None:
        """Compares with the oracle's run over all batches since the last restart."""
        right = oracle.train(
            oracle.Adagrad(**vars(TABLE_RULE)),
            self.snapshot.table,
            self.snapshot.rule_state,
            [batch.token_ids for batch in self.trained],
            self.dense_step,
            self.snapshot.w,
            staleness=self.setup.staleness + self.lag,
            num_unique=self.setup.num_unique,
            policy=self.setup.policy,
        )
        actual = (self.state.table, self.state.rule_state, self.state.dense_params["w"])
        wanted = (right.table, tuple(right.state), right.carry)
        leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)
        for name, (leaf, value) in zip(
            ("table", "accumulator", "last_step", "clock", "dense"), leaves, strict=True
        ):
            assert_same_bits_on_every_device(leaf, value, name)
        assert int(self.state.step) == self.snapshot.step + len(self.trained)
        self.tally("pipeline states compared")

    def dense_step(self, number: int, embeddings: np.ndarray, w: np.ndarray) -> oracle.Gradients:
        """The model of `loss_fn`, for the oracle."""
        batch, parts = self.trained[number], np.float32(self.setup.accumulation_steps)
        signs = np.where(embeddings >= 0, 1, -1).astype(np.float32)
        rows = (batch.inputs.rows * signs).astype(self.setup.dtype) / parts.astype(self.setup.dtype)
        applied = is_applied(self.setup, batch, self.snapshot.step + number)
        if applied:
            w = w - np.float32(DENSE_RATE) * (batch.inputs.dense.sum(axis=0) / parts)
        return oracle.Gradients(rows, w, pending=applied)


def machine(tally: Tally, **changes: Any) -> type[PipelineMachine]:
    return type("Machine", (PipelineMachine,), {"tally": staticmethod(tally), **changes})


def test_any_order_of_calls_is_sequential_training(tally: Tally) -> None:
    run_state_machine_as_test(
        machine(tally), settings=settings(max_examples=examples(0.25), stateful_step_count=15)
    )


def test_a_row_read_a_step_too_early_is_found_out() -> None:
    """The machine can fail: the same calls, but an oracle that is one update behind."""
    search = settings(max_examples=100, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError, match="bits differ"):
        run_state_machine_as_test(machine(lambda _: None, lag=1), settings=search)
