"""The pipeline against sequential and stale training, on inputs with one right answer in bits.

The model of these tests is linear in the rows, so each token's gradient is an input (see
`layouts.exact_gradients`), and its dense parameters record the rows that each step saw: a lookup
from a table one update too old or too new shows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_same_bits_on_every_device
from tests.compilations import compilations
from tests.layouts import FEW_LAYOUTS, TOKENS, VOCAB, WIDTH, LayoutCase
from xrex.training.pipeline import Pipeline

STEPS = 6
RULE = {"learning_rate": 0.5, "eps": 1e-6, "lazy": True}


def record_loss(record: jax.Array, rows: jax.Array, gradients: jax.Array) -> jax.Array:
    """Its gradient is `gradients` for the rows, and the rows for the record."""
    seen = jax.lax.stop_gradient(rows)
    return jnp.sum((rows * gradients + record * seen).astype(jnp.float32))


@functools.cache
def make_pipeline(case: LayoutCase, staleness: int) -> Pipeline:
    # The record falls by the rows of each step, exactly.
    return xrex.make_pipeline(
        case.handle(num_unique=TOKENS),
        xrex.RowwiseAdagrad(**RULE),
        record_loss,
        optax.sgd(1.0),
        vocab=VOCAB,
        staleness=staleness,
    )


def make_batches(steps: int = STEPS, dtype: Any = np.float32) -> list[xrex.Batch]:
    ids = [layouts.random_ids(step) for step in range(steps)]
    return [xrex.Batch(i, layouts.exact_gradients(n, i, dtype=dtype)) for n, i in enumerate(ids)]


def init(pipeline: Pipeline, dtype: Any = np.float32) -> xrex.PipelineState:
    table = layouts.put_table(pipeline.config.handle, layouts.random_table(0, dtype))
    return pipeline.init(table, jnp.zeros((TOKENS, WIDTH), dtype))


def expected(
    batches: list[xrex.Batch], staleness: int, dtype: Any = np.float32, bad: set[int] = frozenset()
) -> oracle.Trained:
    def step(k: int, embeddings: np.ndarray, record: np.ndarray) -> oracle.Gradients:
        if k in bad:
            return oracle.Gradients(np.zeros_like(embeddings), record, pending=False)
        return oracle.Gradients(batches[k].inputs, (record - embeddings).astype(dtype))

    rule = oracle.Adagrad(**RULE)
    return oracle.train(
        rule,
        layouts.random_table(0, dtype),
        oracle.init(rule, VOCAB),
        [batch.token_ids for batch in batches],
        step,
        np.zeros((TOKENS, WIDTH), dtype),
        staleness=staleness,
    )


def assert_trained(state: xrex.PipelineState, want: oracle.Trained) -> None:
    assert_same_bits_on_every_device(state.table, want.table, "table")
    for name, value in want.state._asdict().items():
        assert_same_bits_on_every_device(getattr(state.rule_state, name), value, name)
    assert_same_bits(state.dense_params, want.carry, "the rows that the steps saw")


def train(
    pipeline: Pipeline, batches: list[xrex.Batch], dtype: Any = np.float32
) -> tuple[xrex.PipelineState, list[xrex.StepMetrics]]:
    return run(pipeline, init(pipeline, dtype), batches)


def run(
    pipeline: Pipeline, state: xrex.PipelineState, batches: list[xrex.Batch]
) -> tuple[xrex.PipelineState, list[xrex.StepMetrics]]:
    """The state after the last batch, and each batch's metrics."""
    states, metrics = zip(*pipeline.run(state, batches), strict=True)
    return states[-1], list(metrics)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, np.float32) for case in FEW_LAYOUTS] + [(FEW_LAYOUTS[1], oracle.bfloat16)],
    ids=str,
)
def test_equals_the_declared_staleness(case: LayoutCase, dtype: Any, staleness: int) -> None:
    batches = make_batches(dtype=dtype)
    state, _ = train(make_pipeline(case, staleness), batches, dtype)
    assert_trained(state, expected(batches, staleness, dtype))
    assert int(state.step) == STEPS


def test_staleness_shows_in_these_inputs() -> None:
    batches = make_batches()
    records = [expected(batches, staleness).carry for staleness in (0, 1)]
    assert np.any(records[0] != records[1])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
def test_short_runs(steps: int, staleness: int) -> None:
    batches = make_batches(steps)
    state, metrics = train(make_pipeline(FEW_LAYOUTS[0], staleness), batches)
    assert_trained(state, expected(batches, staleness))
    assert len(metrics) == steps


def test_no_batches_leave_the_state_alone() -> None:
    pipeline = make_pipeline(FEW_LAYOUTS[0], 1)
    assert list(pipeline.run(init(pipeline), [])) == []


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("case", FEW_LAYOUTS, ids=str)
def test_flush_is_neutral(case: LayoutCase, staleness: int) -> None:
    pipeline, batches = make_pipeline(case, staleness), make_batches()
    state = pipeline.start(init(pipeline), batches[0])
    for k, batch in enumerate(batches[1:]):
        state, _ = pipeline.step(state, batch)
        state, _ = pipeline.flush(state)
        # Every batch trained so far is in the table, and the one that is held is not.
        so_far = expected(batches[: k + 1], staleness)
        assert_same_bits_on_every_device(state.table, so_far.table, f"table after batch {k}")
        state, again = pipeline.flush(state)
        assert again is None or not again.valid
    state, _ = pipeline.finish(state)
    assert_trained(state, expected(batches, staleness))


@pytest.mark.parametrize("lazy", [False, True])
def test_flush_is_neutral_where_arithmetic_is_not_exact(lazy: bool) -> None:
    """The update is compiled into two programs here, and rounds alike in both."""
    rng = np.random.default_rng(1)
    table = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    batches = [
        xrex.Batch(layouts.random_ids(step), rng.normal(size=TOKENS).astype(np.float32))
        for step in range(STEPS)
    ]
    pipeline = xrex.make_pipeline(
        FEW_LAYOUTS[1].handle(num_unique=TOKENS),
        xrex.RowwiseAdagrad(learning_rate=0.1, half_life_steps=7.3, weight_decay=0.013, lazy=lazy),
        lambda weights, rows, targets: jnp.mean((rows @ weights - targets) ** 2),
        optax.sgd(0.01),
        vocab=VOCAB,
        staleness=1,
    )
    straight, _ = run(pipeline, pipeline.init(table, jnp.ones(WIDTH)), batches)
    state = pipeline.start(pipeline.init(table, jnp.ones(WIDTH)), batches[0])
    for batch in batches[1:]:
        state, _ = pipeline.step(state, batch)
        state, _ = pipeline.flush(state)
    state, _ = pipeline.finish(state)
    jax.tree.map(assert_same_bits, state, straight)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_finished_run_goes_on(staleness: int) -> None:
    """A restart from table, states and parameters; what is in flight is drained at the seam."""
    pipeline, batches = make_pipeline(FEW_LAYOUTS[0], staleness), make_batches()
    first, _ = train(pipeline, batches[:3])
    resumed = pipeline.init(
        first.table,
        first.dense_params,
        rule_state=first.rule_state,
        optimizer_state=first.optimizer_state,
        step=first.step,
    )
    state, _ = run(pipeline, resumed, batches[3:])
    halves = expected(batches[:3], staleness)
    rule = oracle.Adagrad(**RULE)
    want = oracle.train(
        rule,
        halves.table,
        halves.state,
        [batch.token_ids for batch in batches[3:]],
        lambda k, rows, record: oracle.Gradients(batches[3 + k].inputs, record - rows),
        halves.carry,
        staleness=staleness,
    )
    assert_trained(state, want)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_bad_batch_is_skipped_whole(staleness: int, value: float) -> None:
    batches = make_batches()
    trained = int(np.flatnonzero((batches[2].token_ids >= 0) & (batches[2].token_ids < VOCAB))[0])
    batches[2].inputs[trained, 1] = value
    state, metrics = train(make_pipeline(FEW_LAYOUTS[0], staleness), batches)
    assert [bool(metric.skipped) for metric in metrics] == [k == 2 for k in range(STEPS)]
    assert_trained(state, expected(batches, staleness, bad={2}))


def test_a_bad_dense_gradient_cancels_the_table_update_too() -> None:
    def loss(params: jax.Array, rows: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sum(rows) + params * scale[0]

    pipeline = xrex.make_pipeline(
        layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=4),
        xrex.RowwiseAdagrad(learning_rate=1.0),
        loss,
        optax.sgd(1.0),
        vocab=8,
        staleness=1,
    )
    good, bad = (xrex.Batch(np.arange(4), np.array([s], np.float32)) for s in (1, np.inf))
    state = pipeline.init(np.zeros((8, 2), np.float32), jnp.float32(0))
    state, metrics = run(pipeline, state, [bad, good, bad])
    assert [bool(metric.skipped) for metric in metrics] == [True, False, True]
    assert float(state.dense_params) == -1.0
    assert int(state.rule_state.clock) == 1
    np.testing.assert_array_equal(state.table[:4], -1.0)


def test_a_bad_gradient_of_a_token_without_a_row_cancels_nothing() -> None:
    batches = make_batches(2)
    outside = int(np.flatnonzero(batches[0].token_ids >= VOCAB)[0])
    batches[0].inputs[outside] = np.nan
    state, metrics = train(make_pipeline(FEW_LAYOUTS[0], 0), batches)
    assert not any(bool(metric.skipped) for metric in metrics)
    assert np.all(np.isfinite(state.table))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_schedule_sees_the_number_of_the_gradients_batch(staleness: int) -> None:
    rates = jnp.array([1.0, 2.0, 4.0, 8.0])
    pipeline = xrex.make_pipeline(
        layouts.line(1, tokens_per_batch=1, emb_width=1, num_unique=1),
        lambda step: xrex.RowwiseAdagrad(learning_rate=rates[step], eps=1e-30),
        lambda params, rows, inputs: jnp.sum(rows) + params,
        optax.sgd(1.0),
        vocab=4,
        staleness=staleness,
    )
    state = pipeline.init(np.zeros((4, 1), np.float32), jnp.float32(0))
    state, _ = run(pipeline, state, [xrex.Batch(np.array([k]), ()) for k in range(4)])
    np.testing.assert_array_equal(np.ravel(state.table), -rates)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("case", FEW_LAYOUTS[1:], ids=str)
def test_micro_batches_change_nothing(case: LayoutCase, staleness: int) -> None:
    batches = make_batches(3)

    def train_in(steps: int) -> tuple[xrex.PipelineState, list[float]]:
        def loss(weight: jax.Array, rows: jax.Array, gradients: jax.Array) -> jax.Array:
            # Times `steps`, since losses are averaged. The weight's gradient is one a batch.
            return steps * jnp.sum(rows * gradients) + weight

        pipeline = xrex.make_pipeline(
            case.handle(num_unique=TOKENS),
            xrex.RowwiseAdagrad(**RULE),
            loss,
            optax.sgd(1.0),
            vocab=VOCAB,
            staleness=staleness,
            accumulation_steps=steps,
        )
        state = pipeline.init(layouts.random_table(0, np.float32), jnp.float32(0))
        state, metrics = run(pipeline, state, batches)
        return state, [float(metric.loss) for metric in metrics]

    (whole, losses), (parts, part_losses) = train_in(1), train_in(2)
    assert_same_bits(parts.table, whole.table)
    assert_same_bits(parts.dense_params, whole.dense_params)
    np.testing.assert_allclose(part_losses, losses, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optax.lion(1e-2)], ids=["adamw", "lion"])
def test_optax_optimizers_train(optimizer: Any) -> None:
    """A regression that can be fitted: the loss falls to a small part of what it was."""
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, VOCAB, TOKENS), rng.normal(size=TOKENS).astype(np.float32)
    targets = targets[np.unique(ids, return_inverse=True)[1]]

    def loss(params: Any, rows: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean((rows @ params["w"] + params["b"] - targets) ** 2)

    pipeline = xrex.make_pipeline(
        FEW_LAYOUTS[1].handle(num_unique=TOKENS),
        xrex.RowwiseAdagrad(learning_rate=0.3),
        loss,
        optimizer,
        vocab=VOCAB,
        staleness=1,
    )
    # optax's own arithmetic relies on promotion.
    with jax.numpy_dtype_promotion("standard"):
        state = pipeline.init(
            rng.normal(size=(VOCAB, WIDTH)).astype(np.float32),
            {"w": jnp.ones(WIDTH) / WIDTH, "b": jnp.float32(0)},
        )
        _, metrics = run(pipeline, state, [xrex.Batch(ids, targets)] * 40)
    losses = [float(metric.loss) for metric in metrics]
    assert losses[-1] < 0.1 * losses[0], losses


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", [np.float32, oracle.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_step_holds_no_second_table(staleness: int, dtype: Any) -> None:
    vocab, width, tokens = 50_000, 64, 256
    pipeline = xrex.make_pipeline(
        layouts.line(8, tokens_per_batch=tokens, emb_width=width, num_unique=tokens),
        xrex.RowwiseAdagrad(learning_rate=0.1, half_life_steps=10.0),
        lambda params, rows, inputs: jnp.mean((rows.astype(jnp.float32) @ params - inputs) ** 2),
        optax.sgd(0.1),
        vocab=vocab,
        staleness=staleness,
    )
    batch = xrex.Batch(np.arange(tokens), np.ones(tokens, np.float32))
    state = pipeline.init(np.zeros((vocab, width), dtype), jnp.ones(width))
    state = pipeline.start(state, batch)
    memory = pipeline.lower_step(state, state.current_batch).compile().memory_analysis()
    shard = vocab * width * np.dtype(dtype).itemsize // 8
    rule_state = sum(leaf.nbytes for leaf in jax.tree.leaves(state.rule_state))
    assert memory.alias_size_in_bytes >= shard + rule_state
    assert memory.temp_size_in_bytes < shard


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("case", FEW_LAYOUTS, ids=str)
def test_each_program_compiles_once(case: LayoutCase, staleness: int) -> None:
    pipeline = make_pipeline.__wrapped__(case, staleness)
    with compilations() as compiled:
        train(pipeline, make_batches())
        train(pipeline, make_batches())
    names = ("xrex_start", "xrex_step_ahead", "xrex_finish") if staleness else ("xrex_step_now",)
    assert compiled == dict.fromkeys(names, 1)


def test_batches_and_parameters_stay_the_callers() -> None:
    pipeline = make_pipeline(FEW_LAYOUTS[0], 1)
    batch = jax.tree.map(jnp.asarray, make_batches(1)[0])
    record = jnp.zeros((TOKENS, WIDTH))
    state = pipeline.init(layouts.random_table(0, np.float32), record)
    run(pipeline, state, [batch] * 3)
    assert float(jnp.sum(record)) == 0.0
    assert np.all(np.isfinite(batch.inputs))


def test_dropped_tokens_are_counted() -> None:
    pipeline = xrex.make_pipeline(
        layouts.line(2, tokens_per_batch=8, emb_width=2, num_unique=2),
        xrex.RowwiseAdagrad(learning_rate=1.0),
        lambda params, rows, inputs: jnp.sum(rows) + params,
        optax.sgd(1.0),
        vocab=8,
        staleness=1,
    )
    state = pipeline.init(np.zeros((8, 2), np.float32), jnp.float32(0))
    ids = np.array([0, 1, 2, 3, 3, 1, -1, 99])
    ((_, metrics),) = pipeline.run(state, [xrex.Batch(ids, ())])
    assert int(metrics.dropped) == 3  # the tokens of ids 2, 3 and 3
    assert int(metrics.update.dropped) == 5  # and those of no row


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rejected_batch_loses_nothing(staleness: int) -> None:
    pipeline, batches = make_pipeline(FEW_LAYOUTS[0], staleness), make_batches(3)
    state = pipeline.start(init(pipeline), batches[0])
    with pytest.raises(ValueError, match="does not fit in int32"):
        pipeline.step(state, batches[1]._replace(token_ids=np.full(TOKENS, 2**32)))
    with pytest.raises(ValueError, match=r"token_ids has shape \(3,\)"):
        pipeline.step(state, batches[1]._replace(token_ids=np.arange(3)))
    for batch in batches[1:]:
        state, _ = pipeline.step(state, batch)
    state, _ = pipeline.finish(state)
    assert_trained(state, expected(batches, staleness))


def test_calls_out_of_order_say_what_to_call() -> None:
    pipeline, (batch,) = make_pipeline(FEW_LAYOUTS[0], 1), make_batches(1)
    state = init(pipeline)
    with pytest.raises(ValueError, match="call start before step"):
        pipeline.step(state, batch)
    with pytest.raises(ValueError, match="call start before finish"):
        pipeline.finish(state)
    state = pipeline.start(state, batch)
    with pytest.raises(ValueError, match="call step or finish, not start"):
        pipeline.start(state, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"staleness": 2}, "staleness=2 must be 0"),
        ({"staleness": True}, "staleness=True must be 0"),
        ({"accumulation_steps": 0}, "accumulation_steps=0 must be a positive integer"),
        ({"accumulation_steps": 5}, "does not divide the 12 tokens of each rank"),
        ({"vocab": 0}, "vocab=0 must be a positive integer"),
    ],
)
def test_bad_parameters(change: dict[str, Any], message: str) -> None:
    arguments = {"vocab": VOCAB} | change
    with pytest.raises(ValueError, match=message):
        xrex.make_pipeline(
            FEW_LAYOUTS[0].handle(),
            xrex.RowwiseAdagrad(**RULE),
            record_loss,
            optax.sgd(1.0),
            **arguments,
        )


def test_bad_tables_losses_and_inputs() -> None:
    handle = FEW_LAYOUTS[0].handle(num_unique=TOKENS)
    rule = xrex.RowwiseAdagrad(**RULE)
    pipeline = make_pipeline(FEW_LAYOUTS[0], 0)
    with pytest.raises(ValueError, match="table has 5 rows, and the pipeline has vocab=32"):
        pipeline.init(np.zeros((5, WIDTH), np.float32), ())
    with pytest.raises(TypeError, match="bfloat16 or float32"):
        pipeline.init(np.zeros((VOCAB, WIDTH), np.int32), ())

    vector = xrex.make_pipeline(
        handle, rule, lambda params, rows, inputs: rows[0], optax.sgd(1.0), vocab=VOCAB
    )
    state = vector.init(np.zeros((VOCAB, WIDTH), np.float32), ())
    with pytest.raises(ValueError, match="floating-point scalar"):
        list(vector.run(state, [xrex.Batch(np.zeros(TOKENS, np.int32), ())]))

    accumulating = xrex.make_pipeline(
        handle,
        rule,
        record_loss,
        optax.sgd(1.0),
        vocab=VOCAB,
        accumulation_steps=2,
        per_example=True,
    )
    state = accumulating.init(np.zeros((VOCAB, WIDTH), np.float32), ())
    with pytest.raises(ValueError, match=r"inputs\['y'\] has shape \(12,\)"):
        accumulating.start(state, xrex.Batch(np.zeros(TOKENS, np.int32), {"y": np.zeros(12)}))
