"""Any tables and features on any mesh compute what the oracle computes of each table by itself."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xrex
from tests import embeddings_cases as cases
from tests import embeddings_strategies
from tests.assertions import assert_same_bits_on_every_device
from tests.suite_report import Tally, examples

pytestmark = pytest.mark.property

STEPS = 3


def saw_embedded(params: Any, embedded: Any, inputs: Any) -> Any:
    return cases.loss_fn(params, embedded, inputs), embedded


def run(
    embeddings: xrex.Embeddings,
    tables: dict[str, np.ndarray],
    steps: list[cases.Step],
    staleness: int,
    ragged: bool = True,
) -> tuple[Any, list[Any]]:
    """The final state, and what the loss function saw in each step."""
    import optax

    pipeline = xrex.make_pipeline(embeddings, saw_embedded, optax.sgd(0.0), staleness=staleness)
    state = pipeline.init(jax.random.key(0), {})
    for name, table in tables.items():
        state = embeddings.set_table(state, name, table)
    batches = [cases.batch_of(embeddings, step, ragged) for step in steps]
    seen = []
    training = pipeline.run(state, batches)
    for _, metrics in training:
        assert not metrics.skipped
        assert metrics.dropped == 0
        seen.append(metrics.aux)
    return training.state, seen


def expect(
    embeddings: xrex.Embeddings,
    tables: dict[str, np.ndarray],
    steps: list[cases.Step],
    staleness: int,
) -> tuple[cases.Tables, list[Any]]:
    ranks = embeddings.handle.group_size
    now, owed, seen = cases.begin(embeddings, tables), [], []
    for step in steps:
        while len(owed) > staleness:
            now = cases.train(embeddings, now, owed.pop(0), ranks)
        seen.append(cases.embed(embeddings, now.tables, step))
        owed.append(step)
    for step in owed:
        now = cases.train(embeddings, now, step, ranks)
    return now, seen


@given(st.data())
@settings(max_examples=examples(0.15))
def test_exact_training_is_the_oracle_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    embeddings = data.draw(embeddings_strategies.models())
    steps = data.draw(embeddings_strategies.exact_steps(embeddings, STEPS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    tables = embeddings_strategies.exact_tables(rng, embeddings)
    staleness = data.draw(st.integers(0, 1))
    state, seen = run(embeddings, tables, steps, staleness, data.draw(st.booleans()))
    right, right_seen = expect(embeddings, tables, steps, staleness)
    for number, (found, wanted) in enumerate(zip(seen, right_seen, strict=True)):
        for name in wanted:
            what = f"step {number} {name}"
            assert_same_bits_on_every_device(found[name], wanted[name], what)
    for name, wanted in right.tables.items():
        assert_same_bits_on_every_device(embeddings.table(state, name), wanted, name)
    tally("models of tables and features")
