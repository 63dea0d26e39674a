"""The compiled update works in place: no second table, in the sizes that XLA itself reports."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrex
from tests import layouts

VOCAB, WIDTH, TOKENS = 100_000, 64, 256


def update(
    handle: xrex.AsyncEmbContextHandle, rule: Any, ids: Any, grads: Any, *donated: Any
) -> Any:
    table, state = donated
    tokens = xrex.compress_token_ids(handle, ids, VOCAB)
    gradients = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    table, state, pin = xrex.update_start(handle, rule, gradients, table, state)
    return table, state, xrex.update_done(handle, pin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["8", "4x2-copies-explicit"])
def test_the_update_is_in_place(name: str, dtype: str) -> None:
    (case,) = (case for case in layouts.LAYOUTS if case.name == name)
    handle = case.handle(tokens_per_batch=TOKENS, emb_width=WIDTH, num_unique=TOKENS)
    rule = xrex.RowwiseAdagrad(learning_rate=0.1, half_life_steps=9, weight_decay=0.1, lazy=True)

    table = layouts.put_table(handle, np.zeros((VOCAB, WIDTH), jnp.dtype(dtype)))
    state = layouts.put(handle, rule.init(VOCAB))
    ids = layouts.put(handle, np.arange(TOKENS, dtype=np.int32), handle.data_axis)
    grads = layouts.put(handle, np.ones((TOKENS, WIDTH), jnp.dtype(dtype)), handle.data_axis, None)
    program = jax.jit(update, static_argnums=(0,), donate_argnums=(4, 5))
    compiled = program.lower(handle, rule, ids, grads, table, state).compile()

    shard = table.addressable_shards[0].data.nbytes
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= shard + state_bytes
    assert memory.temp_size_in_bytes < shard

    before = [(leaf, leaf.unsafe_buffer_pointer()) for leaf in _first_shards((table, state))]
    after = compiled(rule, ids, grads, table, state)[:2]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((table, state)))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in _first_shards(after)]
    assert pointers == [pointer for _, pointer in before]


def test_an_eager_update_leaves_the_old_table_usable() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=4, num_unique=4)
    rule = xrex.RowwiseAdagrad(learning_rate=1.0)
    table = layouts.put_table(handle, np.zeros((8, 4), np.float32))
    gradients = xrex.GradientUpdate(np.arange(4), jnp.ones((4, 4)), np.arange(4))
    new, _, _ = xrex.update_start(handle, rule, gradients, table, rule.init(8))
    assert not table.is_deleted()
    assert np.asarray(new).any()
    assert not np.asarray(table).any()


def test_a_lookup_holds_no_second_table() -> None:
    handle = layouts.line(8, tokens_per_batch=TOKENS, emb_width=WIDTH, num_unique=TOKENS)

    def lookup(ids: jax.Array, table: jax.Array) -> jax.Array:
        return xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table))

    for dtype in (jnp.float32, jnp.bfloat16):
        table = layouts.put_table(handle, np.zeros((VOCAB, WIDTH), dtype))
        ids = layouts.put(handle, np.arange(TOKENS, dtype=np.int32), "x")
        memory = jax.jit(lookup).lower(ids, table).compile().memory_analysis()
        assert memory.temp_size_in_bytes < table.addressable_shards[0].data.nbytes / 4


def _first_shards(tree: Any) -> list[jax.Array]:
    return [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(tree)]
