"""Mosaic GPU kernels on a GPU: right, and the same bits in every run."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import gather_rows_mgpu, reference, segment_sum_mgpu, update_rows_mgpu
from tests import kernel_cases as cases

RUNS = 5


def hopper():
    """The first NVIDIA GPU of capability 9.0 or newer; None where there is none."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    return next((d for d in devices if float(d.compute_capability) >= 9.0), None)


pytestmark = [
    pytest.mark.requires_gpu,
    pytest.mark.skipif(
        hopper() is None, reason="needs an NVIDIA GPU of compute capability 9.0 or newer"
    ),
]


def run(function, arguments):
    """The result of a kernel, which is seen to be the same in several runs."""
    arguments = jax.device_put(arguments, hopper())
    compiled = jax.jit(function)
    results = [jax.device_get(compiled(*arguments)) for _ in range(RUNS)]
    for other in results[1:]:
        assert_same_bits(other, results[0])
    return results[0]


def assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(cases.bits(a), cases.bits(b))


@pytest.mark.parametrize("case", cases.GATHERS, ids=cases.name)
def test_gather_rows(case):
    arguments = cases.gather_arguments(case, seed=0)
    rows = run(functools.partial(gather_rows_mgpu.gather_rows, tuning=case.tuning), arguments)
    assert_same_bits(rows, cases.gather_oracle(*arguments))


@pytest.mark.parametrize("case", cases.UPDATES, ids=cases.name)
def test_update_rows(case):
    fn = cases.rule(case.rule, case.dtype).function
    arguments = cases.update_arguments(case, seed=0)
    tables = run(
        functools.partial(update_rows_mgpu.update_rows, fn=fn, tuning=case.tuning), arguments
    )
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(functools.partial(reference.update_rows, fn=fn))(*arguments)
    if case.rule == "descent":
        assert_same_bits(tables, expected)
    else:  # A GPU's square roots and divisions may differ in the last bits.
        for table, wanted in zip(tables, expected, strict=True):
            tolerance = 2**-7 if table.dtype.itemsize == 2 else 1e-5
            np.testing.assert_allclose(
                table.astype(np.float32),
                np.asarray(wanted).astype(np.float32),
                rtol=tolerance,
                atol=tolerance,
            )


@pytest.mark.parametrize("case", cases.SEGMENT_SUMS, ids=cases.name)
@pytest.mark.parametrize("exact", [True, False])
def test_segment_sum(case, exact):
    values, ids = cases.segment_sum_arguments(case, seed=0, exact=exact)
    function = functools.partial(
        segment_sum_mgpu.segment_sum,
        num_segments=case.segments,
        dtype=case.dtype,
        tuning=case.tuning,
    )
    sums, squares = run(function, (values, ids))
    tuning = case.tuning or segment_sum_mgpu.SegmentSumTuning.choose(case.width)
    expected = cases.segment_sum_oracle(values, ids, case.segments, tuning.rows)
    expected = expected.astype(values.dtype).astype(np.float32)
    assert_same_bits(sums, expected)
    np.testing.assert_allclose(squares, np.sum(expected * expected, axis=1), rtol=1e-5)
