"""Mosaic GPU kernels in the GPU interpreter: the reference's bits, and no data races."""

import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import gather_rows_mgpu, reference, segment_sum_mgpu, update_rows_mgpu
from tests import gpu_interpreter
from tests import kernel_cases as cases

pytestmark = pytest.mark.interpret

# A run takes seconds, and a seed cannot be made simpler: no shrinking.
EXAMPLES = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=4 if cases.THOROUGH else 1,
)


@functools.cache
def gather(case, interpreter):
    return jax.jit(
        functools.partial(gather_rows_mgpu.gather_rows, tuning=case.tuning, interpret=interpreter)
    )


@functools.cache
def update(case, interpreter):
    return jax.jit(
        functools.partial(
            update_rows_mgpu.update_rows,
            fn=cases.rule(case.rule, case.dtype).function,
            tuning=case.tuning,
            interpret=interpreter,
        )
    )


@functools.cache
def segment_sum(case, interpreter):
    return jax.jit(
        functools.partial(
            segment_sum_mgpu.segment_sum,
            num_segments=case.segments,
            dtype=case.dtype,
            tuning=case.tuning,
            interpret=interpreter,
        )
    )


def run(kernel, *arguments):
    """The kernel's result, once it has been seen to be without races."""
    with gpu_interpreter.recorded_races() as races:
        result = jax.block_until_ready(kernel(*arguments))
    assert not races, races[0]
    return result


def assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(cases.bits(a), cases.bits(b))


@pytest.mark.parametrize("case", cases.GATHERS, ids=cases.name)
@given(seed=cases.SEEDS)
@settings(EXAMPLES)
def test_gather_rows_has_the_references_bits(case, seed):
    arguments = cases.as_jax(cases.gather_arguments(case, seed))
    actual = run(gather(case, gpu_interpreter.interpreter()), *arguments)
    assert_same_bits(actual, reference.gather_rows(*arguments))


@pytest.mark.parametrize("case", cases.UPDATES, ids=cases.name)
@given(seed=cases.SEEDS)
@settings(EXAMPLES)
def test_update_rows_has_the_references_bits(case, seed):
    arguments = cases.as_jax(cases.update_arguments(case, seed))
    actual = run(update(case, gpu_interpreter.interpreter()), *arguments)
    fn = cases.rule(case.rule, case.dtype).function
    assert_same_bits(actual, jax.jit(functools.partial(reference.update_rows, fn=fn))(*arguments))


@pytest.mark.parametrize("case", cases.SEGMENT_SUMS, ids=cases.name)
@given(seed=cases.SEEDS)
@settings(EXAMPLES)
def test_segment_sum_adds_in_the_promised_order(case, seed):
    """Of every second segment no order shows: the reference, whose order is another, must agree."""
    values, ids = cases.segment_sum_arguments(case, seed, exact=False)
    exact_values, same_ids = cases.segment_sum_arguments(case, seed, exact=True)
    assert_same_bits(ids, same_ids)
    # Not of the last one, which may hold most tokens.
    is_exact = (case.segments - 1 - np.arange(case.segments)) % 2 == 1
    inside = (ids >= 0) & (ids < case.segments)
    exact_tokens = inside & is_exact[np.where(inside, ids, 0)]
    values = np.where(exact_tokens[:, None], exact_values, values)
    sums, squares = run(segment_sum(case, gpu_interpreter.interpreter()), values, ids)

    tuning = case.tuning or segment_sum_mgpu.SegmentSumTuning.choose(case.width)
    expected = cases.segment_sum_oracle(values, ids, case.segments, tuning.rows)
    expected = expected.astype(values.dtype).astype(np.float32)
    assert_same_bits(sums, expected)
    np.testing.assert_allclose(squares, np.sum(expected * expected, axis=1), rtol=1e-5)
    referred = reference.segment_sum(*cases.as_jax((values, ids)), case.segments, case.dtype)
    for actual, other in zip((sums, squares), referred, strict=True):
        assert_same_bits(np.asarray(actual)[is_exact], np.asarray(other)[is_exact])


@pytest.mark.parametrize(("dtype", "splits"), [("float32", 1), ("bfloat16", 2)])
def test_a_square_sum_tells_that_a_sum_is_not_zero(dtype, splits):
    values, ids, expected = cases.underflowing_sums(dtype)
    tuning = segment_sum_mgpu.SegmentSumTuning(16, splits)
    case = cases.SegmentSum(len(ids), 64, dtype, 6, tuning)
    _, squares = run(segment_sum(case, gpu_interpreter.interpreter()), values, ids)
    assert_same_bits(squares, expected)


SHARDED = {
    "gather_rows": (
        gather,
        cases.Gather(20, 8, "bfloat16", 10, gather_rows_mgpu.GatherTuning(4, 1)),
    ),
    "update_rows": (
        update,
        cases.Update(20, 32, "float32", 19, "descent", update_rows_mgpu.UpdateTuning(16, 1)),
    ),
    "segment_sum": (
        segment_sum,
        cases.SegmentSum(40, 32, "float32", 4, segment_sum_mgpu.SegmentSumTuning(16, 1)),
    ),
}


@pytest.mark.parametrize("kernel", SHARDED)
def test_several_devices_under_shard_map(kernel):
    """Each device has columns of its own, and the same ids."""
    make, case = SHARDED[kernel]
    devices, columns, whole = 3, PartitionSpec(None, "x"), PartitionSpec()
    wide = case._replace(width=case.width * devices)
    if kernel == "gather_rows":
        arguments = cases.gather_arguments(wide, seed=0)
        expected = reference.gather_rows(*cases.as_jax(arguments))
        in_specs, out_specs = (columns, whole), columns
    elif kernel == "update_rows":
        arguments = cases.update_arguments(wide, seed=0)
        fn = cases.rule(case.rule, case.dtype).function
        expected = reference.update_rows(*cases.as_jax(arguments), fn)
        in_specs, out_specs = ((columns,), whole, (columns,), (whole, whole)), (columns,)
    else:
        arguments = cases.segment_sum_arguments(wide, seed=0, exact=True)
        expected = reference.segment_sum(*cases.as_jax(arguments), case.segments, case.dtype)
        expected = (expected[0], expected[1])
        in_specs, out_specs = (columns, whole), (columns, whole)
    local = make(case, gpu_interpreter.interpreter())

    def body(*arguments):
        result = local(*arguments)
        if kernel == "segment_sum":
            result = (result[0], jax.lax.psum(result[1], "x"))
        return result

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    assert_same_bits(run(jax.jit(mapped), *cases.as_jax(arguments)), expected)


ARGUMENTS = {
    "gather_rows": cases.gather_arguments,
    "update_rows": cases.update_arguments,
    "segment_sum": cases.segment_sum_arguments,
}


# The waits of a block, and which of them is forgotten: the one for ids, or (the last) for rows. The
# rows of `gather_rows` are read by a copy only, which JAX 0.10.2 does not check.
@pytest.mark.parametrize(
    ("kernel", "waits", "forgotten"),
    [("gather_rows", 2, 1), ("update_rows", 3, 3), ("segment_sum", 2, 2)],
)
def test_a_forgotten_wait_is_a_race(kernel, waits, forgotten, monkeypatch):
    real_wait = plgpu.barrier_wait
    calls = itertools.count(1)

    def forgetful_wait(barrier):
        if next(calls) % waits != forgotten % waits:
            real_wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful_wait)
    assert planted_races(kernel)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 0), reason="JAX 0.10.2 does not see races of copies out"
)
@pytest.mark.parametrize("kernel", ["update_rows", "segment_sum"])
def test_copies_out_race_with_writes_that_were_not_committed(kernel, monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    assert planted_races(kernel)


def planted_races(kernel):
    make, case = SHARDED[kernel]
    planted = make.__wrapped__(case, gpu_interpreter.interpreter())
    arguments = cases.as_jax(ARGUMENTS[kernel](case, seed=0))
    with gpu_interpreter.recorded_races() as races:
        jax.block_until_ready(planted(*arguments))
    return races


def test_nothing_to_do():
    interpreter = gpu_interpreter.interpreter()
    table, none = jnp.ones((4, 8), jnp.float32), jnp.zeros((0,), jnp.int32)
    rows = gather_rows_mgpu.gather_rows(table, none, interpret=interpreter)
    assert rows.shape == (0, 8)
    (same,) = update_rows_mgpu.update_rows(
        (table,), none, (rows,), (), lambda rows, operands, scalars: rows, interpret=interpreter
    )
    assert_same_bits(same, table)
    sums, squares = segment_sum_mgpu.segment_sum(
        rows, none, 3, dtype="float32", interpret=interpreter
    )
    assert_same_bits((sums, squares), (np.zeros((3, 8), np.float32), np.zeros(3, np.float32)))
