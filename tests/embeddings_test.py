"""Tables and features: what goes in and out of them, what is refused, and what each call leaves."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xrex
from tests import oracle
from tests.assertions import assert_same_bits_on_every_device
from tests.compilations import compilations
from tests.embeddings_cases import Descent

BATCH = 8
ADAGRAD = xrex.RowwiseAdagrad(learning_rate=0.5)


def make(ranks: int = 2, **changes: Any) -> xrex.Embeddings:
    """Users and items in one stack, words in another; one id, a bag and a sequence."""
    model: dict[str, Any] = {
        "tables": {
            "users": xrex.Table(vocab=30, width=8, rule=Descent(0.5)),
            "items": xrex.Table(vocab=20, width=8, rule=Descent(0.25)),
            "words": xrex.Table(vocab=10, width=16, dtype="bfloat16", rule=Descent(0.5)),
        },
        "features": {
            "user": xrex.Feature("users"),
            "seen": xrex.Feature("items", max_ids=4, combiner="sum"),
            "query": xrex.Feature("words", max_ids=3),
        },
        "batch_size": BATCH,
        "table_axis": "x",
        "data_axis": "x",
    }
    mesh = jax.make_mesh((ranks,), ("x",), devices=jax.devices()[:ranks])
    return xrex.Embeddings(mesh, **model | changes)


def ids_of(number: int = 0, **changes: Any) -> dict[str, Any]:
    lengths = np.array([2, 0, 1, 4, 0, 3, 1, 1])
    given = {
        "user": (np.arange(BATCH) * 3 + number) % 30,
        "seen": xrex.Ragged((np.arange(12) * 5 + number) % 20, lengths),
        "query": (np.arange(3 * BATCH).reshape(BATCH, 3) + number) % 11 - 1,
    }
    return given | changes


def loss_fn(params: Any, embedded: dict[str, jax.Array], inputs: Any) -> jax.Array:
    """Pulls every number of every feature, and the dense weight, by the examples' labels."""
    total = jnp.zeros((BATCH,))
    for name in ("user", "seen", "query"):
        values = embedded[name].astype(jnp.float32)
        total += values.reshape(len(values), -1).sum(axis=1)
    return jnp.sum((total + params["w"]) * inputs["y"])


def batch_of(number: int = 0, **changes: Any) -> xrex.Batch:
    labels = np.array([1, -1, 2, 1, 1, -2, 1, 1], np.float32)
    return xrex.Batch(ids_of(number, **changes), {"y": labels * (number + 1)})


def pipeline_of(embeddings: xrex.Embeddings, loss: Any = loss_fn, **options: Any) -> xrex.Pipeline:
    return xrex.make_pipeline(embeddings, loss, optax.sgd(0.125), **options)


@functools.cache
def model(staleness: int = 0) -> tuple[xrex.Embeddings, xrex.Pipeline]:
    """The plain model, compiled once for all tests: a pipeline has no state of its own."""
    embeddings = make()
    return embeddings, pipeline_of(embeddings, staleness=staleness)


def begin(pipeline: xrex.Pipeline) -> xrex.PipelineState:
    embeddings = pipeline.config.tables
    rng = np.random.default_rng(0)
    state = pipeline.init(jax.random.key(0), {"w": jnp.ones(())})
    for name, table in embeddings.tables.items():
        values = rng.integers(-4, 5, (table.vocab, table.width))
        state = embeddings.set_table(state, name, values.astype(np.float32))
    return state


def all_tables(embeddings: xrex.Embeddings, state: xrex.PipelineState) -> dict[str, np.ndarray]:
    return {name: np.asarray(embeddings.table(state, name)) for name in embeddings.tables}


def end(embeddings: xrex.Embeddings, training: xrex.Run) -> Any:
    """Tables and dense parameters at the end of a run."""
    for _ in training:
        pass
    return all_tables(embeddings, training.state), np.asarray(training.state.dense_params["w"])


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@functools.cache
def trained(staleness: int, steps: int = 4) -> Any:
    """Tables and dense parameters after some steps; what other ways to train are compared with."""
    embeddings, pipeline = model(staleness)
    return end(embeddings, pipeline.run(begin(pipeline), [batch_of(k) for k in range(steps)]))


# Stacks


def test_tables_of_equal_width_dtype_and_kind_of_rule_share_a_stack():
    embeddings = make()
    stacks = {name: list(plan.first_rows) for name, plan in embeddings.plans.items()}
    assert stacks == {"8_float32_Descent": ["users", "items"], "16_bfloat16_Descent": ["words"]}


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (ADAGRAD, xrex.RowwiseAdagrad(learning_rate=1.0, weight_decay=0.1), True),
        (ADAGRAD, xrex.RowwiseAdagrad(learning_rate=0.5, lazy=True), False),
        (
            ADAGRAD,
            lambda step: xrex.RowwiseAdagrad(learning_rate=jnp.exp2(-step.astype(float))),
            True,
        ),
        (ADAGRAD, Descent(0.5), False),
    ],
)
def test_rules_of_one_kind_share_a_stack(first, second, shared):
    tables = {
        "a": xrex.Table(vocab=8, width=8, rule=first),
        "b": xrex.Table(vocab=8, width=8, rule=second),
    }
    features = {"a": xrex.Feature("a"), "b": xrex.Feature("b")}
    assert len(make(tables=tables, features=features).plans) == 2 - shared


def collectives(embeddings: xrex.Embeddings) -> dict[str, int]:
    pipeline = pipeline_of(embeddings, lambda p, e, i: sum(map(jnp.sum, e.values())) * p["w"])
    state = pipeline.init(jax.random.key(0), {"w": jnp.ones(())})
    placed = embeddings.place({name: np.zeros(BATCH, int) for name in embeddings.features})
    state = pipeline.start(state, xrex.Batch(placed, {}))
    lowered = pipeline.lower_step(state, xrex.Batch(placed, {}))
    text = lowered.as_text()
    return {
        name: text.count(f"stablehlo.{name}") for name in ("all_gather", "all_to_all", "all_reduce")
    }


def test_collectives_do_not_grow_with_tables_and_features():
    def model(count: int) -> xrex.Embeddings:
        tables = {
            f"t{k}": xrex.Table(
                vocab=10 + k, width=8, rule=xrex.RowwiseAdagrad(learning_rate=k + 1.0)
            )
            for k in range(count)
        }
        features = {f"f{k}": xrex.Feature(f"t{k % count}") for k in range(2 * count)}
        return make(tables=tables, features=features)

    one, five = collectives(model(1)), collectives(model(5))
    assert one == five
    assert (one["all_gather"], one["all_to_all"]) == (2, 2)


# Tables


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_table_begins_alike_on_any_devices_in_any_stack_and_order(ranks):
    embeddings = make()
    state = embeddings.make_tables(jax.random.key(3))
    wanted = all_tables(embeddings, xrex.PipelineState(state, None, None, None, None))
    tables = dict(reversed(embeddings.tables.items()))
    tables["more"] = xrex.Table(vocab=5, width=8, rule=Descent(1.0))
    features = embeddings.features | {"more": xrex.Feature("more")}
    other = make(ranks, tables=tables, features=features)
    state = other.make_tables(jax.random.key(3))
    found = all_tables(other, xrex.PipelineState(state, None, None, None, None))
    for name, table in wanted.items():
        np.testing.assert_array_equal(found[name], table)
    assert 0.2 < found["users"].std() * np.sqrt(8) < 2


@pytest.mark.usefixtures("users_buffers")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_no_device_makes_a_whole_table(kind, monkeypatch):
    made = []
    jit = jax.jit

    def remembering(function: Any, **options: Any) -> Any:
        jitted = jit(function, **options)

        def call(*arguments: Any) -> Any:
            made.append(jitted.lower(*arguments).compile().memory_analysis())
            return jitted(*arguments)

        return call

    monkeypatch.setattr(jax, "jit", remembering)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType[kind],))
    tables = {"a": xrex.Table(vocab=100_000, width=64, rule=ADAGRAD)}
    embeddings = xrex.Embeddings(
        mesh, tables, {"a": xrex.Feature("a")}, 8, table_axis="x", data_axis="x"
    )
    (table,) = embeddings.make_tables(jax.random.key(0)).values()
    assert table.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x")), 2
    )
    shard = 100_000 * 64 * 4 // 8
    assert len(made) == 2
    # XLA keeps a few arrays of a shard's size on the way from random bits to numbers.
    assert max(m.temp_size_in_bytes for m in made) < 6 * shard


def test_an_initializer_is_asked_for_each_table_with_a_key_of_its_own():
    def initializer(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
        return jnp.full(shape, jax.random.uniform(key), dtype)

    tables = {
        name: xrex.Table(vocab=4, width=8, rule=ADAGRAD, initializer=initializer) for name in "ab"
    }
    embeddings = make(tables=tables, features={n: xrex.Feature(n) for n in "ab"})
    state = pipeline_of(embeddings).init(jax.random.key(0), {})
    first, second = (np.unique(embeddings.table(state, name)) for name in "ab")
    assert first.size == second.size == 1
    assert first != second


def test_tables_and_rows_go_in_and_out_by_name():
    embeddings, pipeline = model()
    state = begin(pipeline)
    words = np.asarray(embeddings.table(state, "words"))
    values = np.arange(160, dtype=np.float64).reshape(20, 8)
    state = embeddings.set_table(state, "items", values)
    state = embeddings.set_rows(state, "users", [29, 0], np.full((2, 8), 7))
    assert_same_bits_on_every_device(
        embeddings.table(state, "items"), values.astype(np.float32), "items"
    )
    np.testing.assert_array_equal(embeddings.rows(state, "items", [3, 0]), values[[3, 0]])
    users = np.asarray(embeddings.table(state, "users"))
    assert (users[[0, 29]] == 7).all()
    assert not (users[1:29] == 7).all(axis=1).any()
    np.testing.assert_array_equal(embeddings.table(state, "words"), words)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e, s: e.table(s, "user"), KeyError, "there is no table 'user'"),
        (lambda e, s: e.rows(s, "items", [20]), ValueError, "table 'items' has 20 rows, and id 20"),
        (lambda e, s: e.rows(s, "items", [-1]), ValueError, "id -1 is outside"),
        (lambda e, s: e.rows(s, "items", [0.5]), ValueError, "ids must be integers"),
        (lambda e, s: e.set_rows(s, "items", [1, 1], np.zeros((2, 8))), ValueError, "given twice"),
        (
            lambda e, s: e.set_table(s, "items", np.zeros((20, 7))),
            ValueError,
            r"table 'items': the values have shape \(20, 7\), and must have \(20, 8\)",
        ),
    ],
)
def test_what_is_wrong_with_rows_is_said_by_the_tables_name(call, error, message):
    embeddings, pipeline = model()
    state = pipeline.init(jax.random.key(0), {})
    with pytest.raises(error, match=message):
        call(embeddings, state)
    embeddings.table(state, "items")


def test_a_table_is_read_and_set_only_where_nothing_is_owed_to_it():
    embeddings = make()
    pipeline = pipeline_of(embeddings, staleness=1)
    state = pipeline.start(begin(pipeline), batch_of(0))
    embeddings.table(state, "users")
    with pytest.raises(ValueError, match="holds a batch"):
        embeddings.set_rows(state, "users", [0], np.zeros((1, 8)))
    state, _ = pipeline.step(state, batch_of(1))
    with pytest.raises(ValueError, match="gradients of the last batch are not in the table yet"):
        embeddings.table(state, "users")
    state, _ = pipeline.flush(state)
    embeddings.rows(state, "users", [0])


# What a batch brings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": np.zeros(7, int)}, "'seen' has 8 examples, and feature 'user' has 7"),
        ({"user": np.zeros((8, 1), int)}, r"feature 'user' has shape \(8, 1\), and must have"),
        (
            {"seen": np.zeros(8, int)},
            r"'seen' has shape \(8,\), and must have \(batch, 4\)",
        ),
        ({"query": np.zeros((8, 4), int)}, r"feature 'query' has shape \(8, 4\), and max_ids=3"),
        (
            {"user": np.full(8, 2**40)},
            "'user': id 1099511627776 at position 0 does not fit",
        ),
        ({"seen": xrex.Ragged([1, 2], [1] * 8)}, "'seen' has 2 ids, and lengths of 8 together"),
        ({"seen": xrex.Ragged([1] * 8)}, "feature 'seen': Ragged needs lengths or row_splits"),
        ({"seen": xrex.Ragged([1], [1] + [0] * 7, row_splits=[0] * 9)}, "one of them"),
        ({"seen": xrex.Ragged([1], [2, -1] + [0] * 6)}, "example 1 has -1 ids"),
        ({"seen": xrex.Ragged([1], row_splits=[1] * 9)}, "row_splits must begin with 0, not 1"),
        (
            {"seen": xrex.Ragged([1] * 5, [5] + [0] * 7)},
            "feature 'seen': example 0 has 5 ids, and max_ids=4",
        ),
        (
            {"query": xrex.Ragged([1] * 5, [0] * 7 + [5])},
            "feature 'query': example 7 has 5 ids, and max_ids=3",
        ),
        (
            {"query": xrex.Ragged([1], [1] + [0] * 7, [1.0])},
            "feature 'query' has weights, and no combiner",
        ),
        (
            {"seen": xrex.Ragged([1], [1] + [0] * 7, [1.0, 2.0])},
            r"feature 'seen' has 1 ids, and weights of shape \(2,\)",
        ),
        (
            {"seen": xrex.Ragged([1, 2], [2] + [0] * 7, [1.0, np.nan])},
            "feature 'seen': the weight at position 1 is nan",
        ),
        (
            {"seen": xrex.Ragged([1], [1] + [0] * 7, [1e300])},
            "'seen': the weight 1e\\+300 of example 0 is too large",
        ),
    ],
)
def test_a_bad_feature_is_named_and_the_state_is_kept(changes, message):
    embeddings = make()
    with pytest.raises(ValueError, match=message):
        embeddings.place(ids_of(**changes))


def test_missing_and_unknown_features_are_named():
    embeddings, given = make(), ids_of()
    del given["user"]
    with pytest.raises(ValueError, match=r"the batch lacks \['user'\] and has unknown \['users'\]"):
        embeddings.place(given | {"users": np.zeros(8, int)})
    with pytest.raises(TypeError, match="must be a dictionary by feature, not ndarray"):
        embeddings.place(np.zeros(8, int))
    with pytest.raises(TypeError, match="feature 'user' must be integers, not float64"):
        embeddings.place(ids_of(user=np.zeros(8)))
    with pytest.raises(ValueError, match="the batch has 4 examples, and the embeddings have batch"):
        embeddings.place(
            {name: value[:4] for name, value in ids_of(seen=np.zeros((8, 1), int)).items()}
        )


def embedded_alone(params: Any, embedded: Any, inputs: Any) -> Any:
    return embedded


def seen_by(pipeline: xrex.Pipeline, ids: dict[str, Any]) -> dict[str, np.ndarray]:
    found = pipeline.predict(begin(pipeline), xrex.Batch(ids, {}), embedded_alone)
    return {name: np.asarray(value) for name, value in found.items()}


def test_ways_to_write_the_same_ids_embed_alike():
    _, pipeline = model()
    lists = [[1, 2], [], [3], [4, 5, 6, 7], [], [8, 9, 10], [11], [12]]
    padded = np.full((8, 4), -1)
    for row, ids in zip(padded, lists, strict=True):
        row[: len(ids)] = ids
    flat = np.array([i for ids in lists for i in ids], np.uint8)
    lengths = [len(ids) for ids in lists]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    scattered = np.full((8, 4), -1)  # Padding need not come last.
    for row, ids in zip(scattered, lists, strict=True):
        row[4 - len(ids) :] = ids
    wanted = seen_by(pipeline, ids_of(seen=xrex.Ragged(flat, lengths)))
    for other in (
        padded,
        scattered,
        jnp.asarray(padded),
        xrex.Ragged(flat.astype(np.int64), row_splits=splits),
        xrex.Ragged(flat, lengths, np.ones(len(flat), np.float16)),
        xrex.Ragged(flat.tolist(), tuple(lengths)),
    ):
        assert_same(seen_by(pipeline, ids_of(seen=other)), wanted)


def test_an_id_outside_its_table_is_zeros_and_counted_though_its_stack_has_such_a_row():
    embeddings, pipeline = model()
    user = np.array([30, -2, 2**31 - 1, 0, 1, 2, 3, -1])
    found = seen_by(pipeline, ids_of(user=user))
    assert not found["user"][[0, 1, 2, 7]].any()
    assert found["user"][3:7].any(axis=1).all()
    state = pipeline.start(begin(pipeline), batch_of(user=user))
    before = all_tables(embeddings, state)
    state, metrics = pipeline.finish(state)
    assert (int(metrics.out_of_range), int(metrics.cut)) == (3, 0)  # -1 is padding.
    after = all_tables(embeddings, state)["users"]
    assert (after[4:] == before["users"][4:]).all()
    with pytest.raises(ValueError, match="'user': id 30 of example 0 is outside the table 'users'"):
        make(out_of_range="raise").place(ids_of(user=user))


def test_bags_share_a_capacity_and_what_has_no_room_is_refused_or_counted():
    given = ids_of()  # 7 ids of the first rank, 5 of the second.
    make(capacity=7).place(given)
    with pytest.raises(ValueError, match=r"rank 0 has 7 ids in the bags \['seen'\], and"):
        make(capacity=6).place(given)
    cutting = make(capacity=6, overflow="cut")
    assert cutting.counts(cutting.place(given)) == {"out_of_range": 0, "cut": 1}
    found, whole = seen_by(pipeline_of(cutting), given), seen_by(model()[1], given)
    differ = (found["seen"] != whole["seen"]).any(axis=1)
    assert differ.tolist() == [k == 3 for k in range(8)]
    too_long = xrex.Ragged([1, 2, 3, 4, 5, 6], [6] + [0] * 7)
    found = seen_by(pipeline_of(make(overflow="cut")), ids_of(seen=too_long))["seen"]
    kept = seen_by(model()[1], ids_of(seen=xrex.Ragged([1, 2, 3, 4], [4] + [0] * 7)))["seen"]
    np.testing.assert_array_equal(found, kept)


@pytest.mark.parametrize(
    ("combiner", "weights", "factors"),
    [
        ("sum", None, [1, 1]),
        ("mean", None, [0.5, 0.5]),
        ("sqrtn", None, [2**-0.5, 2**-0.5]),
        ("sum", [3, -1], [3, -1]),
        ("mean", [3, 1], [0.75, 0.25]),
        ("mean", [1, -1], [0, 0]),
        ("sqrtn", [3, 4], [0.6, 0.8]),
    ],
)
def test_combiners(combiner, weights, factors):
    features = {
        "user": xrex.Feature("users"),
        "seen": xrex.Feature("items", max_ids=4, combiner=combiner),
        "query": xrex.Feature("words", max_ids=3),
    }
    pipeline = pipeline_of(make(features=features))
    given = xrex.Ragged([5, 7], [0, 2] + [0] * 6, weights)
    found = seen_by(pipeline, ids_of(seen=given))["seen"]
    items = np.asarray(pipeline.config.tables.table(begin(pipeline), "items"))
    wanted = (items[[5, 7]] * np.array(factors, np.float32)[:, None]).sum(axis=0)
    np.testing.assert_allclose(found[1], wanted, rtol=1e-6, atol=1e-6)
    assert not found[[0, 2, 3, 4, 5, 6, 7]].any()


def test_memory_may_be_written_to_as_soon_as_a_call_returns():
    embeddings = make()
    wanted = (
        embeddings.place(ids_of(seen=xrex.Ragged(np.arange(12), [12] + [0] * 7))) if False else None
    )
    del wanted
    user, flat, lengths = (np.arange(8), np.arange(8), np.ones(8, int))
    weights = np.ones(8, np.float32)
    given = ids_of(user=user, seen=xrex.Ragged(flat, lengths, weights))
    placed = embeddings.place(given)
    copied = jax.tree.map(np.array, placed)
    for array in (user, flat, lengths, weights):
        array[:] = 0
    assert_same(placed, copied)


# Training


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_cannot_be_changes_nothing_in_any_stack(staleness):
    embeddings, pipeline = model(staleness)
    state = pipeline.start(begin(pipeline), batch_of(0))
    before = all_tables(embeddings, state)
    bad = batch_of(0)
    bad.inputs["y"][2] = 3e38  # Finite, and its square is not.
    state, _ = pipeline.finish(state)
    first = all_tables(embeddings, state)
    assert any((first[name] != before[name]).any() for name in before)
    state, metrics = pipeline.finish(pipeline.start(state, bad))
    assert metrics.skipped
    assert_same(all_tables(embeddings, state), first)


@pytest.mark.parametrize("staleness", [0, 1])
def test_flushing_and_restarting_at_any_point_change_no_bit(staleness):
    embeddings, pipeline = model(staleness)
    training = pipeline.run(begin(pipeline), [batch_of(k) for k in range(4)])
    for number, _ in enumerate(training):
        if number == 0:
            training.state, _ = pipeline.flush(training.state)
        if number == 1:  # All of it through the host, and into another pipeline.
            saved = jax.tree.map(np.asarray, training.state)
            other = pipeline_of(make(), staleness=staleness)
            training = other.run(saved, [batch_of(3)])
            assert_same(end(embeddings, training), trained(staleness))


def test_an_idle_state_goes_on_by_its_parts():
    embeddings, pipeline = model()
    training = pipeline.run(begin(pipeline), [batch_of(0), batch_of(1)])
    for _ in training:
        pass
    saved = jax.tree.map(np.asarray, training.state)
    state = pipeline.init(
        saved.table,
        saved.dense_params,
        rule_state=saved.rule_state,
        optimizer_state=saved.optimizer_state,
        step=saved.step,
    )
    training = pipeline.run(state, [batch_of(2), batch_of(3)])
    assert_same(end(embeddings, training), trained(0))
    with pytest.raises(ValueError, match=r"saved table has the stacks \['x'\]"):
        pipeline.init({"x": saved.table}, saved.dense_params)
    with pytest.raises(TypeError, match="init takes a random key, or a saved state's table"):
        pipeline.init(3, saved.dense_params)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_bad_batch_in_a_run_loses_nothing(staleness):
    embeddings, pipeline = model(staleness)
    bad = batch_of(1, seen=xrex.Ragged([1], [2] + [0] * 7))
    source = iter([batch_of(0), bad, *(batch_of(k) for k in range(1, 4))])
    training = pipeline.run(begin(pipeline), source)
    with pytest.raises(ValueError, match="'seen' has 1 ids"):
        next(training)
    training = pipeline.run(training.state, source)
    assert_same(end(embeddings, training), trained(staleness))


@pytest.mark.parametrize("staleness", [0, 1])
def test_micro_batches_train_as_the_batch_does(staleness):
    embeddings = make()

    def mean_loss(params: Any, embedded: Any, inputs: Any) -> jax.Array:
        total = inputs["bias"][0] * params["w"]
        for name in embedded:
            values = embedded[name].astype(jnp.float32)
            total += values.reshape(len(values), -1).sum(axis=1)
        return jnp.mean(total * inputs["y"]) * 8

    ends = []
    for steps in (1, 2):
        pipeline = pipeline_of(
            embeddings,
            mean_loss,
            staleness=staleness,
            accumulation_steps=steps,
            per_example={"y": True, "bias": False},
        )
        batches = [batch_of(k) for k in range(2)]
        batches = [b._replace(inputs=b.inputs | {"bias": np.ones(4, np.float32)}) for b in batches]
        ends.append(end(embeddings, pipeline.run(begin(pipeline), batches)))
    assert_same(*ends)


@pytest.mark.parametrize("staleness", [0, 1])
def test_each_program_is_compiled_once(staleness):
    embeddings = make()
    pipeline = pipeline_of(embeddings, staleness=staleness)
    state = begin(pipeline)
    with compilations() as compiled:
        end(embeddings, pipeline.run(state, [batch_of(k) for k in range(5)]))
    names = ("xrex_start", "xrex_step_ahead", "xrex_finish") if staleness else ("xrex_step_now",)
    assert compiled == dict.fromkeys(names, 1)


def test_a_step_is_lowered_of_placed_ids_or_shapes():
    embeddings, pipeline = model(1)
    state = pipeline.start(begin(pipeline), batch_of(0))
    placed = xrex.Batch(embeddings.place(ids_of()), state.current_batch.inputs)
    shapes = xrex.Batch(embeddings.batch_shapes(), state.current_batch.inputs)
    texts = [pipeline.lower_step(state, batch).as_text() for batch in (placed, shapes)]
    assert texts[0] == texts[1]
    with pytest.raises(TypeError, match="a batch's ids must be placed, not a dict"):
        pipeline.lower_step(state, batch_of(0))


@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_may_come_and_go_between_batches(staleness):
    embeddings, pipeline = model(staleness)
    ones = np.ones(12)
    batches = [batch_of(k) for k in range(4)]
    for batch in batches[1::2]:
        batch.token_ids["seen"] = batch.token_ids["seen"]._replace(weights=ones)
    training = pipeline.run(begin(pipeline), batches)
    assert_same(end(embeddings, training), trained(staleness))


@pytest.mark.parametrize("staleness", [0, 1])
def test_stacked_tables_keep_rates_and_schedules_of_their_own(staleness):
    def scheduled(step: jax.Array) -> xrex.RowwiseAdagrad:
        return xrex.RowwiseAdagrad(learning_rate=jnp.exp2(-step.astype(jnp.float32)), eps=1e-30)

    tables = {
        "users": xrex.Table(vocab=8, width=2, rule=scheduled),
        "items": xrex.Table(
            vocab=8, width=2, rule=xrex.RowwiseAdagrad(learning_rate=4.0, eps=1e-30)
        ),
    }
    features = {"user": xrex.Feature("users"), "item": xrex.Feature("items")}
    embeddings = make(tables=tables, features=features)
    assert len(embeddings.plans) == 1
    pipeline = xrex.make_pipeline(
        embeddings,
        lambda params, embedded, inputs: jnp.sum(embedded["user"]) + jnp.sum(embedded["item"]),
        optax.sgd(1.0),
        staleness=staleness,
    )
    state = pipeline.init(jax.random.key(0), {})
    for name in tables:
        state = embeddings.set_table(state, name, np.zeros((8, 2)))
    # One id each time: a new row per batch, of which the accumulator becomes 1.
    ids = [{"user": np.full(8, -1), "item": np.full(8, -1)} for _ in range(3)]
    for number, each in enumerate(ids):
        each["user"][0] = each["item"][0] = number
    training = pipeline.run(state, [xrex.Batch(each, {}) for each in ids])
    for _ in training:
        pass
    users = np.asarray(embeddings.table(training.state, "users"))
    items = np.asarray(embeddings.table(training.state, "items"))
    assert users[:4, 0].tolist() == [-1, -0.5, -0.25, 0]
    assert items[:4, 0].tolist() == [-4, -4, -4, 0]


# Prediction


@pytest.mark.parametrize("staleness", [0, 1])
def test_predict_sees_every_update_and_changes_nothing(staleness):
    embeddings, pipeline = model(staleness)

    def apply_fn(params: Any, embedded: Any, inputs: Any) -> Any:
        return {"user": embedded["user"] * params["w"], "y": inputs["y"] * inputs["scale"]}

    few = xrex.Batch(
        {name: value[:3] for name, value in ids_of(seen=np.zeros((8, 2), int)).items()},
        {"y": np.arange(3, dtype=np.float32), "scale": np.float32(2)},
    )
    training = pipeline.run(begin(pipeline), [batch_of(k) for k in range(4)])
    for _, metrics in training:
        assert not metrics.skipped
        before = jax.tree.map(np.asarray, training.state)
        found = pipeline.predict(training.state, few, apply_fn)
        assert_same(jax.tree.map(np.asarray, training.state), before)
        flushed, _ = pipeline.without_donation().flush(training.state)
        users = np.asarray(embeddings.table(flushed, "users"))
        wanted = users[ids_of()["user"][:3]] * np.asarray(before.dense_params["w"])
        np.testing.assert_array_equal(found["user"], wanted)
        np.testing.assert_array_equal(found["y"], [0, 2, 4])


def test_predict_refuses_what_is_not_per_example():
    _, pipeline = model()
    state = begin(pipeline)
    with pytest.raises(ValueError, match=r"an array of shape \(\), and must return an entry"):
        pipeline.predict(state, batch_of(0), lambda p, embedded, i: jnp.mean(embedded["user"]))
    twice = {"user": np.zeros(16, int), "seen": np.zeros((16, 1), int)}
    twice["query"] = twice["seen"]
    with pytest.raises(ValueError, match="the batch has 16 examples"):
        pipeline.predict(state, xrex.Batch(twice, {}), lambda p, embedded, i: embedded)


def test_predict_of_one_table():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    handle = xrex.make_context_handle(
        mesh,
        "x",
        data_axis="x",
        tokens_per_batch=4,
        emb_width=2,
        num_unique=4,
        num_devices_per_node=2,
    )
    pipeline = xrex.make_pipeline(
        handle, ADAGRAD, lambda p, r, i: jnp.sum(r), optax.sgd(1), vocab=5
    )
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    state = pipeline.init(table, {})
    for ids in ([3, 1, 4], [2, 2, 0, 1]):
        found = pipeline.predict(state, xrex.Batch(ids, {}), lambda params, rows, inputs: rows)
        np.testing.assert_array_equal(found, table[ids])
    for wrong in ([], [0] * 5, [[1]]):
        with pytest.raises(ValueError, match=r"must have \(n,\) with n from 1 to 4"):
            pipeline.predict(state, xrex.Batch(wrong, {}), lambda params, rows, inputs: rows)


# Prefetching


@pytest.mark.parametrize("staleness", [0, 1])
def test_prefetched_batches_train_alike_from_memory_that_is_refilled(staleness):
    embeddings, pipeline = model(staleness)
    buffers = batch_of(0)

    def loader() -> Any:
        for number in range(4):
            fresh = batch_of(number)
            buffers.token_ids["user"][:] = fresh.token_ids["user"]
            buffers.token_ids["query"][:] = fresh.token_ids["query"]
            buffers.token_ids["seen"].ids[:] = fresh.token_ids["seen"].ids
            buffers.inputs["y"][:] = fresh.inputs["y"]
            yield buffers

    with pipeline.prefetch(loader(), size=3) as batches:
        training = pipeline.run(begin(pipeline), batches)
        assert_same(end(embeddings, training), trained(staleness))
    assert not [t for t in threading.enumerate() if t.name == "xrex-prefetch" and t.is_alive()]


def test_prefetching_raises_where_the_batch_is_needed_and_loses_nothing():
    embeddings, pipeline = model()

    class Source:
        """Fails once, in place of its third batch, and goes on."""

        def __init__(self) -> None:
            self.items: list[Any] = [*(batch_of(k) for k in range(2)), OSError("disk"), batch_of(2)]
            self.items += [batch_of(3, user=np.zeros(3, int)), batch_of(3)]

        def __iter__(self) -> "Source":
            return self

        def __next__(self) -> xrex.Batch:
            if not self.items:
                raise StopIteration
            item = self.items.pop(0)
            if isinstance(item, Exception):
                raise item
            return item

    with pipeline.prefetch(Source()) as batches:
        training = pipeline.run(begin(pipeline), batches)
        next(training)
        assert int(training.state.step) == 1
        with pytest.raises(OSError, match="disk"):
            next(training)
        assert int(training.state.step) == 1
        training = pipeline.run(training.state, batches)
        with pytest.raises(ValueError, match="'seen' has 8 examples"):
            for _ in training:
                pass
        training = pipeline.run(training.state, batches)
        assert_same(end(embeddings, training), trained(0))
    with pytest.raises(ValueError, match="size=0 must be a positive integer"):
        pipeline.prefetch([], size=0)


def test_a_source_that_ends_the_program_ends_the_wait():
    _, pipeline = model()

    def source() -> Any:
        yield batch_of(0)
        raise SystemExit(3)

    with pipeline.prefetch(source()) as batches:
        next(batches)
        with pytest.raises(SystemExit):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


# What is refused when a model is made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 7}, "async_emb tokens_per_batch=7 does not shard evenly over the 2-rank"),
        ({"data_axis": "y"}, "async_emb axis 'y' is not a mesh axis"),
        ({"features": {}}, "features must have one entry at least"),
        ({"features": {"user": xrex.Feature("people")}}, "feature 'user' names the table 'people'"),
        ({"features": {"user": xrex.Feature("users")}}, "table 'items' has no feature"),
        ({"features": {"user": "users"}}, r"features\['user'\] must be an xrex.Feature"),
        ({"capacity": 0}, "capacity=0 must be a positive integer or None"),
        ({"num_unique": True}, "num_unique=True must be a positive integer or None"),
        ({"out_of_range": "clip"}, r"out_of_range='clip' must be one of \('zero', 'raise'\)"),
        ({"overflow": "drop"}, r"overflow='drop' must be one of \('raise', 'cut'\)"),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_validator_names_the_table():
    tables = {
        "a": xrex.Table(vocab=4, width=8, rule=ADAGRAD),
        "b": xrex.Table(vocab=4, width=7, rule=ADAGRAD),
    }
    features = {"a": xrex.Feature("a"), "b": xrex.Feature("b")}
    message = "async_emb emb_width=7 does not shard evenly over the 2-rank communicator"
    with pytest.raises(ValueError, match=message) as caught:
        make(tables=tables, features=features)
    assert any("table 'b'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"vocab": 0}, ValueError, "vocab=0 must be a positive integer"),
        ({"width": 2.0}, ValueError, "width=2.0 must be a positive integer"),
        ({"dtype": "float16"}, TypeError, "dtype='float16' must be bfloat16 or float32"),
        ({"dtype": "flaot32"}, TypeError, "dtype='flaot32' must be bfloat16 or float32"),
        ({"rule": 0.1}, ValueError, "rule=0.1 must be an update rule or a function to one"),
        ({"rule": xrex.RowwiseAdagrad}, ValueError, "must be an update rule or a function to one"),
        ({"initializer": 0}, ValueError, "initializer=0 must be a function or None"),
    ],
)
def test_a_table_that_cannot_be_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        xrex.Table(**{"vocab": 4, "width": 8, "rule": ADAGRAD} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"table": 3}, "table=3 must be the name of a table"),
        ({"max_ids": 0}, "max_ids=0 must be a positive integer or None"),
        ({"max_ids": 2, "combiner": "max"}, "combiner='max' must be one of"),
        ({"combiner": "sum"}, "combiner='sum' needs max_ids"),
        ({"padding_id": 1.5}, "padding_id=1.5 must be an integer or None"),
    ],
)
def test_a_feature_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        xrex.Feature(**{"table": "users"} | fields)


def test_a_call_of_make_pipeline_that_is_neither_form_says_so():
    with pytest.raises(TypeError, match="missing a required argument: 'dense_optimizer'"):
        xrex.make_pipeline(make(), loss_fn)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'vocab'"):
        xrex.make_pipeline(make(), loss_fn, optax.sgd(0.1), vocab=8)


def test_the_oracles_bags_by_hand():
    rows = np.array([[1, 2], [3, 4]], np.float32)
    assert oracle.pool(rows, oracle.factors("mean", [0, 1], None)).tolist() == [2, 3]
    assert oracle.pool(rows, oracle.factors("mean", [0, 1], [3, 1])).tolist() == [1.5, 2.5]
    assert oracle.factors("sqrtn", [0, 1], [3, 4]).tolist() == [np.float32(0.6), np.float32(0.8)]
    assert oracle.pool(rows[:0], oracle.factors("mean", [], None)).tolist() == [0, 0]
    spread = oracle.spread(np.array([4, 8], np.float32), oracle.factors("mean", [0, 1], None))
    assert spread.tolist() == [[2, 4], [2, 4]]
