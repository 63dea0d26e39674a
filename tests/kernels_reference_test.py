"""The reference kernels against the oracle, row by row in NumPy."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import reference
from tests import kernel_cases as cases


@pytest.mark.parametrize("case", cases.GATHERS, ids=cases.name)
@given(seed=cases.SEEDS)
@settings(max_examples=10, deadline=None)
def test_gather_rows(case, seed):
    table, ids = cases.gather_arguments(case, seed)
    rows = jax.jit(reference.gather_rows)(table, ids)
    np.testing.assert_array_equal(cases.bits(rows), cases.bits(cases.gather_oracle(table, ids)))


@pytest.mark.parametrize("case", [c for c in cases.UPDATES if c.rule == "descent"], ids=cases.name)
@given(seed=cases.SEEDS)
@settings(max_examples=10, deadline=None)
def test_update_rows(case, seed):
    arguments = cases.update_arguments(case, seed, exact=True)
    fn = cases.rule(case.rule, case.dtype).function
    (table,) = jax.jit(functools.partial(reference.update_rows, fn=fn))(*arguments)
    np.testing.assert_array_equal(cases.bits(table), cases.bits(cases.descent_oracle(*arguments)))


@pytest.mark.parametrize("case", cases.SEGMENT_SUMS, ids=cases.name)
@given(seed=cases.SEEDS)
@settings(max_examples=10, deadline=None)
def test_segment_sum(case, seed):
    values, ids = cases.segment_sum_arguments(case, seed, exact=True)
    function = functools.partial(
        reference.segment_sum, num_segments=case.segments, dtype=values.dtype
    )
    sums, squares = jax.jit(function)(values, ids)
    expected = cases.segment_sum_oracle(values, ids, case.segments, rows=16)
    expected = expected.astype(values.dtype).astype(np.float32)
    np.testing.assert_array_equal(cases.bits(sums), cases.bits(expected))
    np.testing.assert_array_equal(squares, np.sum(expected * expected, axis=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_square_sum_tells_that_a_sum_is_not_zero(dtype):
    values, ids, expected = cases.underflowing_sums(dtype)
    function = functools.partial(reference.segment_sum, num_segments=6, dtype=dtype)
    sums, squares = jax.jit(function)(values, ids)
    np.testing.assert_array_equal(squares, expected)
    np.testing.assert_array_equal(squares != 0, np.any(np.asarray(sums) != 0, axis=1))
