"""The distinct ids of a batch, against the oracle: order, capacity, and who is left out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_same_bits_on_every_device

FEW = layouts.FEW_LAYOUTS[0]


def _compare(actual: xrex.CompressedTokens, expected: oracle.Compressed, what: str = "") -> None:
    assert_same_bits_on_every_device(actual.unique_tokens, expected.unique_tokens, what)
    assert_same_bits_on_every_device(actual.segment_ids, expected.segment_ids, what)
    assert_same_bits_on_every_device(actual.dropped, np.int32(expected.dropped), what)


@pytest.mark.parametrize("case", layouts.LAYOUTS, ids=str)
def test_every_layout_finds_the_same_ids(case: layouts.LayoutCase) -> None:
    ids = layouts.random_ids(1)
    tokens = xrex.compress_token_ids(case.handle(), ids, layouts.VOCAB)
    _compare(tokens, oracle.compress(ids, layouts.VOCAB, layouts.VOCAB), str(case))


@pytest.mark.parametrize("num_unique", [1, 2, 10, 47, 48, 49, 1000])
def test_what_finds_no_room_is_counted(num_unique: int) -> None:
    ids = np.random.default_rng(2).permutation(layouts.TOKENS * 2)[: layouts.TOKENS]
    tokens = xrex.compress_token_ids(FEW.handle(num_unique=num_unique), ids, 1000)
    _compare(tokens, oracle.compress(ids, 1000, num_unique))
    assert int(tokens.dropped) == max(0, layouts.TOKENS - num_unique)


@pytest.mark.parametrize("padding_id", [None, 31, -2])
@pytest.mark.parametrize("out_of_range", ["zero", "clip", "raise"])
def test_policies(out_of_range: oracle.OutOfRange, padding_id: int | None) -> None:
    ids = layouts.random_ids(3)
    ids[:8] = [-32, -33, -1, 32, 31, 3, -2, 40]
    if out_of_range == "raise":
        ids = np.where(
            (ids >= 0) & (ids < layouts.VOCAB), ids, 3 if padding_id is None else padding_id
        )
    handle = FEW.handle(out_of_range=out_of_range, padding_id=padding_id, num_unique=20)
    tokens = xrex.compress_token_ids(handle, ids, layouts.VOCAB)
    policy = oracle.IdPolicy(out_of_range, padding_id)
    _compare(tokens, oracle.compress(ids, layouts.VOCAB, 20, policy))


@pytest.mark.parametrize(
    ("ids", "vocab"),
    [
        (np.full(layouts.TOKENS, 5), 8),
        (np.full(layouts.TOKENS, -1), 8),
        (np.arange(layouts.TOKENS), layouts.TOKENS),
        (np.zeros(layouts.TOKENS), 1),
        (np.full(layouts.TOKENS, 2**31 - 2), 2**31 - 1),
    ],
    ids=["all equal", "none inside", "all distinct", "one row", "the largest table"],
)
def test_extremes(ids: np.ndarray, vocab: int) -> None:
    tokens = xrex.compress_token_ids(FEW.handle(), ids.astype(np.int32), vocab)
    _compare(tokens, oracle.compress(ids.astype(np.int32), vocab, layouts.VOCAB))


def test_the_order_depends_on_the_ids_alone() -> None:
    ids, rng = layouts.random_ids(4), np.random.default_rng(5)
    first = xrex.compress_token_ids(FEW.handle(), ids, layouts.VOCAB)
    for _ in range(3):
        order = rng.permutation(layouts.TOKENS)
        tokens = xrex.compress_token_ids(FEW.handle(), ids[order], layouts.VOCAB)
        assert_same_bits(tokens.unique_tokens, first.unique_tokens)
        assert_same_bits(tokens.segment_ids, np.asarray(first.segment_ids)[order])


@pytest.mark.parametrize("case", layouts.FEW_LAYOUTS, ids=str)
def test_the_same_under_jit(case: layouts.LayoutCase) -> None:
    handle, ids = case.handle(), layouts.random_ids(6)
    compress = jax.jit(lambda ids: xrex.compress_token_ids(handle, ids, layouts.VOCAB))
    _compare(compress(ids), oracle.compress(ids, layouts.VOCAB, layouts.VOCAB), str(case))


def test_the_example_of_the_documentation() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=3)
    tokens = xrex.compress_token_ids(handle, [5, 2, 5, 9], vocab=8)
    assert tokens.unique_tokens.tolist() == [2, 5, 8]
    assert tokens.segment_ids.tolist() == [1, 0, 1, -1]
    assert int(tokens.dropped) == 0


def test_raise_names_the_first_bad_id() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=3, out_of_range="raise")
    with pytest.raises(ValueError, match="id 9 at position 2 is outside the table of 8 rows"):
        xrex.compress_token_ids(handle, [5, 2, 9, -1], 8)
    checked = jax.jit(checkify.checkify(lambda ids: xrex.compress_token_ids(handle, ids, 8)))
    error, _ = checked(jnp.array([5, 2, 9, -1]))
    with pytest.raises(checkify.JaxRuntimeError, match="id 9 at position 2"):
        error.throw()


@pytest.mark.parametrize("vocab", [0, -1, 2**31, 8.0, True, None])
def test_a_vocabulary_is_a_positive_int32(vocab: Any) -> None:
    with pytest.raises(ValueError, match="vocab="):
        xrex.compress_token_ids(FEW.handle(), layouts.random_ids(7), vocab)
