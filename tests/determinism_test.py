"""The same bits in every run: sums in a fixed order, whatever the devices' threads do.

Times are the benchmarks' (tools/): here only bits are compared, at sizes at which threads race.
"""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_same_bits_on_every_device

pytestmark = pytest.mark.usefixtures("optimized")

BFLOAT16 = ml_dtypes.bfloat16
RULE = xrex.RowwiseAdagrad(learning_rate=0.5, half_life_steps=3, weight_decay=0.01)


def train(handle: xrex.AsyncEmbContextHandle, ids: Any, grads: Any, table: Any, state: Any) -> Any:
    tokens = xrex.compress_token_ids(handle, ids, table.shape[0])
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    table, state, pin = xrex.update_start(handle, RULE, update, table, state)
    return table, state, xrex.update_done(handle, pin)


def inputs(
    seed: int, handle: xrex.AsyncEmbContextHandle, ids: np.ndarray, vocab: int, dtype: Any
) -> tuple[Any, ...]:
    """Random gradients, whose sums depend on the order, and a random table and state."""
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((handle.tokens_per_batch, handle.emb_width), np.float32)
    table = rng.standard_normal((vocab, handle.emb_width), np.float32).astype(dtype)
    state = RULE.init(vocab)._replace(accumulator=rng.random(vocab, np.float32))
    return (
        layouts.put(handle, ids.astype(np.int32), handle.data_axis),
        layouts.put(handle, grads.astype(dtype), handle.data_axis, None),
        layouts.put_table(handle, table),
        layouts.put(handle, state),
    )


def assert_reruns_agree(program: Any, arguments: Any, runs: int) -> Any:
    first = program(*arguments)
    for run in range(1, runs):
        again = program(*arguments)
        for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
            assert_same_bits_on_every_device(ours, np.asarray(theirs), f"run {run}")
    return first


def test_ten_runs_of_65536_tokens_on_16_rows() -> None:
    handle = layouts.line(8, tokens_per_batch=65536, emb_width=16, num_unique=16)
    ids = np.random.default_rng(0).integers(0, 16, 65536)
    program = layouts.jitted(train, handle)
    table, _, result = assert_reruns_agree(program, inputs(1, handle, ids, 16, BFLOAT16), 10)
    assert result.valid
    # A rounding that ate every gradient would be as reproducible.
    assert len(np.unique(np.asarray(table).view(np.int16))) > 100


def test_ids_all_distinct_and_all_equal() -> None:
    """One program for both: what differs is the data alone."""
    handle = layouts.line(8, tokens_per_batch=40960, emb_width=128, num_unique=40960)
    program = layouts.jitted(train, handle)
    for ids in (np.arange(40960), np.full(40960, 7)):
        arguments = inputs(2, handle, ids, 40960, BFLOAT16)
        table, _, _ = assert_reruns_agree(program, arguments, 3)
        changed = np.any(np.asarray(table) != np.asarray(arguments[2]), axis=1)
        assert set(np.flatnonzero(changed)) == set(ids.tolist())


@pytest.mark.parametrize("ranks", [1, 8])
def test_sums_are_in_the_order_of_the_tokens(ranks: int) -> None:
    """Not only repeatable: in float32 the same bits as adding one token after the other.

    So the number of ranks changes nothing either. Read from the row, which is -sum when the
    accumulator is emptied by its decay and the step is made 1 / root by hand.
    """
    handle = layouts.line(ranks, tokens_per_batch=4096, emb_width=8, num_unique=4)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 4, 4096)
    grads = rng.standard_normal((4096, 8), np.float32)
    sums = oracle.segment_sums(grads, ids, 4)
    assert not np.array_equal(sums, oracle.segment_sums(grads[::-1], ids[::-1], 4))
    tokens = xrex.compress_token_ids(handle, ids, 4)
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    # eps dwarfs the root: the step is -2^60 / 2^60, and the row -sum.
    rule = xrex.RowwiseAdagrad(learning_rate=2.0**60, eps=2.0**60)
    table = np.zeros((4, 8), np.float32)
    table, _, _ = xrex.update_start(handle, rule, update, table, rule.init(4))
    assert_same_bits(table, -sums)


def test_eager_calls_and_a_jitted_step_agree() -> None:
    """In bfloat16, where every product is rounded before it is added."""
    case = layouts.FEW_LAYOUTS[1]
    handle, ids = case.handle(), layouts.random_ids(4)
    arguments = inputs(5, handle, ids, layouts.VOCAB, BFLOAT16)
    jitted = layouts.jitted(train, handle)(*arguments)
    jax.tree.map(assert_same_bits, train(handle, *arguments), jitted)
