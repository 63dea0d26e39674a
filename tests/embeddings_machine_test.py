"""Any order of calls of a pipeline of tables and features: saving, failing, predicting.

What the tables must hold and what each step must have seen of them follow from the batches alone.
"""

import functools
from collections.abc import Iterator
from typing import Any

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
from tests import embeddings_cases as cases
from tests.embeddings_cases import Descent, Step
from tests.suite_report import Tally, examples, profile

pytestmark = pytest.mark.property

BATCH = 8


class SourceError(Exception):
    """Raised by a source of batches."""


# Mesh, table axis, kind of axes, micro-batches, staleness.
SETUPS: Any = (
    ((2,), ("a",), AxisType.Auto, 1, 1),
    ((2, 2), ("b",), AxisType.Explicit, 2, 0),
    ((2,), ("a",), AxisType.Auto, 1, 0),
    ((2, 2), ("b",), AxisType.Explicit, 2, 1),
)[: 4 if profile() == "thorough" else 2]


def loss_fn(params: Any, embedded: Any, inputs: Any) -> Any:
    loss = cases.loss_fn(params, embedded, inputs["cotangents"])
    return loss + jnp.sum(params["w"] * inputs["dense"]), embedded


@functools.cache
def pipeline_of(setup: Any) -> xrex.Pipeline:
    """Compiled once per process."""
    sizes, table_axis, kind, steps, staleness = setup
    names = ("a", "b")[: len(sizes)]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    embeddings = xrex.Embeddings(
        Mesh(devices, names, axis_types=(kind,) * len(names)),
        tables={
            "users": xrex.Table(vocab=6, width=4, rule=Descent(0.5)),
            "items": xrex.Table(vocab=5, width=4, rule=Descent(0.25)),
            "words": xrex.Table(vocab=4, width=8, dtype="bfloat16", rule=Descent(0.5)),
        },
        features={
            "user": xrex.Feature("users"),
            "seen": xrex.Feature("items", max_ids=4, combiner="mean"),
            "query": xrex.Feature("words", max_ids=2),
            "bought": xrex.Feature("items", max_ids=2, combiner="sum"),
        },
        batch_size=BATCH,
        table_axis=table_axis,
        data_axis=table_axis,
    )
    return xrex.make_pipeline(
        embeddings,
        loss_fn,
        optax.sgd(1.0),
        staleness=staleness,
        accumulation_steps=steps,
        per_example={"cotangents": True, "dense": False},
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, float]:
    """A batch and a dense gradient; in some a row's or the model's is too large."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    weighted = draw(st.booleans())
    ids: dict[str, Any] = {}
    for name, vocab, lengths in (
        ("user", 6, (0, 1)),
        ("seen", 5, (0, 1, 2, 4)),
        ("query", 4, (0, 1, 2)),
        ("bought", 5, (0, 1, 2)),
    ):
        ids[name] = []
        for _ in range(BATCH):
            length = int(rng.choice(lengths))
            weights = [float(rng.choice([0.5, 1.0]))] * length
            is_weighted = weighted and name == "seen"
            # Up to one id outside each table.
            chosen = rng.integers(0, vocab + 1, length).tolist()
            ids[name].append((chosen, weights if is_weighted else None))
    shapes = {"user": (4,), "seen": (4,), "query": (2, 8), "bought": (4,)}
    cotangents = {
        name: rng.integers(-4, 5, (BATCH, *shape)).astype(np.float32) * 2
        for name, shape in shapes.items()
    }
    dense = float(rng.integers(-4, 5))
    bad = draw(st.sampled_from(["", "", "", "user", "seen", "dense"]))
    if bad == "dense":
        dense = np.inf
    elif bad:
        ids[bad][0] = ([0], None)  # Else the number might reach no row.
        cotangents[bad][0, 0] = draw(st.sampled_from([np.nan, np.inf, 3e38]))
    return Step(ids, cotangents), dense


class Machine(RuleBasedStateMachine):
    """Calls a pipeline in any legal order."""

    tally: Tally
    lag = 0  # how much more stale the oracle is than the pipeline

    @initialize(setup=st.sampled_from(SETUPS), seed=st.integers(0, 2**16))
    def begin(self, setup: Any, seed: int) -> None:
        self.pipeline = pipeline_of(setup)
        self.embeddings: Any = self.pipeline.config.tables
        self.staleness = self.pipeline.config.staleness
        self.parts = np.float32(self.pipeline.config.accumulation_steps)
        rng = np.random.default_rng(seed)
        tables = {
            name: rng.integers(-4, 5, (table.vocab, table.width)).astype(table.dtype)
            for name, table in self.embeddings.tables.items()
        }
        self.state = self.pipeline.init(jax.random.key(seed), {"w": jnp.zeros(())})
        for name, table in tables.items():
            self.state = self.embeddings.set_table(self.state, name, table)
        self.right = cases.begin(self.embeddings, tables)
        self.owed: list[Step] = []  # trained, and not in the oracle's tables yet
        self.w = np.float32(0)
        self.held: tuple[Step, float] | None = None

    def batch_of(self, drawn: tuple[Step, float]) -> xrex.Batch:
        step, dense = drawn
        ids = cases.batch_of(self.embeddings, step).token_ids
        return xrex.Batch(ids, {"cotangents": step.cotangents, "dense": np.float32(dense)})

    @precondition(lambda self: self.held is None)
    @rule(drawn=steps())
    def start(self, drawn: tuple[Step, float]) -> None:
        self.state = self.pipeline.start(self.state, self.batch_of(drawn))
        self.held = drawn

    @precondition(lambda self: self.held is not None)
    @rule(drawn=st.lists(steps(), min_size=1, max_size=3))
    def step(self, drawn: list[tuple[Step, float]]) -> None:
        for each in drawn:
            self.state, metrics = self.pipeline.step(self.state, self.batch_of(each))
            self.trained(metrics)
            self.held = each

    @precondition(lambda self: self.held is not None)
    @rule()
    def finish(self) -> None:
        self.state, metrics = self.pipeline.finish(self.state)
        self.trained(metrics)
        self.held = None
        self.settle(0)
        self.check_tables()

    @precondition(lambda self: self.held is not None)
    @rule()
    def flush(self) -> None:
        self.state, _ = self.pipeline.flush(self.state)
        self.check_tables()

    @rule(kind=st.sampled_from([np.array, jnp.asarray]))
    def save_and_restore(self, kind: Any) -> None:
        self.state = jax.tree.map(lambda leaf: kind(np.array(leaf)), self.state)

    @precondition(lambda self: self.held is not None)
    @rule(drawn=steps(), name=st.sampled_from(["user", "seen"]))
    def refuse(self, drawn: tuple[Step, float], name: str) -> None:
        batch = self.batch_of(drawn)
        wrong = {"user": np.zeros(3, int), "seen": xrex.Ragged([1], np.ones(BATCH, int))}[name]
        with pytest.raises(ValueError, match=f"'{name}'"):
            self.pipeline.step(
                self.state, batch._replace(token_ids=batch.token_ids | {name: wrong})
            )
        self.tally("calls with tables and features, refused")

    @rule(drawn=st.lists(steps(), max_size=3), prefetches=st.booleans())
    def run_until_the_source_fails(self, drawn: Any, prefetches: bool) -> None:
        def source() -> Iterator[xrex.Batch]:
            for each in drawn:
                yield self.batch_of(each)
            raise SourceError

        run = self.pipeline.run(
            self.state, self.pipeline.prefetch(source()) if prefetches else source()
        )
        waiting = drawn if self.held is not None else drawn[1:]
        self.held = drawn[0] if self.held is None and drawn else self.held
        for each in waiting:
            _, metrics = next(run)
            self.trained(metrics)
            self.held = each
        with pytest.raises(SourceError):
            next(run)
        self.state = run.state

    @rule(drawn=steps(), count=st.integers(1, BATCH))
    def predict(self, drawn: tuple[Step, float], count: int) -> None:
        step = Step({n: each[:count] for n, each in drawn[0].ids.items()}, {})
        batch = xrex.Batch(cases.batch_of(self.embeddings, step).token_ids, ())
        found = self.pipeline.predict(self.state, batch, embedded_alone)
        wanted = cases.embed(self.embeddings, self.up_to_date().tables, step)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        self.tally("predictions compared")

    def is_applied(self, step: Step, dense: float) -> bool:
        finite = all(np.all(np.abs(c) < 1e9) for c in step.cotangents.values())
        return finite and bool(np.isfinite(dense))

    def trained(self, metrics: xrex.StepMetrics) -> None:
        """What the held batch saw, and what it changed."""
        assert self.held is not None
        step, dense = self.held
        self.settle(self.staleness + self.lag)
        wanted = cases.embed(self.embeddings, self.right.tables, step)
        # With micro-batches, each rank's examples come in runs: only the order differs.
        if self.parts == 1:
            jax.tree.map(np.testing.assert_array_equal, metrics.aux, wanted)
        applied = self.is_applied(step, dense)
        assert bool(metrics.skipped) == (not applied)
        if applied:
            self.w = self.w - np.float32(dense)
        scaled = {n: c / self.parts for n, c in step.cotangents.items()}
        self.owed.append(Step(step.ids, scaled) if applied else NOTHING)
        self.tally("steps with tables and features" + ", cancelled" * (not applied))

    def settle(self, most: int) -> None:
        while len(self.owed) > most:
            self.right = self.after(self.right, self.owed.pop(0))

    def after(self, tables: cases.Tables, step: Step) -> cases.Tables:
        if step is NOTHING:
            return tables
        ranks = self.embeddings.handle.group_size
        return cases.train(self.embeddings, tables, step, ranks)

    def up_to_date(self) -> cases.Tables:
        right = self.right
        for step in self.owed:
            right = self.after(right, step)
        return right

    def check_tables(self) -> None:
        for name, wanted in self.up_to_date().tables.items():
            np.testing.assert_array_equal(self.embeddings.table(self.state, name), wanted, name)
        assert np.asarray(self.state.dense_params["w"]) == self.w


# What a skipped batch leaves to be applied.
NOTHING = Step({}, {})


def embedded_alone(params: Any, embedded: Any, inputs: Any) -> Any:
    return embedded


def machine(tally: Tally, **changes: Any) -> type[Machine]:
    return type("Machine", (Machine,), {"tally": staticmethod(tally), **changes})


def test_any_order_of_calls_is_sequential_training(tally: Tally) -> None:
    run_state_machine_as_test(
        machine(tally), settings=settings(max_examples=examples(0.1), stateful_step_count=10)
    )


def test_a_row_read_a_step_too_early_is_found_out() -> None:
    """The machine can fail: the same calls, but an oracle that is one update behind."""
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        run_state_machine_as_test(
            machine(lambda _: None, lag=1),
            settings=settings(max_examples=30, derandomize=True, phases=[Phase.generate]),
        )
