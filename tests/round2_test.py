"""Inputs on which the pipeline, updates and lookups of 0.1 went wrong, each with what is right.

Defaults: two devices, a float32 table of zeros with 8 rows of 2 columns, rowwise Adagrad with
rate 1, SGD with rate 1 for the dense model.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits
from tests.compilations import compilations

VOCAB = 8
WIDTH = 2
STALENESS = pytest.mark.parametrize("staleness", [0, 1])
RULE = xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30)


def handle_of(tokens: int, devices: int = 2, **policy: Any) -> xrex.AsyncEmbContextHandle:
    return layouts.line(
        devices, tokens_per_batch=tokens, emb_width=WIDTH, num_unique=tokens, **policy
    )


def linear_loss(params: jax.Array, rows: jax.Array, inputs: jax.Array) -> jax.Array:
    """The gradient of each row is `inputs`, the dense one is 1."""
    return jnp.sum(rows * inputs).astype(params.dtype) + params


def pipeline_of(
    loss_fn: Callable[..., Any] = linear_loss,
    *,
    tokens: int = 4,
    devices: int = 2,
    staleness: int = 0,
    rule: Any = RULE,
    optimizer: Any = None,
    **options: Any,
) -> xrex.Pipeline:
    return xrex.make_pipeline(
        handle_of(tokens, devices),
        rule,
        loss_fn,
        optax.sgd(1.0) if optimizer is None else optimizer,
        vocab=VOCAB,
        staleness=staleness,
        **options,
    )


def zeros() -> np.ndarray:
    return np.zeros((VOCAB, WIDTH), np.float32)


def train(
    pipeline: xrex.Pipeline, state: xrex.PipelineState, batches: list[xrex.Batch]
) -> tuple[xrex.PipelineState, list[xrex.StepMetrics]]:
    states, metrics = zip(*pipeline.run(state, batches), strict=True)
    return states[-1], list(metrics)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros at an address that is a multiple of 64, as XLA takes them over."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


# The caller's memory


def spread_out(x: np.ndarray) -> jax.Array:
    """On both devices, each copy of which may be the memory itself."""
    return jax.device_put(x, NamedSharding(handle_of(4).mesh, P()))


AS_ARRAY = {
    "numpy": lambda x: x,
    "dlpack": jnp.from_dlpack,
    "asarray": jnp.asarray,
    "devices": spread_out,
}


@pytest.mark.parametrize(
    ("kind", "devices", "staleness"),
    [
        ("numpy", 1, 1),
        ("numpy", 2, 0),
        ("dlpack", 1, 0),
        ("dlpack", 2, 1),
        ("asarray", 1, 1),
        ("devices", 2, 1),
    ],
)
def test_a_loader_may_refill_its_buffers(kind: str, devices: int, staleness: int) -> None:
    tokens = 4096
    as_array = AS_ARRAY[kind]
    pipeline = pipeline_of(
        lambda params, rows, inputs: jnp.mean(inputs["labels"]) + 0 * (jnp.sum(rows) + params),
        tokens=tokens,
        devices=devices,
        staleness=staleness,
    )
    ids, labels = aligned((tokens,), np.int32), aligned((tokens,), np.float32)

    def loader() -> Iterator[xrex.Batch]:
        for k in range(5):
            ids[:], labels[:] = k, k
            yield xrex.Batch(as_array(ids), {"labels": as_array(labels)})
            ids[:], labels[:] = 99, 99

    metrics = [metrics for _, metrics in pipeline.run(pipeline.init(zeros(), 0.0), loader())]
    assert [float(m.loss) for m in metrics] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "devices"),
    [("numpy", 1), ("numpy", 2), ("dlpack", 1), ("dlpack", 2), ("devices", 2)],
)
def test_tables_parameters_and_states_may_be_written_to(kind: str, devices: int) -> None:
    as_array = AS_ARRAY[kind]
    pipeline = pipeline_of(devices=devices, optimizer=optax.sgd(1.0, momentum=0.5))
    table, params = aligned((VOCAB, WIDTH), np.float32), aligned((16,), np.float32)
    fresh = pipeline.init(table, jnp.zeros(16))
    arrays = {
        "table": table,
        "params": params,
        "accumulator": aligned((VOCAB,), np.float32),
        "momentum": aligned((16,), np.float32),
    }
    state = pipeline.init(
        as_array(table),
        as_array(params),
        rule_state=fresh.rule_state._replace(accumulator=as_array(arrays["accumulator"])),
        optimizer_state=jax.tree.map(lambda _: as_array(arrays["momentum"]), fresh.optimizer_state),
        step=0,
    )
    for array in arrays.values():
        array[...] = 7
    for leaf in jax.tree.leaves(state):
        assert not np.any(np.asarray(leaf)), "the caller's memory is in the state"


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_of_eager_calls_may_be_written_to(devices: int) -> None:
    handle = handle_of(4096, devices)
    for trial in range(5):
        table, ids = aligned((VOCAB, WIDTH), np.float32), aligned((4096,), np.int32)
        grads = aligned((4096, WIDTH), np.float32)
        table[:], grads[:] = 1, 1 / 1024
        pin = xrex.lookup_start(handle, ids, table)
        ids[:], table[:] = 5, 9
        assert_same_bits(xrex.lookup_done(handle, pin), np.ones((4096, WIDTH), np.float32))
        ids[:], table[:] = 0, 1
        tokens = xrex.compress_token_ids(handle, ids, VOCAB)
        segments = np.array(tokens.segment_ids)
        update = xrex.GradientUpdate(tokens.unique_tokens, grads, segments)
        new, _, _ = xrex.update_start(handle, RULE, update, table, RULE.init(VOCAB))
        grads[:], table[:], segments[:], ids[:] = 9, 9, 3, 3
        np.testing.assert_array_equal(np.asarray(new)[:2], [[0, 0], [1, 1]], str(trial))


@STALENESS
def test_a_batch_of_a_saved_state_may_be_written_to_after_a_flush(staleness: int) -> None:
    pipeline = pipeline_of(staleness=staleness)
    ids, labels = aligned((4,), np.int32), aligned((4, WIDTH), np.float32)
    state = pipeline.start(pipeline.init(zeros(), 0.0), xrex.Batch(ids, labels))
    state, _ = pipeline.flush(state._replace(current_batch=xrex.Batch(ids, labels)))
    ids[:], labels[:] = 7, 7
    state, _ = pipeline.finish(state)
    np.testing.assert_array_equal(state.table, zeros())


@STALENESS
def test_labels_on_one_device_are_placed_as_ids_are(staleness: int) -> None:
    pipeline = pipeline_of(staleness=staleness)
    labels = jax.device_put(jnp.ones((4, WIDTH)), jax.devices()[0])
    ids = jax.device_put(jnp.arange(4), jax.devices()[1])
    state, _ = train(pipeline, pipeline.init(zeros(), 0.0), [xrex.Batch(ids, labels)] * 2)
    assert int(state.step) == 2


# A step happens whole or not at all


def host_of(state: xrex.PipelineState) -> Any:
    return jax.tree.map(np.asarray, state._replace(step=0))


def assert_unchanged(state: xrex.PipelineState, before: Any) -> None:
    jax.tree.map(assert_same_bits, host_of(state), before)


OVERFLOWING = (
    ([3, 3, 3, 3], [3e38] * 4),
    ([0, 1, 2, 3], [1e20] * 4),
    ([0, 1, 2, 3], [1.8e19] * 4),
    ([3, 3, 3, 3], [3e38, -3e38, 3e38, -3e38]),
    ([0, 1, 2, 3], [np.inf, 0, 0, 0]),
    ([0, 1, 2, 3], [0, 0, 0, np.nan]),
)


@STALENESS
@pytest.mark.parametrize("dtype", [np.float32, oracle.bfloat16], ids=["float32", "bfloat16"])
def test_sums_that_overflow_move_nothing(dtype: Any, staleness: int) -> None:
    pipeline = pipeline_of(staleness=staleness, optimizer=optax.sgd(1.0, momentum=0.5))
    good = xrex.Batch(np.arange(4), np.ones((4, WIDTH), dtype))
    for ids, gradients in OVERFLOWING:
        inputs = np.repeat(np.array(gradients, np.float32)[:, None], WIDTH, 1).astype(dtype)
        bad = xrex.Batch(np.array(ids), inputs)
        alone = pipeline.init(np.zeros((VOCAB, WIDTH), dtype), jnp.zeros((), dtype))
        before = host_of(alone)
        state, (metrics,) = train(pipeline, alone, [bad])
        assert bool(metrics.skipped)
        assert_unchanged(state, before)
        state, told = train(pipeline, state, [good, bad, good])
        assert [bool(m.skipped) for m in told] == [False, True, False]
        assert int(state.rule_state.clock) == 2
        finite = [np.all(np.isfinite(np.asarray(x, np.float32))) for x in jax.tree.leaves(state)]
        assert all(finite)


@pytest.mark.parametrize(("rate", "staleness"), [(np.nan, 0), (np.nan, 1), (-np.inf, 1)])
def test_a_rate_that_is_not_finite_changes_nothing(rate: float, staleness: int) -> None:
    rates = jnp.array([rate, 1.0, rate, 1.0])
    pipeline = pipeline_of(
        staleness=staleness, rule=lambda k: xrex.RowwiseAdagrad(learning_rate=rates[k], eps=1e-30)
    )
    batches = [xrex.Batch(np.full(4, k), np.full((4, WIDTH), 0.25, np.float32)) for k in range(4)]
    state, metrics = train(pipeline, pipeline.init(zeros(), 0.0), batches)
    assert [bool(m.skipped) for m in metrics] == [True, False, True, False]
    np.testing.assert_array_equal(np.asarray(state.table)[:4, 0], [0, -1, 0, -1])
    assert (float(state.dense_params), int(state.rule_state.clock)) == (-2, 2)


def test_an_update_with_a_rate_that_is_not_finite_is_not_valid() -> None:
    handle = handle_of(4)
    tokens = xrex.compress_token_ids(handle, np.arange(4), VOCAB)
    update = xrex.GradientUpdate(
        tokens.unique_tokens, np.ones((4, WIDTH), np.float32), tokens.segment_ids
    )
    rule = xrex.RowwiseAdagrad(learning_rate=jnp.float32(np.nan))
    table, state, pin = xrex.update_start(handle, rule, update, zeros(), rule.init(VOCAB))
    assert not bool(xrex.update_done(handle, pin).valid)
    assert not np.any(table)
    assert int(state.clock) == 0


@STALENESS
@pytest.mark.parametrize("optimizer", [optax.adam(1.0), optax.sgd(3e38)], ids=["adam", "sgd"])
def test_a_dense_update_that_overflows_moves_nothing(optimizer: Any, staleness: int) -> None:
    """The gradient is finite; its square in Adam, or the step of SGD, is not."""
    pipeline = pipeline_of(
        lambda params, rows, scale: jnp.sum(rows) + jnp.sum(params) * scale[0],
        staleness=staleness,
        optimizer=optimizer,
    )
    with jax.numpy_dtype_promotion("standard"):
        state = pipeline.init(zeros(), jnp.zeros(3))
        before = host_of(state)
        batch = xrex.Batch(np.arange(4), np.array([1e30], np.float32))
        state, (metrics,) = train(pipeline, state, [batch])
    assert bool(metrics.skipped)
    assert_unchanged(state, before)


@STALENESS
def test_rows_and_accumulators_stay_finite(staleness: int) -> None:
    pipeline = pipeline_of(
        staleness=staleness, rule=xrex.RowwiseAdagrad(learning_rate=3e38, eps=2e-38)
    )
    batches = [
        xrex.Batch(np.arange(4), np.full((4, WIDTH), g, np.float32))
        for g in (1e18, 1e-22, 1e18, 1e18, 1e-30)
    ]
    state, metrics = train(pipeline, pipeline.init(zeros(), 0.0), batches)
    assert not any(bool(m.skipped) for m in metrics)
    assert np.all(np.isfinite(state.table))
    assert np.all(np.isfinite(state.rule_state.accumulator))


@STALENESS
@pytest.mark.parametrize("dtype", [np.float32, oracle.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_whose_squares_underflow_are_applied(dtype: Any, staleness: int) -> None:
    rule = {"learning_rate": 1.0, "eps": 1e-8, "lazy": True}
    pipeline = pipeline_of(staleness=staleness, rule=xrex.RowwiseAdagrad(**rule))
    grads = np.zeros((4, WIDTH), dtype)
    grads[0], grads[1, 1] = 1e-25, 1e-25  # the others are zeros: not touched
    table = np.ones((VOCAB, WIDTH), dtype) * np.asarray(2.0**-60, dtype)
    state = pipeline.init(table, 0.0)
    state, _ = train(pipeline, state, [xrex.Batch(np.arange(4), grads)] * 2)
    adagrad = oracle.Adagrad(**rule)
    want, want_state = table, oracle.init(adagrad, VOCAB)
    for _ in range(2):
        want, want_state, result = oracle.update(
            adagrad, want, want_state, np.arange(4), grads, np.arange(4)
        )
        assert result.valid
    assert_same_bits(state.table, want)
    assert np.any(want[:2] != table[:2])
    assert_same_bits(want[2:], table[2:])
    assert_same_bits(state.rule_state.last_step, want_state.last_step)


# Restarts


RATES = (1.0, 0.5, 0.25, 0.125)


def scheduled(staleness: int, devices: int = 2) -> xrex.Pipeline:
    rates = jnp.array(RATES)
    return pipeline_of(
        staleness=staleness,
        devices=devices,
        rule=lambda k: xrex.RowwiseAdagrad(learning_rate=rates[k], eps=1e-30),
        optimizer=optax.sgd(lambda k: rates[k]),
    )


def one_id_batches() -> list[xrex.Batch]:
    return [xrex.Batch(np.full(4, k), np.full((4, WIDTH), 0.25, np.float32)) for k in range(4)]


def through_init(pipeline: xrex.Pipeline, saved: xrex.PipelineState) -> xrex.PipelineState:
    return pipeline.init(
        saved.table,
        saved.dense_params,
        rule_state=saved.rule_state,
        optimizer_state=saved.optimizer_state,
        step=saved.step,
    )


def in_parts(pipeline: xrex.Pipeline, saved: xrex.PipelineState) -> xrex.PipelineState:
    return pipeline.init(zeros(), 0.0)._replace(**saved._asdict())


def as_a_whole(pipeline: xrex.Pipeline, saved: xrex.PipelineState) -> xrex.PipelineState:
    return xrex.PipelineState(*saved)


KINDS: tuple[Callable[[np.ndarray], Any], ...] = (
    np.copy,
    jnp.asarray,
    lambda x: jax.device_put(x, jax.devices()[1]),
)


@STALENESS
@pytest.mark.parametrize("devices", [1, 2])
def test_a_saved_state_goes_on(devices: int, staleness: int) -> None:
    pipeline = scheduled(staleness, devices)
    batches = one_id_batches()
    train(pipeline, pipeline.init(zeros(), 0.0), batches)  # compiles
    for put_together, kind in itertools.product((through_init, in_parts, as_a_whole), KINDS):
        state, _ = train(pipeline, pipeline.init(zeros(), 0.0), batches[:2])
        saved = jax.tree.map(lambda leaf, kind=kind: kind(np.asarray(leaf)), state)
        with compilations() as compiled:
            state, _ = train(pipeline, put_together(pipeline, saved), batches[2:])
        assert not compiled, "a state put together again is another to jax.jit"
        np.testing.assert_array_equal(np.asarray(state.table)[:4, 0], np.negative(RATES))
        assert float(state.dense_params) == -sum(RATES)
        assert int(state.step) == 4


def test_a_step_needs_the_states_that_counted_up_to_it() -> None:
    pipeline = pipeline_of(optimizer=optax.adam(1.0))
    state = pipeline.init(zeros(), 0.0)
    with pytest.raises(ValueError, match="step=2 goes on with a run, and rule_state is missing"):
        pipeline.init(zeros(), 0.0, step=2, optimizer_state=state.optimizer_state)
    with pytest.raises(ValueError, match="and optimizer_state is missing"):
        pipeline.init(zeros(), 0.0, step=2, rule_state=state.rule_state)
    with pytest.raises(ValueError, match="step=-1"):
        through_init(pipeline, state._replace(step=-1))
    with pytest.raises(ValueError, match=r"step=1\.5"):
        through_init(pipeline, state._replace(step=1.5))


def test_a_state_that_was_donated_is_named() -> None:
    pipeline = pipeline_of(staleness=1)
    state = pipeline.start(pipeline.init(zeros(), 0.0), one_id_batches()[0])
    pipeline.finish(state)
    with pytest.raises(ValueError, match="the state's table was donated to an earlier call"):
        pipeline.finish(state)


def test_a_flushed_update_is_told_of_once() -> None:
    pipeline = pipeline_of(staleness=1)
    batches = one_id_batches()
    state = pipeline.start(pipeline.init(zeros(), 0.0), batches[0])
    state, _ = pipeline.step(state, batches[1])
    state, flushed = pipeline.flush(state)
    assert bool(flushed.valid)
    assert float(flushed.norm) > 0
    state, again = pipeline.flush(state)
    state, metrics = pipeline.step(state, batches[2])
    for told in (again, metrics.update):
        assert (float(told.norm), bool(told.valid), int(told.dropped)) == (0, False, 0)
    state, metrics = pipeline.step(state, batches[3])
    assert bool(metrics.update.valid)


# An exception loses nothing


def assert_goes_on(pipeline: xrex.Pipeline, state: xrex.PipelineState) -> None:
    """The state can be read, and trained on to the end."""
    assert np.all(np.isfinite(state.table))
    done, _ = train(pipeline, state, one_id_batches())
    assert np.all(np.isfinite(done.table))


class SourceError(Exception):
    """What a loader may raise."""


def failing_source(good: int) -> Iterator[xrex.Batch]:
    yield from one_id_batches()[:good]
    raise SourceError


def short_batch() -> xrex.Batch:
    return xrex.Batch(np.arange(3), np.ones((3, WIDTH), np.float32))


BAD_LAST: dict[str, Callable[[], Iterator[xrex.Batch]]] = {
    "source": lambda: failing_source(0),
    "short": lambda: iter([short_batch()]),
    "inputs": lambda: iter([xrex.Batch(np.arange(4), np.ones((3, 5), np.float32))]),
    "wide id": lambda: iter([xrex.Batch(np.full(4, 2**40), np.ones((4, WIDTH), np.float32))]),
}


@STALENESS
def test_an_exception_in_a_run_loses_nothing(staleness: int) -> None:
    pipeline = pipeline_of(staleness=staleness)
    raised = {"source": SourceError, "inputs": TypeError}
    for bad, (good, which) in itertools.product(
        BAD_LAST, [(0, "passed"), (1, "passed"), (1, "newest"), (3, "newest")]
    ):
        passed = pipeline.init(zeros(), 0.0)
        source = itertools.chain(one_id_batches()[:good], BAD_LAST[bad]())
        run = pipeline.run(passed, source)
        seen = 0
        with pytest.raises(raised.get(bad, ValueError)):  # noqa: PT012 (the loop itself raises)
            for _ in run:
                seen += 1
        assert seen == max(0, good - 1)
        # The last batch before the error is held, and not lost.
        assert (run.state.current_batch is not None) == (good > 0)
        if which == "passed":
            assert_goes_on(pipeline, passed)
        else:
            finished, _ = train(pipeline, run.state, [])
            want, _ = train(pipeline, pipeline.init(zeros(), 0.0), one_id_batches()[:good])
            assert_same_bits(finished.table, want.table)


@STALENESS
def test_the_state_that_was_yielded_last_goes_on(staleness: int) -> None:
    pipeline = pipeline_of(staleness=staleness)
    state = pipeline.init(zeros(), 0.0)
    with pytest.raises(SourceError):
        for state, _ in pipeline.run(state, failing_source(3)):  # noqa: B007, B020
            pass
    assert_goes_on(pipeline, state)
    state = pipeline.init(zeros(), 0.0)
    for state, _ in pipeline.run(state, one_id_batches()):  # noqa: B007, B020
        break
    assert_goes_on(pipeline, state)


@STALENESS
def test_a_loss_that_raises_while_it_is_traced_loses_nothing(staleness: int) -> None:
    fails = [True]

    def loss(params: jax.Array, rows: jax.Array, inputs: jax.Array) -> jax.Array:
        if fails[0]:
            raise SourceError
        return linear_loss(params, rows, inputs)

    pipeline = pipeline_of(loss, staleness=staleness)
    state = pipeline.init(zeros(), 0.0)
    with pytest.raises(SourceError):
        list(pipeline.run(state, one_id_batches()))
    with pytest.raises(SourceError):
        pipeline.start(state, one_id_batches()[0])
    fails[0] = False
    assert_goes_on(pipeline, state)


@STALENESS
def test_an_error_of_a_device_loses_nothing_without_donation(staleness: int) -> None:
    fails = [False]

    def check(value: Any) -> np.ndarray:
        if fails[0]:
            raise SourceError
        return np.asarray(value)

    def loss(params: jax.Array, rows: jax.Array, inputs: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        seen = jax.lax.stop_gradient(jnp.sum(inputs))
        return linear_loss(params, rows, inputs) + 0 * jax.pure_callback(check, shape, seen)

    pipeline = pipeline_of(loss, staleness=staleness, devices=1).without_donation()
    batches = one_id_batches()
    run = pipeline.run(pipeline.init(zeros(), 0.0), batches)
    next(run)
    fails[0] = True
    with pytest.raises(Exception):  # noqa: B017, PT011 (XLA's own, of a name that changes)
        next(run)
    fails[0] = False
    state, _ = train(pipeline, run.state, batches[2:])
    want, _ = train(pipeline, pipeline.init(zeros(), 0.0), batches)
    np.testing.assert_array_equal(
        np.asarray(state.table)[[0, 2, 3]], np.asarray(want.table)[[0, 2, 3]]
    )


@STALENESS
def test_a_batch_that_cannot_be_trained_is_not_held(staleness: int) -> None:
    pipeline = pipeline_of(staleness=staleness)
    wrong = xrex.Batch(np.arange(4), np.ones((3, WIDTH), np.float32))
    idle = pipeline.init(zeros(), 0.0)
    with pytest.raises(TypeError) as caught:
        pipeline.start(idle, wrong)
    assert any("not taken" in note for note in caught.value.__notes__)
    state = pipeline.start(idle, one_id_batches()[0])
    with pytest.raises(TypeError):
        pipeline.step(state, wrong)
    state, _ = pipeline.step(state, one_id_batches()[1])
    assert_goes_on(pipeline, state)


# Gradient accumulation


@pytest.mark.parametrize(
    ("dtype", "steps"), [(jnp.bfloat16, 512), (jnp.bfloat16, 1024), (jnp.float16, 1024)]
)
def test_totals_are_float32(dtype: Any, steps: int) -> None:
    pipeline = pipeline_of(
        lambda params, rows, inputs: params + 0 * jnp.sum(rows).astype(dtype),
        tokens=2 * steps,
        accumulation_steps=steps,
        optimizer=optax.sgd(1.0),
    )
    state = pipeline.init(zeros(), jnp.ones((), dtype))
    state, (metrics,) = train(pipeline, state, [xrex.Batch(np.zeros(2 * steps, np.int32), ())])
    assert float(metrics.loss) == 1.0
    assert float(state.dense_params) == 0.0
    assert state.dense_params.dtype == dtype


@STALENESS
def test_only_what_is_per_example_is_cut(staleness: int) -> None:
    seen: list[dict[str, Any]] = []

    def loss(params: jax.Array, rows: jax.Array, inputs: Any) -> Any:
        seen.append(jax.tree.map(lambda x: (x.shape, x.dtype), inputs))
        noise = jax.random.uniform(inputs["key"])
        weights = jnp.sum(inputs["weights"])
        loss = jnp.sum(rows * inputs["labels"][:, None]) * weights + params
        return loss, {"weights": weights, "counter": inputs["counter"], "noise": noise}

    pipeline = pipeline_of(loss, tokens=8, staleness=staleness, accumulation_steps=2)
    batch = xrex.Batch(
        np.arange(8),
        {
            "labels": np.ones(8, np.float32),
            "weights": np.arange(4, dtype=np.float32),
            "counter": np.int32(3),
            "key": jax.random.key(0),
        },
    )
    state, metrics = train(pipeline, pipeline.init(zeros(), 0.0), [batch] * 3)
    for inputs in seen:
        assert inputs["labels"][0] == (4,)
        assert inputs["weights"][0] == (4,)
        assert inputs["counter"] == ((), jnp.int32)
    assert metrics[-1].aux["weights"].tolist() == [6, 6]
    assert metrics[-1].aux["counter"].tolist() == [3, 3]
    assert float(state.dense_params) == -3


def test_leaves_that_are_per_example_may_be_named() -> None:
    shapes: set[Any] = set()

    def loss(params: jax.Array, rows: jax.Array, inputs: Any) -> jax.Array:
        shapes.add((inputs["examples"].shape, inputs["constant"].shape))
        return jnp.sum(rows) + params

    batch = xrex.Batch(
        np.arange(8) % VOCAB, {"examples": np.ones(4, np.float32), "constant": np.ones(8)}
    )
    pipeline = pipeline_of(
        loss,
        tokens=8,
        accumulation_steps=2,
        per_example={"examples": True, "constant": False},
    )
    train(pipeline, pipeline.init(zeros(), 0.0), [batch])
    assert shapes == {((2,), (8,))}
    wrong = pipeline_of(loss, tokens=8, accumulation_steps=2, per_example={"labels": True})
    with pytest.raises(ValueError, match="is no tree of booleans over the batch's inputs"):
        wrong.start(wrong.init(zeros(), 0.0), batch)
    uneven = pipeline_of(loss, tokens=8, accumulation_steps=2, per_example=True)
    with pytest.raises(ValueError, match=r"inputs\['constant'\] has shape \(6,\)"):
        uneven.start(
            uneven.init(zeros(), 0.0),
            batch._replace(inputs=batch.inputs | {"constant": np.ones(6)}),
        )


# One program


@STALENESS
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    ("loss", "params"),
    [
        (lambda a, rows, inputs: jnp.sum(rows) * a, 1.0),
        (lambda a, rows, inputs: jnp.mean(jnp.square(rows @ a)), np.ones(8)),
    ],
    ids=["replicated gradient", "dot"],
)
def test_each_program_compiles_once(loss: Any, params: Any, devices: int, staleness: int) -> None:
    pipeline = xrex.make_pipeline(
        layouts.line(devices, tokens_per_batch=8, emb_width=8, num_unique=8),
        RULE,
        loss,
        optax.adam(1e-3),
        vocab=VOCAB,
        staleness=staleness,
    )
    with compilations() as compiled, jax.numpy_dtype_promotion("standard"):
        state = pipeline.init(np.ones((VOCAB, 8), np.float32), params)
        for _ in range(2):
            for state, _ in pipeline.run(state, [xrex.Batch(np.arange(8), ())] * 6):  # noqa: B020
                update = state.previous_update
                if update is not None:
                    shard = update.grads.addressable_shards[0].data
                    assert shard.shape == (8 // devices, 8)
    expected = {"xrex_start": 1, "xrex_step_ahead": 1, "xrex_finish": 1}
    assert compiled == (expected if staleness else {"xrex_step_now": 1})


# What users write


@STALENESS
@pytest.mark.parametrize(
    ("returned", "described"),
    [
        (lambda loss: {"loss": loss}, "a dict"),
        (lambda loss: None, "None"),
        (lambda loss: [loss, loss], r"a list of float32\(\), float32\(\)"),
        (lambda loss: (loss, loss, loss), "a tuple of float32"),
        (lambda loss: (loss[None], ()), r"a tuple of float32\(1,\), a tuple of nothing"),
        (lambda loss: loss.astype(jnp.int32), r"int32\(\)"),
        (lambda loss: loss[None], r"float32\(1,\)"),
        (lambda loss: "loss", "a str"),
    ],
)
def test_a_loss_that_is_no_scalar_is_described(
    returned: Any, described: str, staleness: int
) -> None:
    pipeline = pipeline_of(
        lambda params, rows, inputs: returned(linear_loss(params, rows, inputs)),
        staleness=staleness,
    )
    state = pipeline.init(zeros(), 0.0)
    message = f"loss_fn must return a floating-point scalar, not {described}"
    with pytest.raises(ValueError, match=message):
        list(pipeline.run(state, one_id_batches()))
    assert not np.any(state.table)


@STALENESS
def test_aux_reaches_the_metrics(staleness: int) -> None:
    pipeline = pipeline_of(
        lambda params, rows, inputs: (linear_loss(params, rows, inputs), {"rows": rows, "n": 3}),
        staleness=staleness,
    )
    state, metrics = train(pipeline, pipeline.init(zeros() + 1, 0.0), one_id_batches())
    assert metrics[0].aux["rows"].shape == (4, WIDTH)
    assert int(metrics[0].aux["n"]) == 3
    assert float(state.dense_params) == -4


def test_other_leaves_among_the_parameters_are_left_alone() -> None:
    params = {
        "w": jnp.zeros(2),
        "count": jnp.int32(3),
        "mask": np.array([True, False]),
        "key": jax.random.key(7),
        "none": None,
    }

    def loss(params: Any, rows: jax.Array, inputs: jax.Array) -> jax.Array:
        jax.random.uniform(params["key"])
        return jnp.sum(rows * inputs) + jnp.sum(jnp.where(params["mask"], params["w"], 0)) * (
            params["count"].astype(jnp.float32)
        )

    for optimizer in (optax.sgd(1.0), optax.adam(1.0)):
        pipeline = pipeline_of(loss, staleness=1, optimizer=optimizer)
        with jax.numpy_dtype_promotion("standard"):
            state, _ = train(pipeline, pipeline.init(zeros(), params), one_id_batches()[:2])
        trained = state.dense_params
        assert int(trained["count"]) == 3
        assert trained["mask"].tolist() == [True, False]
        assert trained["key"] == params["key"]
        assert float(trained["w"][0]) < 0
        assert float(trained["w"][1]) == 0


@pytest.mark.parametrize("leaf", [jnp.sin, "relu", object()])
def test_parameters_that_are_no_arrays_are_named(leaf: Any) -> None:
    pipeline = pipeline_of()
    with pytest.raises(
        TypeError, match=r"dense_params\['act'\] is a .* must be an array"
    ) as caught:
        pipeline.init(zeros(), {"act": leaf, "w": jnp.zeros(2)})
    assert "equinox.partition" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match=r"inputs\['act'\] is a .* must be an array"):
        pipeline.start(pipeline.init(zeros(), 0.0), xrex.Batch(np.arange(4), {"act": leaf}))


def test_integers_of_the_inputs_are_never_wrapped() -> None:
    pipeline = pipeline_of(lambda params, rows, inputs: jnp.sum(rows) + params)
    state = pipeline.init(zeros(), 0.0)
    with pytest.raises(ValueError, match=r"inputs\['time'\] has the value 1099511627776"):
        pipeline.start(state, xrex.Batch(np.arange(4), {"time": np.array([2**40, 1, 2, 3])}))


@STALENESS
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1)),
        optax.lbfgs(),
        optax.chain(optax.clip(1.0), optax.sgd(1.0)),
    ],
    ids=["reduce_on_plateau", "lbfgs", "plain"],
)
def test_transformations_with_extra_arguments_are_served(optimizer: Any, staleness: int) -> None:
    pipeline = pipeline_of(
        lambda params, rows, inputs: jnp.sum(rows * inputs) + jnp.sum(jnp.square(params - 1)),
        optimizer=optimizer,
        staleness=staleness,
    )
    with jax.numpy_dtype_promotion("standard"), compilations() as compiled:
        state, metrics = train(pipeline, pipeline.init(zeros(), jnp.zeros(2)), one_id_batches())
    assert not any(bool(m.skipped) for m in metrics)
    assert np.any(np.asarray(state.dense_params))
    assert set(compiled.values()) == {1}


def test_a_rule_with_a_call_of_its_own_is_a_rule() -> None:
    class Callable(xrex.RowwiseAdagrad):
        def __call__(self, step: jax.Array) -> None:
            raise AssertionError("this is no schedule")

    jax.tree_util.register_pytree_node_class(Callable)
    pipeline = pipeline_of(rule=Callable(learning_rate=1.0, eps=1e-30))
    state, _ = train(pipeline, pipeline.init(zeros(), 0.0), one_id_batches()[:1])
    np.testing.assert_array_equal(np.asarray(state.table)[0], [-1, -1])


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("vocab", [8, 32])
def test_ids_found_for_another_table_are_refused(vocab: int, jitted: bool) -> None:
    handle = handle_of(4)

    def step(ids: jax.Array, table: jax.Array) -> Any:
        tokens = xrex.compress_token_ids(handle, ids, vocab)
        update = xrex.GradientUpdate(tokens.unique_tokens, jnp.ones((4, WIDTH)), tokens.segment_ids)
        return xrex.update_start(handle, RULE, update, table, RULE.init(16))[0]

    with pytest.raises(ValueError, match=f"vocab={vocab}, and the table has 16 rows") as caught:
        (jax.jit(step) if jitted else step)(jnp.array([8, 9, 1, 9]), jnp.zeros((16, WIDTH)))
    assert "Pass vocab=16 to compress_token_ids." in caught.value.__notes__


@pytest.mark.parametrize("padding_id", [-1, 5, 99, -100])
def test_padding_means_no_token_when_ids_are_clipped(padding_id: int) -> None:
    handle = handle_of(4, out_of_range="clip", padding_id=padding_id)
    ids = np.array([padding_id, 2, -3, 1000])
    table = np.arange(1, 17, dtype=np.float32).reshape(VOCAB, WIDTH)
    rows = np.asarray(xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table)))
    policy = oracle.IdPolicy("clip", padding_id)
    assert_same_bits(rows, oracle.lookup(table, ids, policy))
    assert not np.any(rows[0])
    assert xrex.compress_token_ids(handle, ids, VOCAB).segment_ids[0] == -1


def test_a_handle_without_devices_is_refused() -> None:
    handle = xrex.make_context_handle(
        AbstractMesh((2,), ("s",)),
        "s",
        data_axis="s",
        tokens_per_batch=4,
        emb_width=WIDTH,
        num_unique=4,
        num_devices_per_node=2,
    )
    ids, grads = np.arange(4), np.ones((4, WIDTH), np.float32)
    calls: list[Callable[[], Any]] = [
        lambda: xrex.lookup_start(handle, ids, zeros()),
        lambda: xrex.lookup_done(handle, xrex.LookupPin(jnp.zeros((2, 4, 1)))),
        lambda: xrex.compress_token_ids(handle, ids, VOCAB),
        lambda: xrex.update_start(
            handle, RULE, xrex.GradientUpdate(ids, grads, ids), zeros(), RULE.init(VOCAB)
        ),
        lambda: xrex.make_pipeline(handle, RULE, linear_loss, optax.sgd(1.0), vocab=VOCAB),
        lambda: jax.jit(lambda t: xrex.lookup_start(handle, ids, t))(zeros()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="async_emb needs devices, and the handle's mesh") as e:
            call()
        assert "jax.make_mesh" in e.value.__notes__[0]


@STALENESS
def test_an_optimizer_may_keep_a_random_key(staleness: int) -> None:
    optimizer = optax.GradientTransformation(
        lambda params: jax.random.key(0),
        lambda grads, key, params=None: (grads, jax.random.fold_in(key, 1)),
    )
    pipeline = pipeline_of(optimizer=optimizer, staleness=staleness)
    batch = xrex.Batch(np.arange(4), np.ones((4, WIDTH), np.float32))
    state, _ = train(pipeline, pipeline.init(zeros(), 0.0), [batch] * 3)
    wanted = jax.random.key(0)
    for _ in range(3):
        wanted = jax.random.fold_in(wanted, 1)
    assert_same_bits(jax.random.key_data(state.optimizer_state), jax.random.key_data(wanted))


@pytest.mark.parametrize("name", ["rule_state", "optimizer_state"])
def test_a_restart_without_its_step_is_refused(name: str) -> None:
    pipeline = pipeline_of()
    state = pipeline.init(zeros(), 0.0)
    with pytest.raises(ValueError, match=f"{name} goes on with a run, and step is missing"):
        pipeline.init(zeros(), 0.0, **{name: getattr(state, name)})


def test_a_table_of_one_device_stays_the_callers() -> None:
    """It is where the state's table lies, and could be donated."""
    pipeline = pipeline_of(devices=1)
    batch = xrex.Batch(np.arange(4), np.ones((4, WIDTH), np.float32))
    fresh = pipeline.init(zeros(), 0.0)
    saved = jax.tree.map(jnp.copy, fresh)
    state = pipeline.init(
        saved.table,
        saved.dense_params,
        rule_state=saved.rule_state,
        optimizer_state=saved.optimizer_state,
        step=saved.step,
    )
    train(pipeline, state, [batch] * 2)
    for leaf, first in zip(jax.tree.leaves(saved), jax.tree.leaves(fresh), strict=True):
        assert_same_bits(leaf, first)


@STALENESS
def test_a_state_of_another_staleness_is_refused_while_a_batch_is_held(staleness: int) -> None:
    of_run, other = pipeline_of(staleness=staleness), pipeline_of(staleness=1 - staleness)
    batch = xrex.Batch(np.arange(4), np.ones((4, WIDTH), np.float32))
    state = of_run.start(of_run.init(zeros(), 0.0), batch)
    text = f"the state is of a run with staleness={staleness}, and the pipeline has"
    for call in (lambda: other.step(state, batch), lambda: other.finish(state)):
        with pytest.raises(ValueError, match=text):
            call()
    idle, _ = of_run.finish(state)
    train(other, idle, [batch])


def test_an_optimizer_may_name_the_extra_arguments_that_it_takes() -> None:
    seen = []

    def update(grads: Any, state: Any, params: Any = None, *, value: Any, grad: Any) -> Any:
        seen.append((value, grad))
        return grads, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    pipeline = pipeline_of(optimizer=optimizer)
    batch = xrex.Batch(np.arange(4), np.ones((4, WIDTH), np.float32))
    train(pipeline, pipeline.init(zeros(), 0.0), [batch])
    assert seen


def test_a_clock_and_a_step_may_be_numbers_of_any_type() -> None:
    pipeline = pipeline_of()
    state = pipeline.init(zeros(), 0.0)
    batch = xrex.Batch(np.arange(4), np.ones((4, WIDTH), np.float32))
    state = state._replace(
        rule_state=state.rule_state._replace(clock=300), step=jnp.asarray(255, jnp.uint8)
    )
    state, _ = train(pipeline, state, [batch] * 2)
    assert (int(state.step), int(state.rule_state.clock)) == (257, 302)


def test_distinct_ids_compare_as_an_array_does() -> None:
    tokens = xrex.compress_token_ids(handle_of(4), np.array([5, 2, 5, 9]), VOCAB)
    assert (tokens.unique_tokens == VOCAB).tolist() == [False, False, True, True]
    assert (tokens.unique_tokens != VOCAB).tolist() == [True, True, False, False]
    assert (tokens.unique_tokens < VOCAB).tolist() == [True, True, False, False]
    assert (tokens.unique_tokens == tokens.unique_tokens).all()


@pytest.mark.parametrize("large", [np.array([2**40]), 2**40])
def test_an_integer_that_does_not_fit_is_named(large: Any) -> None:
    with pytest.raises(ValueError, match=r"dense_params\['seen'\] has the value 1"):
        pipeline_of().init(zeros(), {"w": 0.0, "seen": large})


def test_what_is_named_as_no_examples_is_on_every_device() -> None:
    pipeline = pipeline_of(
        lambda params, rows, inputs: jnp.sum(rows * inputs["labels"]) + params,
        per_example={"labels": True, "table": False},
    )
    inputs = {"labels": np.ones((4, WIDTH), np.float32), "table": np.ones((8, 3), np.float32)}
    state = pipeline.start(pipeline.init(zeros(), 0.0), xrex.Batch(np.arange(4), inputs))
    assert state.current_batch.inputs["table"].is_fully_replicated
    assert not state.current_batch.inputs["labels"].is_fully_replicated
