"""Updates on every layout, bit for bit on every device, and the rows and steps they must not touch.

The inputs have one right answer in bits; decay and schedules are in adagrad_test.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_same_bits_on_every_device

BFLOAT16 = ml_dtypes.bfloat16
RULE = oracle.Adagrad(learning_rate=0.5, eps=1e-30)
LAZY = oracle.Adagrad(learning_rate=0.5, eps=1e-30, lazy=True)
OURS, OURS_LAZY = (xrex.RowwiseAdagrad(**vars(rule)) for rule in (RULE, LAZY))
FEW = layouts.FEW_LAYOUTS[0].handle()


def train(
    handle: xrex.AsyncEmbContextHandle,
    rule: xrex.RowwiseAdagrad,
    ids: Any,
    grads: Any,
    table: Any,
    state: Any,
    pending: Any = True,
) -> Any:
    tokens = xrex.compress_token_ids(handle, ids, table.shape[0])
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids, pending)
    table, state, pin = xrex.update_start(handle, rule, update, table, state)
    return table, state, xrex.update_done(handle, pin)


def judge(
    rule: oracle.Adagrad, ids: Any, grads: Any, table: Any, state: Any, num_unique: int
) -> Any:
    tokens = oracle.compress(ids, table.shape[0], num_unique)
    return oracle.update(rule, table, state, tokens.unique_tokens, grads, tokens.segment_ids)


def compare(ours: Any, theirs: Any, what: str = "") -> None:
    (table, state, result), (expected, expected_state, expected_result) = ours, theirs
    assert_same_bits_on_every_device(table, expected, f"table {what}")
    for name in expected_state._fields:
        if getattr(expected_state, name) is not None:
            actual = getattr(state, name)
            assert_same_bits_on_every_device(
                actual, getattr(expected_state, name), f"{name} {what}"
            )
    for name, value in zip(result._fields, result, strict=True):
        dtype = {"norm": np.float32, "valid": np.bool_, "dropped": np.int32}[name]
        expected_value = np.asarray(getattr(expected_result, name), dtype)
        assert_same_bits_on_every_device(value, expected_value, f"{name} {what}")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, (BFLOAT16, np.float32)[i % 2]) for i, case in enumerate(layouts.LAYOUTS)],
    ids=lambda value: str(value) if isinstance(value, layouts.LayoutCase) else np.dtype(value).name,
)
def test_two_updates_on_every_device(case: layouts.LayoutCase, dtype: Any) -> None:
    """The second one reads what the first one wrote: copies that drift are seen here."""
    handle = case.handle()
    table = layouts.random_table(1, dtype)
    state = oracle.init(LAZY, layouts.VOCAB)
    ours = layouts.put_table(handle, table), layouts.put(handle, OURS_LAZY.init(layouts.VOCAB))
    for step in range(2):
        ids = layouts.random_ids(10 + step)
        grads = layouts.exact_gradients(20 + step, ids, dtype=dtype)
        theirs = judge(LAZY, ids, grads, table, state, handle.num_unique)
        after = train(handle, OURS_LAZY, ids, grads, *ours)
        compare(after, theirs, f"{case} step {step}")
        ours, (table, state) = after[:2], theirs[:2]


@pytest.mark.parametrize(
    ("case", "dtype", "grad_dtype"),
    [
        (layouts.FEW_LAYOUTS[0], np.float32, BFLOAT16),
        (layouts.FEW_LAYOUTS[1], np.float32, np.float32),
        (layouts.FEW_LAYOUTS[2], BFLOAT16, np.float32),
    ],
    ids=["4", "2x2x2-permuted", "4x2-copies-explicit"],
)
def test_under_jit_with_gradients_of_another_type(
    case: layouts.LayoutCase, dtype: Any, grad_dtype: Any
) -> None:
    handle = case.handle()
    table, ids = layouts.random_table(2, dtype), layouts.random_ids(12)
    grads = layouts.exact_gradients(22, ids, dtype=grad_dtype)
    state = oracle.init(RULE, layouts.VOCAB)
    theirs = judge(RULE, ids, grads, table, state, handle.num_unique)
    ours = layouts.jitted(train, handle, OURS)(ids, grads, table, OURS.init(layouts.VOCAB))
    compare(ours, theirs, str(case))


def test_x64_changes_no_bit() -> None:
    table, ids = layouts.random_table(2, np.float32), layouts.random_ids(12)
    grads = layouts.exact_gradients(22, ids)
    theirs = judge(RULE, ids, grads, table, oracle.init(RULE, layouts.VOCAB), FEW.num_unique)
    with jax.enable_x64(True):
        state = OURS.init(layouts.VOCAB)
        compare(train(FEW, OURS, ids.astype(np.int64), grads, table, state), theirs)


def test_a_group_of_one_by_name_trains_too() -> None:
    """No axis at all: every device holds the whole table and all tokens."""
    handle = xrex.make_context_handle(
        layouts.mesh({"x": 4}),
        (),
        data_axis=(),
        tokens_per_batch=layouts.TOKENS,
        emb_width=layouts.WIDTH,
        num_unique=layouts.VOCAB,
        num_devices_per_node=4,
    )
    table, ids = layouts.random_table(2, np.float32), layouts.random_ids(12)
    grads = layouts.exact_gradients(22, ids)
    theirs = judge(RULE, ids, grads, table, oracle.init(RULE, layouts.VOCAB), handle.num_unique)
    compare(train(handle, OURS, ids, grads, table, OURS.init(layouts.VOCAB)), theirs)


# What must keep every bit


class Untouched:
    """A table and a state of any bits, and gradients for some of its rows."""

    def __init__(self, dtype: Any) -> None:
        self.table = layouts.random_bits(3, dtype)
        self.trained = np.array([2, 7, 30])
        self.table[self.trained] = 1
        bits = layouts.random_bits(4, np.float32, 1, layouts.VOCAB)[0]
        bits[self.trained] = 4
        self.state = xrex.RowwiseAdagradState(
            accumulator=jnp.asarray(bits),
            last_step=jnp.arange(layouts.VOCAB, dtype=jnp.int32),
            clock=jnp.int32(40),
        )
        self.ids = np.resize(self.trained, layouts.TOKENS).astype(np.int32)
        self.grads = np.ones((layouts.TOKENS, layouts.WIDTH), np.float32)

    def run(self, **changes: Any) -> Any:
        arguments = {"ids": self.ids, "grads": self.grads, "pending": True} | changes
        return layouts.jitted(train, FEW, OURS_LAZY)(
            arguments["ids"],
            arguments["grads"],
            layouts.put_table(FEW, self.table),
            layouts.put(FEW, self.state),
            arguments["pending"],
        )

    def assert_kept(self, after: Any, rows: Any = slice(None)) -> None:
        table, state, _ = after
        assert_same_bits(np.asarray(table)[rows], self.table[rows], "table")
        for name in ("accumulator", "last_step"):
            actual, before = (np.asarray(getattr(s, name)) for s in (state, self.state))
            assert_same_bits(actual[rows], before[rows], name)


@pytest.fixture(scope="module", params=[np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def untouched(request: Any) -> Untouched:
    return Untouched(request.param)


def test_other_rows_keep_every_bit(untouched: Untouched) -> None:
    after = untouched.run()
    others = np.setdiff1d(np.arange(layouts.VOCAB), untouched.trained)
    untouched.assert_kept(after, others)
    assert not np.any(np.asarray(after[0])[untouched.trained] == 1)
    assert int(after[1].clock) == 41


def test_an_update_that_is_not_pending_changes_nothing(untouched: Untouched) -> None:
    after = untouched.run(pending=False)
    untouched.assert_kept(after)
    assert (int(after[1].clock), bool(after[2].valid)) == (40, False)
    assert after[2].norm > 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38, 1e20])
def test_a_norm_that_is_not_finite_changes_nothing(untouched: Untouched, bad: float) -> None:
    """An infinity, a NaN, a sum that overflows, a square that overflows: in one column of one."""
    grads = untouched.grads.copy()
    grads[[4, 4 + len(untouched.trained)], 23] = bad
    after = untouched.run(grads=grads)
    untouched.assert_kept(after)
    assert (int(after[1].clock), bool(after[2].valid)) == (40, False)
    assert not np.isfinite(after[2].norm)


def test_a_sum_of_zero_touches_nothing(untouched: Untouched) -> None:
    """Listed, with gradients that cancel: no step, no decay, and the row is not called recent."""
    sign = np.where(np.arange(layouts.TOKENS) % 2, 1, -1).astype(np.float32)
    after = untouched.run(
        ids=np.full(layouts.TOKENS, 7, np.int32), grads=untouched.grads * sign[:, None]
    )
    untouched.assert_kept(after)
    assert (int(after[1].clock), bool(after[2].valid), float(after[2].norm)) == (41, True, 0)


def test_gradients_without_a_row_count_nowhere(untouched: Untouched) -> None:
    """Not even an infinity in the norm."""
    ids, grads = untouched.ids.copy(), untouched.grads.copy()
    ids[:6] = [-1, -32, layouts.VOCAB, np.iinfo(np.int32).min, np.iinfo(np.int32).max, 1000]
    grads[:6] = np.inf
    grads[2] = np.nan
    after = untouched.run(ids=ids, grads=grads)
    assert (bool(after[2].valid), int(after[2].dropped)) == (True, 6)
    # 14 tokens are left of each row's 16.
    assert float(after[2].norm) == pytest.approx(14 * np.sqrt(3 * layouts.WIDTH), rel=1e-6)


# Ids and segments as a caller may list them


def direct(unique: Any, segments: Any, grads: Any = None, **changes: Any) -> Any:
    """One update with ids listed by hand, on a table of ones and accumulators of 4."""
    handle = layouts.line(2, tokens_per_batch=4, emb_width=4, num_unique=4)
    grads = np.ones((4, 4), np.float32) if grads is None else grads
    state = OURS.init(8)._replace(accumulator=jnp.full((8,), 4.0))
    update = xrex.GradientUpdate(np.array(unique), grads, np.array(segments), True)
    table = np.ones((8, 4), np.float32)
    return xrex.update_start(handle, OURS, update._replace(**changes), table, state)


@pytest.mark.parametrize("gradient", [1, np.inf, np.nan])
def test_unique_tokens_outside_of_the_table_are_dropped_never_wrapped(gradient: float) -> None:
    grads = np.full((4, 4), gradient, np.float32)
    table, state, pin = direct([-1, 8, 3, -8], [0, 1, 3, 3], grads)
    assert_same_bits(table, np.ones((8, 4), np.float32))
    assert state.accumulator.tolist() == [4] * 8
    assert (float(pin.result.norm), bool(pin.result.valid)) == (0, True)
    assert int(pin.result.dropped) == 4


def test_segments_outside_of_the_list_are_dropped() -> None:
    table, _, pin = direct([1, 2, 3, 4], [-1, 4, -7, 2**31 - 1])
    assert_same_bits(table, np.ones((8, 4), np.float32))
    assert int(pin.result.dropped) == 4


def test_any_order_of_unique_tokens_is_fine() -> None:
    table, state, _ = direct([6, 0, 9, 3], [0, 1, 3, 3])
    assert state.accumulator.tolist() == [5, 4, 4, 8, 4, 4, 5, 4]
    assert np.flatnonzero(np.asarray(table)[:, 0] != 1).tolist() == [0, 3, 6]


def test_a_token_left_out_for_lack_of_room_changes_nothing() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=4, num_unique=2)
    grads = np.ones((4, 4), np.float32)
    table = np.ones((8, 4), np.float32)
    after, _, result = train(handle, OURS, [1, 2, 6, 9], grads, table, OURS.init(8))
    assert np.flatnonzero(np.asarray(after)[:, 0] != 1).tolist() == [1, 2]
    assert int(result.dropped) == 2


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_a_row_listed_twice_is_named(place: Any) -> None:
    with pytest.raises(ValueError, match=r"lists id 5 at positions \[0, 2, 3\]") as caught:
        direct([1, 1, 1, 1], [0, 0, 0, 0], unique_tokens=place([5, 1, 5, 5]))
    assert "compress_token_ids" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"unique_tokens": np.zeros(3, np.int32)}, ValueError, "unique_tokens has shape"),
        ({"unique_tokens": np.ones(4)}, TypeError, "unique_tokens must be integers"),
        ({"unique_tokens": np.array([1, 2, 3, 2**40])}, ValueError, f"id {2**40} at position 3"),
        ({"segment_ids": np.zeros((4, 1), np.int32)}, ValueError, "segment_ids has shape"),
        ({"segment_ids": np.zeros(4)}, TypeError, "segment_ids must be integers"),
        ({"grads": np.ones((4, 2), np.float32)}, ValueError, r"grads has shape \(4, 2\)"),
        ({"grads": np.ones((4, 4), np.float16)}, TypeError, "grads must be bfloat16 or float32"),
        ({"grads": np.ones((4, 4))}, TypeError, "grads must be bfloat16 or float32, not float64"),
        ({"pending": 1}, TypeError, "pending must be a bool"),
        ({"pending": np.ones(1, bool)}, ValueError, "pending has shape"),
    ],
)
def test_what_an_update_refuses(changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        direct([1, 2, 3, 4], [0, 1, 2, 3], **changes)


@pytest.mark.parametrize(
    ("rule", "state", "error", "message"),
    [
        (OURS, {"accumulator": np.zeros(7, np.float32)}, ValueError, r"has shape \(7,\).*\(8,\)"),
        (OURS, {"accumulator": np.zeros((8, 4), np.float32)}, ValueError, r"has shape \(8, 4\)"),
        (OURS, {"accumulator": np.zeros(8, BFLOAT16)}, TypeError, "must be float32, not bfloat16"),
        (OURS, {"clock": np.zeros(1, np.int32)}, ValueError, r"state\.clock has shape \(1,\)"),
        (
            OURS,
            {"last_step": np.zeros(8, np.int32)},
            ValueError,
            "has the leaves.*last_step.*keeps",
        ),
        (OURS_LAZY, {}, ValueError, "RowwiseAdagrad with these options keeps .*last_step"),
    ],
)
def test_a_state_that_is_not_the_rules_is_refused(
    rule: Any, state: Any, error: Any, message: str
) -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=4, num_unique=4)
    grads, table = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
    with pytest.raises(error, match=message):
        train(handle, rule, [1, 2, 3, 4], grads, table, OURS.init(8)._replace(**state))


def test_a_gate_comes_before_the_exchange_and_changes_no_value() -> None:
    ids = layouts.random_ids(12)
    grads = layouts.exact_gradients(22, ids)
    tokens = xrex.compress_token_ids(FEW, ids, layouts.VOCAB)
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    table = layouts.put_table(FEW, layouts.random_table(2, np.float32))

    def start(gate: jax.Array | None) -> Any:
        return xrex.update_start(FEW, OURS, update, table, OURS.init(layouts.VOCAB), gate=gate)

    gate = jnp.full((5,), jnp.nan)
    text = jax.jit(start).lower(gate).as_text()
    barrier = text.index("optimization_barrier")
    assert "tensor<5xf32>" in text[barrier : text.index("\n", barrier)]
    assert barrier < text.index("stablehlo.all_to_all")
    jax.tree.map(assert_same_bits, start(gate), start(None))
