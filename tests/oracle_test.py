"""The judge judged: numbers worked out by hand, and the comparisons that the tests rely on."""

import ml_dtypes
import numpy as np
import pytest

from tests import oracle
from tests.assertions import assert_same_bits, assert_ulps, ulps_between

BFLOAT16 = ml_dtypes.bfloat16
ROWS = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)


def _step(
    rule: oracle.Adagrad,
    table: np.ndarray,
    state: oracle.State,
    ids: list[int],
    grads: list[list[float]],
) -> tuple[np.ndarray, oracle.State, oracle.Result]:
    unique, segments, _ = oracle.compress(np.array(ids), table.shape[0], len(ids))
    return oracle.update(rule, table, state, unique, np.array(grads, np.float32), segments)


@pytest.mark.parametrize(
    ("policy", "read", "trained"),
    [
        (oracle.IdPolicy("zero"), [3, -1, -1, -1], [3, -1, -1, -1]),
        (oracle.IdPolicy("clip"), [3, 7, 7, 0], [3, 7, -1, -1]),
        (oracle.IdPolicy("zero", padding_id=3), [-1, -1, -1, -1], [-1, -1, -1, -1]),
        (oracle.IdPolicy("clip", padding_id=7), [3, -1, 7, 0], [3, -1, -1, -1]),
        (oracle.IdPolicy("clip", padding_id=-1), [3, -1, 7, 0], [3, -1, -1, -1]),
    ],
)
def test_what_ids_stand_for(policy: oracle.IdPolicy, read: list[int], trained: list[int]) -> None:
    resolved = oracle.resolve(np.array([3, -1, 9, -20]), 8, policy)
    assert (resolved.read.tolist(), resolved.trained.tolist()) == (read, trained)


def test_raise_names_the_id_and_its_position() -> None:
    with pytest.raises(ValueError, match="id 9 at position 1"):
        oracle.lookup(ROWS, np.array([3, 9]), oracle.IdPolicy("raise"))


def test_lookup_reads_rows_or_zeros() -> None:
    assert oracle.lookup(ROWS, np.array([5, 8, 0]))[:, 0].tolist() == [5, 0, 0]


def test_compress_leaves_the_largest_out() -> None:
    found = oracle.compress(np.array([5, 2, 5, 9, 7]), 8, 2)
    assert found.unique_tokens.tolist() == [2, 5]
    assert found.segment_ids.tolist() == [1, 0, 1, -1, -1]
    assert found.dropped == 1


def test_adagrad_by_hand() -> None:
    # Sums [4, 0, 0, 0]: accumulator 16 / 4 = 4, step -1 / 2.
    rule = oracle.Adagrad(learning_rate=1, eps=1e-30)
    table = np.zeros((8, 4), np.float32)
    grads = [[1, 0, 0, 0], [3, 0, 0, 0]]
    table, state, result = _step(rule, table, oracle.init(rule, 8), [3, 3], grads)
    assert table[3].tolist() == [-2, 0, 0, 0]
    assert state.accumulator.tolist() == [0, 0, 0, 4, 0, 0, 0, 0]
    assert (result.norm, result.valid, result.dropped, state.clock) == (4, True, 0, 1)


def test_lazy_decay_by_hand() -> None:
    # Touched at clocks 0 and 3: 16 * 2^-3 + 16 = 18.
    rule = oracle.Adagrad(learning_rate=1, eps=1e-30, half_life_steps=1, lazy=True)
    table, state = np.zeros((8, 4), np.float32), oracle.init(rule, 8)
    for row in (3, 1, 1, 3):
        table, state, _ = _step(rule, table, state, [row], [[4] * 4])
    assert state.accumulator[3] == 18
    assert state.last_step is not None
    assert state.last_step.tolist() == [0, 2, 0, 3, 0, 0, 0, 0]


def test_weight_decay_of_a_bfloat16_row_by_hand() -> None:
    # bf(exp(-1)) = 0.3671875, and a step of -1: bf(-0.6328125) is exact.
    rule = oracle.Adagrad(learning_rate=1, eps=1e-30, weight_decay=1)
    table = np.ones((2, 4), BFLOAT16)
    table, _, _ = _step(rule, table, oracle.init(rule, 2), [1], [[1] * 4])
    assert table.astype(np.float32).tolist() == [[1] * 4, [-0.6328125] * 4]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_gradient_changes_nothing(bad: float) -> None:
    rule = oracle.Adagrad(learning_rate=1)
    state = oracle.init(rule, 8)
    table, after, result = _step(rule, ROWS, state, [3, 5], [[1] * 4, [0, 0, 0, bad]])
    assert not result.valid
    assert table is ROWS
    assert after is state


def test_sums_in_float32_lose_what_float64_keeps() -> None:
    grads = np.array([[2**24], [1], [1]], np.float32)
    segments = np.zeros(3, np.int32)
    assert oracle.segment_sums(grads, segments, 1).item() == 2**24
    assert oracle.segment_sums(grads, segments, 1, np.float64).item() == 2**24 + 2


@pytest.mark.parametrize(("staleness", "read"), [(0, [0, -1, -2, -3]), (1, [0, 0, -1, -2])])
def test_staleness_is_by_how_much_a_lookup_lags(staleness: int, read: list[int]) -> None:
    # Learning rate and gradient keep every step at -1: accumulators are emptied by the half life.
    rule = oracle.Adagrad(learning_rate=1, eps=1e-30, half_life_steps=1e-3)
    table = np.zeros((8, 4), np.float32)
    seen = []

    def model(k: int, embeddings: np.ndarray, carry: int) -> oracle.Gradients:
        seen.append(embeddings[0, 0].item())
        return oracle.Gradients(np.ones_like(embeddings), carry + k)

    end = oracle.train(
        rule, table, oracle.init(rule, 8), [np.array([3, 3])] * 4, model, 0, staleness=staleness
    )
    assert seen == read
    assert (end.table[3, 0], end.carry, end.state.clock) == (-4, 6, 4)


def test_ulps_count_neighbours() -> None:
    one = np.float32(1)
    above = np.nextafter(one, np.float32(2))
    assert_ulps(above, one, np.float32, 1)
    with pytest.raises(AssertionError, match="more than 0 ulps"):
        assert_ulps(above, one, np.float32, 0)
    tiny = np.array([np.float32(1e-45), np.inf, np.nan, 0.0], np.float32)
    other = np.array([np.float32(-1e-45), 3.4028235e38, np.nan, -0.0], np.float32)
    assert ulps_between(tiny, other).tolist() == [2, 1, 0, 0]
    assert ulps_between(np.float32(np.nan), one) == np.iinfo(np.int64).max
    assert_ulps(np.array([1.0078125], BFLOAT16), [1.0], BFLOAT16, 1)


def test_same_bits_tell_zeros_apart() -> None:
    with pytest.raises(AssertionError, match="bits differ in 1 of 2"):
        assert_same_bits(np.array([1, 0.0], np.float32), np.array([1, -0.0], np.float32))
