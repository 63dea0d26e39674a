"""Every accepted layout computes what the oracle computes, however its mesh is written down."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from tests import one_layout, strategies, trial
from tests.judge import make_handle
from tests.suite_report import Tally, examples
from xrex.layout.layout import Layout

pytestmark = pytest.mark.property


# Compiling is what costs: a layout is tried on several tables and batches.
TRIALS = 5


@given(st.data())
@settings(max_examples=examples(1 / TRIALS))
def test_lookup_is_the_rows_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    one_layout.check_lookup(data.draw, data.draw(strategies.legal_layouts()), TRIALS)
    for _ in range(TRIALS):
        tally("examples of lookups")


@given(st.data())
@settings(max_examples=examples(1 / TRIALS))
def test_two_exact_updates_are_the_oracle_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts())
    eager = data.draw(st.sampled_from([False] * 7 + [True]))
    step = trial.training_step if eager else trial.quick_step
    one_layout.check_exact_updates(data.draw, layout, step, TRIALS)
    for _ in range(TRIALS):
        tally("examples of exact updates" + ", eager" * eager)


@given(st.data())
@settings(max_examples=examples(1 / TRIALS))
def test_two_random_updates_are_the_oracle_within_an_ulp(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts())
    quick = data.draw(st.sampled_from([True] * 7 + [False]))
    step = trial.quick_step if quick else trial.jitted_step
    one_layout.check_random_updates(data.draw, layout, step, TRIALS)
    for _ in range(TRIALS):
        tally("examples of random updates" + ", optimized" * (not quick))


# In two parts, so that two processes share the work.
@pytest.mark.parametrize("part", [1, 2])
def test_nothing_depends_on_how_a_layout_is_written_down(part: int, tally: Tally) -> None:
    @settings(max_examples=examples(0.5 / len(one_layout.CHANGES) / 2))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        one_layout.check_invariance(data.draw, data.draw(strategies.legal_layouts()))
        for change in one_layout.CHANGES:
            tally(f"examples of {change.__name__}")

    # Where the same layouts are drawn in every run, the parts draw different ones.
    (seed(part)(check) if settings().derandomize else check)()


@given(st.data())
@settings(max_examples=examples(0.15))
def test_results_do_not_depend_on_the_number_of_ranks(tally: Tally, data: st.DataObject) -> None:
    def layout_of(ranks: int) -> Layout:
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("x",))
        return Layout(
            mesh,
            ("x",),
            data_axis=("x",),
            tokens_per_batch=16,
            emb_width=8,
            num_unique=num_unique,
            num_devices_per_node=8,
        )

    num_unique = data.draw(st.sampled_from([16, 4]))
    dtype = data.draw(st.sampled_from(strategies.DTYPES))
    attempt = data.draw(strategies.exact_trials(layout_of(1), dtype=dtype))
    # Any two of capacity, type and rule meet in every way: all three would be twice the programs.
    rule = one_layout.EXACT_RULES[(num_unique == 4) ^ (dtype == np.float32)]
    one, *others = (
        trial.run(make_handle(layout_of(ranks)), rule, attempt, trial.quick_step)
        for ranks in (1, 2, 4, 8)
    )
    for other in others:
        trial.assert_same_values(other, one)
    tally("examples of 1, 2, 4 and 8 ranks")


def test_the_exact_gradients_are_exact() -> None:
    """A sum of them is the same number in any order, and a power of two in every column."""
    rng = np.random.default_rng(0)
    rows = np.array([3, 1, 3, -1, 3, 0, 1, 3])
    grads = trial.exact_gradients(rng, rows, 6)
    assert np.isinf(grads[3]).all()
    for row in (0, 1, 3):
        total = np.abs(grads[rows == row].sum(axis=0))
        assert len(set(total.tolist())) == 1
        assert math.log2(total[0]).is_integer()
