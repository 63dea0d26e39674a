"""Rowwise Adagrad: its parameters, decay at once and caught up, schedules; against the oracle."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_ulps

BFLOAT16 = ml_dtypes.bfloat16
HANDLE = layouts.FEW_LAYOUTS[0].handle()

# `exp` may be 2 ulps off, and the accumulator is multiplied by it.
ACCUMULATOR_ULPS = 4


def _update(rule: xrex.RowwiseAdagrad, ids: Any, grads: Any, table: Any, state: Any) -> Any:
    tokens = xrex.compress_token_ids(HANDLE, ids, table.shape[0])
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    table, state, pin = xrex.update_start(HANDLE, rule, update, table, state)
    return table, state, xrex.update_done(HANDLE, pin)


update = jax.jit(_update)


def _batches(steps: int, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids that skip rows for a few steps, and random gradients, summed exactly."""
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(steps):
        ids = rng.choice(rng.permutation(layouts.VOCAB)[:10], layouts.TOKENS).astype(np.int32)
        grads = rng.integers(-64, 65, (layouts.TOKENS, layouts.WIDTH)) / 32
        batches.append((ids, grads.astype(dtype)))
    return batches


def _init(rule: xrex.RowwiseAdagrad) -> Any:
    """The first state where later ones are: one program serves all steps."""
    return layouts.put(HANDLE, rule.init(layouts.VOCAB))


def _run(rule: oracle.Adagrad, dtype: Any, steps: int = 6) -> tuple[Any, Any]:
    """The library and the oracle, step by step on the same batches; compares as it goes."""
    table = layouts.random_table(2, dtype)
    ours = layouts.put_table(HANDLE, table), _init(xrex.RowwiseAdagrad(**vars(rule)))
    theirs = table, oracle.init(rule, layouts.VOCAB)
    for ids, grads in _batches(steps, dtype):
        tokens = oracle.compress(ids, layouts.VOCAB, layouts.VOCAB)
        ours = update(xrex.RowwiseAdagrad(**vars(rule)), ids, grads, *ours)[:2]
        theirs = oracle.update(rule, *theirs, tokens.unique_tokens, grads, tokens.segment_ids)[:2]
        _compare(ours, theirs, dtype)
    return ours, theirs


def _compare(ours: Any, theirs: Any, dtype: Any) -> None:
    (table, state), (expected, expected_state) = ours, theirs
    assert_ulps(
        state.accumulator, expected_state.accumulator, np.float32, ACCUMULATOR_ULPS, "accumulator"
    )
    assert_same_bits(state.clock, expected_state.clock)
    if expected_state.last_step is None:
        assert state.last_step is None
    else:
        assert_same_bits(state.last_step, expected_state.last_step)
    actual = np.asarray(table)
    if dtype == BFLOAT16:
        # Rounded after each operation, so an ulp of float32 shows in one of thousands of values.
        assert np.mean(actual == expected) > 0.99
    # Values are below 16: an ulp there, for sums whose terms may round to either side.
    tolerance = 3 * np.spacing(np.float32(8)) * (2**16 if dtype == BFLOAT16 else 1)
    np.testing.assert_allclose(
        actual.astype(np.float32), expected.astype(np.float32), rtol=0, atol=tolerance
    )


DECAYS = [
    {},
    {"half_life_steps": 3.0},
    {"weight_decay": 0.1},
    {"half_life_steps": 0.7, "weight_decay": 0.01},
]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_six_steps_as_the_oracle_has_them(decay: Any, lazy: bool, dtype: Any) -> None:
    _run(oracle.Adagrad(learning_rate=0.5, eps=1e-3, lazy=lazy, **decay), dtype)


def test_without_decay_lazy_and_eager_are_the_same_bits() -> None:
    # In float32 the two programs may fuse a product with an addition in one and not in the other.
    rule = oracle.Adagrad(learning_rate=0.5)
    (eager, eager_state), _ = _run(rule, BFLOAT16)
    (lazy, lazy_state), _ = _run(dataclasses.replace(rule, lazy=True), BFLOAT16)
    assert_same_bits(lazy, eager)
    assert_same_bits(lazy_state.accumulator, eager_state.accumulator)


def test_lazy_equals_eager_for_a_row_touched_in_every_step() -> None:
    """Except in the first step: a row cannot be late before it was ever touched."""
    ids = np.full((layouts.TOKENS,), 3, np.int32)
    grads = np.ones((layouts.TOKENS, layouts.WIDTH), np.float32) / 16
    table = np.ones((layouts.VOCAB, layouts.WIDTH), np.float32)
    after = []
    for lazy in (False, True):
        rule = xrex.RowwiseAdagrad(learning_rate=0.5, half_life_steps=2, lazy=lazy)
        state = _init(rule)
        new = layouts.put_table(HANDLE, table)
        for _ in range(4):
            new, state, _ = update(rule, ids, grads, new, state)
        after.append((new, state))
    assert_ulps(after[1][0], after[0][0], np.float32, 2)
    assert_ulps(after[1][1].accumulator, after[0][1].accumulator, np.float32, 2)


def test_a_skipped_update_stops_the_clock() -> None:
    rule = xrex.RowwiseAdagrad(learning_rate=0.5, half_life_steps=2, lazy=True)
    state = _init(rule)
    table = layouts.put_table(HANDLE, layouts.random_table(2, np.float32))
    (ids, grads), (other_ids, other_grads) = _batches(2, np.float32)
    table, state, _ = update(rule, ids, grads, table, state)
    bad = grads.copy()
    bad[5, 7] = np.nan
    same, same_state, result = update(rule, ids, bad, table, state)
    assert not result.valid
    assert state.clock == same_state.clock == 1
    through, with_gap = (
        update(rule, other_ids, other_grads, *arrays)
        for arrays in ((table, state), (same, same_state))
    )
    jax.tree.map(assert_same_bits, with_gap, through)


def test_a_clock_behind_last_step_does_not_grow_weights() -> None:
    """As after resetting the clock of a table that goes on: n is 0 there, never negative."""
    rule = xrex.RowwiseAdagrad(learning_rate=0.0, weight_decay=0.1, half_life_steps=1, lazy=True)
    state = _init(rule)
    state = state._replace(
        last_step=jnp.full((layouts.VOCAB,), 100, jnp.int32),
        accumulator=jnp.ones((layouts.VOCAB,)),
    )
    table = np.ones((layouts.VOCAB, layouts.WIDTH), np.float32)
    ids = np.full((layouts.TOKENS,), 3, np.int32)
    grads = np.ones((layouts.TOKENS, layouts.WIDTH), np.float32)
    new, state, _ = update(rule, ids, grads, layouts.put_table(HANDLE, table), state)
    assert_same_bits(new, table)
    assert state.accumulator[3] == 1 + layouts.TOKENS**2
    assert state.last_step[3] == 0


# The learning rate


def test_a_schedule_compiles_once() -> None:
    traces = []

    @jax.jit
    def step(rate: jax.Array, table: jax.Array, state: Any) -> Any:
        traces.append(rate)
        rule = xrex.RowwiseAdagrad(learning_rate=rate, eps=1e-30)
        return _update(rule, ids, grads, table, state)

    ids = np.full((layouts.TOKENS,), 3, np.int32)
    grads = np.ones((layouts.TOKENS, layouts.WIDTH), np.float32)
    state = xrex.RowwiseAdagrad(learning_rate=0.0).init(layouts.VOCAB)
    table = np.zeros((layouts.VOCAB, layouts.WIDTH), np.float32)
    for rate in (0.25, 1.0, 4.0):
        new, _, _ = step(jnp.float32(rate), table, state)
        assert_same_bits(new[3], np.full((layouts.WIDTH,), -rate, np.float32))
    assert len(traces) == 1


def test_rules_that_differ_in_rate_alone_share_a_program() -> None:
    first, second = (xrex.RowwiseAdagrad(learning_rate=rate) for rate in (0.5, 0.25))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    other = xrex.RowwiseAdagrad(learning_rate=0.5, eps=1e-7)
    assert jax.tree.structure(first) != jax.tree.structure(other)
    assert jax.tree.unflatten(jax.tree.structure(first), [0.5]) == first


@pytest.mark.parametrize("rate", [1, np.float32(1), np.int8(1), jnp.bfloat16(1), jnp.float32(1)])
def test_what_a_learning_rate_may_be(rate: Any) -> None:
    rule = xrex.RowwiseAdagrad(learning_rate=rate, eps=1e-30)
    ids = np.full((layouts.TOKENS,), 3, np.int32)
    grads = np.ones((layouts.TOKENS, layouts.WIDTH), np.float32)
    table = np.zeros((layouts.VOCAB, layouts.WIDTH), np.float32)
    new, _, _ = _update(rule, ids, grads, table, rule.init(layouts.VOCAB))
    assert_same_bits(new[3], np.full((layouts.WIDTH,), -1, np.float32))


def test_rate_0_changes_the_state_alone() -> None:
    rule = xrex.RowwiseAdagrad(learning_rate=0)
    ids, grads = _batches(1, np.float32)[0]
    table = layouts.random_table(3, np.float32)
    new, state, _ = update(rule, ids, grads, layouts.put_table(HANDLE, table), rule.init(32))
    np.testing.assert_array_equal(new, table)
    assert set(np.flatnonzero(state.accumulator)) <= set(ids.tolist())


BAD_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -1e-9,
    1e39,
    10**400,
    "1",
    None,
    True,
    1j,
    Fraction(1),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("learning_rate", value) for value in [*BAD_NUMBERS, np.float32(1) * np.ones(2)]],
        *[("eps", value) for value in [*BAD_NUMBERS, 0, -0.0, 1e-39]],
        *[("half_life_steps", value) for value in [*BAD_NUMBERS, 0, 1e-50] if value is not None],
        *[("weight_decay", value) for value in BAD_NUMBERS],
        *[("lazy", value) for value in (1, None, "yes", np.bool_(True))],
        ("learning_rate", jnp.ones((1,))),
        ("learning_rate", jnp.int32(1)),
    ],
)
def test_bad_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        xrex.RowwiseAdagrad(**({"learning_rate": 0.1} | {name: value}))


def test_the_state_before_the_first_update() -> None:
    lazy = xrex.RowwiseAdagrad(learning_rate=1, lazy=True).init(5)
    assert [(leaf.shape, leaf.dtype.name) for leaf in lazy] == [
        ((5,), "float32"),
        ((5,), "int32"),
        ((), "int32"),
    ]
    assert all(not leaf.any() for leaf in jax.tree.leaves(lazy))
    assert xrex.RowwiseAdagrad(learning_rate=1).init(5).last_step is None
