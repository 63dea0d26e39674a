"""What went wrong for other people: inputs of public bug reports, and what is right here.

Each test names its reports. The determinism row, which needs large inputs, is in
determinism_test.py; those about pmap are in pmap_test.py.

Unless a test says otherwise: 8 rows of 4 float32 zeros, learning rate 1, no decay, and as many
ranks as tokens. A token of id -1 stands for none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_same_bits_on_every_device

BFLOAT16 = ml_dtypes.bfloat16
NONE = -1


def rule(**parameters: Any) -> xrex.RowwiseAdagrad:
    return xrex.RowwiseAdagrad(**({"learning_rate": 1.0, "eps": 1e-30} | parameters))


PLAIN = rule()


def zeros(vocab: int = 8, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros((vocab, 4), dtype)


def train(
    ids: Any,
    grads: Any,
    table: Any = None,
    state: Any = None,
    *,
    ranks: int | None = None,
    rule: xrex.RowwiseAdagrad = PLAIN,
) -> tuple[Any, Any, xrex.UpdateResult]:
    """One step; a gradient is a row a token, or one number for all."""
    table = zeros() if table is None else table
    handle = layouts.line(
        ranks or len(ids), tokens_per_batch=len(ids), emb_width=4, num_unique=len(ids)
    )
    tokens = xrex.compress_token_ids(handle, ids, table.shape[0])
    grads = np.broadcast_to(np.asarray(grads), (len(ids), 4)).astype(table.dtype)
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    state = rule.init(table.shape[0]) if state is None else state
    table, state, pin = xrex.update_start(handle, rule, update, table, state)
    return table, state, xrex.update_done(handle, pin)


def assert_row(after: Any, row: int, values: Any, accumulator: float) -> None:
    """On every device: each rank must have the whole row's accumulator."""
    table, state, _ = after
    assert np.asarray(table, np.float32)[row].tolist() == values
    for shard in state.accumulator.addressable_shards:
        assert float(shard.data[row]) == accumulator, shard.device


# Updates


@pytest.mark.parametrize(
    ("gradient", "rate", "row", "accumulator"),
    [([4, 0, 0, 0], 1.0, [-2, 0, 0, 0], 4), ([1, -1, 1, -1], 0.5, [-0.5, 0.5, -0.5, 0.5], 1)],
)
def test_the_mean_is_over_the_full_width(
    gradient: Any, rate: float, row: Any, accumulator: float
) -> None:
    """torchrec#2015"""
    after = train([3, NONE], [gradient, [0] * 4], rule=rule(learning_rate=rate))
    assert_row(after, 3, row, accumulator)


def test_duplicates_merge_across_ranks_before_the_square() -> None:
    """dgl#2030, FBGEMM#1545"""
    assert_row(train([3, 3], 2), 3, [-1] * 4, 16)


def test_padding_of_unique_tokens_does_not_wrap_to_the_last_row() -> None:
    """jax#21708, jax#14095, jax#17387"""
    decaying = rule(half_life_steps=1, weight_decay=0.5)
    handle = layouts.line(4, tokens_per_batch=4, emb_width=4, num_unique=4)
    table = np.ones((8, 4), np.float32)
    state = decaying.init(8)._replace(accumulator=jnp.full((8,), 2.0))
    update = xrex.GradientUpdate(
        np.array([3, -1, -1, -1]), np.ones((4, 4), np.float32), np.zeros(4, np.int32)
    )
    new, state, _ = xrex.update_start(handle, decaying, update, table, state)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert_same_bits(np.asarray(new)[others], table[others])
    assert np.asarray(state.accumulator)[others].tolist() == [2] * 7
    assert float(state.accumulator[3]) == 2 * 0.5 + 16


def test_a_duplicate_in_unique_tokens_is_a_clear_error() -> None:
    """jax#6912, jax#11655"""
    handle = layouts.line(4, tokens_per_batch=4, emb_width=4, num_unique=4)
    grads = np.full((4, 4), 2, np.float32)
    update = xrex.GradientUpdate(np.array([3, 5, 3, 3]), grads, np.array([0, 1, -1, -1]))
    with pytest.raises(ValueError, match=r"lists id 3 at positions \[0, 2, 3\]"):
        xrex.update_start(handle, PLAIN, update, zeros(), PLAIN.init(8))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_gradient_on_one_rank_stops_all_of_them(bad: float) -> None:
    """tensorflow#4754, optax#1746"""
    lazy = rule(half_life_steps=2, lazy=True)
    before = train([3, 5], 2, rule=lazy)
    skipped = train([3, 5], [[1] * 4, [1, 1, 1, bad]], *before[:2], rule=lazy)
    assert not skipped[2].valid
    for ours, theirs in zip(jax.tree.leaves(skipped[:2]), jax.tree.leaves(before[:2]), strict=True):
        assert_same_bits_on_every_device(ours, np.asarray(theirs))
    through, with_gap = (train([3, 6], 1, *run[:2], rule=lazy) for run in (before, skipped))
    assert with_gap[2].valid
    jax.tree.map(assert_same_bits, with_gap, through)


def test_lazy_decay_counts_the_steps_between() -> None:
    """FBGEMM#5908"""
    lazy = rule(half_life_steps=1, lazy=True)
    after = train([3, NONE], 4, rule=lazy)
    for row in (1, 1, 3):
        after = train([row, NONE], 4, *after[:2], rule=lazy)
    assert float(after[1].accumulator[3]) == 18


def test_many_tokens_of_one_id_in_bfloat16() -> None:
    """mxnet#17703, tt-metal#53386, ml_dtypes#63"""
    after = train(np.full(4096, 5), 1, zeros(dtype=BFLOAT16), ranks=4)
    assert_row(after, 5, [-1] * 4, 16777216)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_number_of_ranks_does_not_scale_the_gradient(ranks: int) -> None:
    """torchrec#2251"""
    after = train([0, 1, 2, 3], 0.5, ranks=ranks)
    for row in range(4):
        assert_row(after, row, [-1] * 4, 0.25)


# The reports' counts, and one either side of the kernels' blocks.
@pytest.mark.parametrize("tokens", [127, 128, 129, 255, 256, 257, 767, 768, 769, 1023, 1024, 1025])
def test_a_batch_without_any_segment(tokens: int) -> None:
    """pytorch#28716, pytorch#26302"""
    handle = layouts.line(1, tokens_per_batch=tokens, emb_width=4, num_unique=8)
    update = xrex.GradientUpdate(
        np.arange(8), np.ones((tokens, 4), np.float32), np.full(tokens, -1)
    )
    table = layouts.random_bits(1, np.float32, 8, 4)
    decaying = rule(half_life_steps=1, weight_decay=0.5)
    state = decaying.init(8)._replace(accumulator=jnp.arange(8.0))
    new, new_state, pin = xrex.update_start(handle, decaying, update, table, state)
    assert_same_bits(new, table)
    assert_same_bits(new_state.accumulator, np.arange(8, dtype=np.float32))
    assert int(pin.result.dropped) == tokens


def test_weight_decay_reaches_touched_rows_alone() -> None:
    """FBGEMM#2498, addons#767, pytorch#25560"""
    table, _, _ = train([1, NONE], 1, np.ones((4, 4), np.float32), rule=rule(weight_decay=0.1))
    assert np.asarray(table)[[0, 2, 3]].tolist() == [[1] * 4] * 3
    assert np.asarray(table)[1] == pytest.approx(np.exp(-0.1) - 1, rel=1e-6)


def test_lazy_weight_decay_catches_up_at_the_first_touch() -> None:
    """FBGEMM#2498, addons#767, pytorch#25560"""
    lazy = rule(weight_decay=0.1, lazy=True)
    after = (np.ones((4, 4), BFLOAT16), None)
    for _ in range(10):
        after = train([1, NONE], 1, *after[:2], rule=lazy)
    after = train([2, NONE], 1, *after[:2], rule=lazy)
    # bf(exp(-1)) = 0.3671875, and the gradient's step is exactly -1.
    assert np.asarray(after[0], np.float32)[2].tolist() == [0.3671875 - 1] * 4


# Lookups


def look(handle: xrex.AsyncEmbContextHandle, ids: Any, table: Any) -> np.ndarray:
    return np.asarray(xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table)))


@pytest.mark.parametrize("x64", [False, True])
def test_a_wide_host_id_is_never_truncated(x64: bool) -> None:
    """jax#18385, pytorch#193408"""
    handle = layouts.line(1, tokens_per_batch=1, emb_width=4, num_unique=1)
    with jax.enable_x64(x64), pytest.raises(ValueError, match="id 4294967299 at position 0"):
        look(handle, np.array([2**32 + 3], np.int64), zeros())


def test_two_lookups_in_flight_do_not_mix() -> None:
    """recsys-examples#280, FBGEMM#1201, torchrec#4191"""
    handle = layouts.line(2, tokens_per_batch=2, emb_width=4, num_unique=1)
    table = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    a = xrex.lookup_start(handle, [0, 0], table)
    b = xrex.lookup_start(handle, [1, 1], table)
    assert np.asarray(xrex.lookup_done(handle, a)).tolist() == [[0] * 4] * 2
    assert np.asarray(xrex.lookup_done(handle, b)).tolist() == [[1] * 4] * 2


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_lookup_in_flight_does_not_see_a_later_update(wrap: Any) -> None:
    """recsys-examples#280, FBGEMM#1201, torchrec#4191"""
    handle = layouts.line(2, tokens_per_batch=2, emb_width=4, num_unique=2)

    def run(table: Any) -> tuple[Any, Any]:
        pin = xrex.lookup_start(handle, np.array([3, 3]), table)
        table, _, _ = train([3, NONE], 1, table)
        before = xrex.lookup_done(handle, pin)
        again = xrex.lookup_start(handle, np.array([3, 3]), table)
        return before, xrex.lookup_done(handle, again)

    before, after = wrap(run)(layouts.put_table(handle, zeros()))
    assert np.asarray(before).tolist() == [[0] * 4] * 2
    assert np.asarray(after).tolist() == [[-1] * 4] * 2


# The validator


def make(axes: dict[str, int], table: Any, data: Any, **sizes: int) -> xrex.AsyncEmbContextHandle:
    defaults = {"tokens_per_batch": 8, "emb_width": 8, "num_unique": 8, "num_devices_per_node": 8}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return xrex.make_context_handle(mesh, table, data_axis=data, **(defaults | sizes))


def assert_trains(handle: xrex.AsyncEmbContextHandle) -> None:
    """A lookup and an update, against the oracle, on every device."""
    table = layouts.random_table(1, np.float32, 8, handle.emb_width)
    ids = np.random.default_rng(2).integers(0, 8, handle.tokens_per_batch)
    grads = layouts.exact_gradients(3, ids, handle.emb_width)
    rows = xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table))
    assert_same_bits_on_every_device(rows, oracle.lookup(table, ids))
    tokens = xrex.compress_token_ids(handle, ids, 8)
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    new, state, _ = xrex.update_start(handle, PLAIN, update, table, PLAIN.init(8))
    judge = oracle.Adagrad(learning_rate=1.0, eps=1e-30)
    found = oracle.compress(ids, 8, handle.num_unique)
    expected, expected_state, _ = oracle.update(
        judge, table, oracle.init(judge, 8), found.unique_tokens, grads, found.segment_ids
    )
    assert_same_bits_on_every_device(new, expected)
    assert_same_bits_on_every_device(state.accumulator, expected_state.accumulator)


@pytest.mark.parametrize("value", [0, -1])
def test_devices_per_node_are_positive(value: int) -> None:
    """torchrec#4768, torchrec#4726"""
    with pytest.raises(ValueError, match=f"num_devices_per_node={value} must be a positive"):
        make({"x": 4}, "x", "x", num_devices_per_node=value)


@pytest.mark.parametrize(
    ("ranks", "name", "value"),
    [
        (4, "emb_width", 6),
        (4, "emb_width", 2),
        (4, "tokens_per_batch", 10),
        (8, "tokens_per_batch", 1),
    ],
)
def test_uneven_sizes_name_both_numbers(ranks: int, name: str, value: int) -> None:
    """pytorch#108869, LWM#39, jax#27808, torchrec#1612"""
    with pytest.raises(ValueError, match=f"{name}={value} does not .* {ranks}-rank"):
        make({"x": ranks}, "x", "x", **{name: value})


def test_one_column_a_rank_is_right() -> None:
    """pytorch#108869, LWM#39, jax#27808, torchrec#1612"""
    assert_trains(layouts.line(4, tokens_per_batch=8, emb_width=4, num_unique=8))


@pytest.mark.parametrize("name", ["tokens_per_batch", "num_unique", "emb_width"])
def test_nothing_is_of_size_0(name: str) -> None:
    """Paddle#78243, FBGEMM#3750"""
    with pytest.raises(ValueError, match=f"{name}=0 must be a positive"):
        make({"x": 4}, "x", "x", **{name: 0})


@pytest.mark.parametrize(
    ("axes", "table", "data", "message"),
    [
        ({"x": 4}, ("x", "x"), ("x",), "names axis 'x' more than once"),
        ({"x": 4}, ("z",), ("z",), "axis 'z' is not a mesh axis"),
        ({"x": 2, "d": 2}, ("x",), ("d",), r"table_axis \['x'\] missing from data_axis \('d',\)"),
        ({"x": 2, "d": 2}, ("x",), ("x", "d"), r"data_axis \('x', 'd'\) shards .* over 2"),
    ],
)
def test_axes_that_cannot_work_are_named(
    axes: dict[str, int], table: Any, data: Any, message: str
) -> None:
    """tunix#2181, jax#19720"""
    with pytest.raises(ValueError, match=message):
        make(axes, table, data)


def test_a_data_axis_of_size_1_is_right() -> None:
    """tunix#2181, jax#19720"""
    mesh = layouts.mesh({"x": 2, "d": 1})
    sizes = {"tokens_per_batch": 8, "emb_width": 4, "num_unique": 8, "num_devices_per_node": 8}
    assert_trains(xrex.make_context_handle(mesh, ("x",), data_axis=("x", "d"), **sizes))
