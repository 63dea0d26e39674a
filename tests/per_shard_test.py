"""The per-shard functions in a `shard_map` of the caller's own: same bits, same refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits_on_every_device

BFLOAT16 = ml_dtypes.bfloat16
ORACLE_RULE = oracle.Adagrad(learning_rate=0.5, eps=1e-30, lazy=True)
RULE = xrex.RowwiseAdagrad(**vars(ORACLE_RULE))


def step(
    handle: xrex.AsyncEmbContextHandle, ids: Any, scale: Any, table: Any, state: Any
) -> tuple[Any, ...]:
    """A step of a model whose gradients are a scale times the sign of what it looked up."""
    pin = xrex.lookup_start_per_shard(handle, ids, table)
    tokens = xrex.compress_token_ids_per_shard(handle, ids, table.shape[0])
    rows = xrex.lookup_done_per_shard(handle, pin)
    grads = jnp.sign(rows) * scale
    update = xrex.GradientUpdate(tokens.unique_tokens, grads, tokens.segment_ids)
    table, state, update_pin = xrex.update_start_per_shard(
        handle, RULE, update, table, state, gate=rows
    )
    return rows, table, state, xrex.update_done(handle, update_pin)


def sharded(handle: xrex.AsyncEmbContextHandle) -> Any:
    """The caller's own shard_map."""
    ids, rows = P(handle.data_axis), P(handle.data_axis, None)
    table = P(None, handle.table_axis)
    return jax.jit(
        jax.shard_map(
            lambda *arguments: step(handle, *arguments),
            mesh=handle.mesh,
            in_specs=(ids, rows, table, P()),
            out_specs=(rows, table, P(), P()),
            check_vma=False,
        )
    )


@pytest.mark.parametrize("case", layouts.FEW_LAYOUTS, ids=str)
def test_a_step_of_ones_own(case: layouts.LayoutCase) -> None:
    handle, ids = case.handle(), layouts.random_ids(1)
    table = np.where(layouts.random_table(2, BFLOAT16) < 0, -3, 5).astype(BFLOAT16)
    scale = np.random.default_rng(3).integers(1, 5, (layouts.TOKENS, 1)).astype(BFLOAT16)
    arguments = (
        layouts.put(handle, ids, handle.data_axis),
        layouts.put(handle, scale, handle.data_axis, None),
        layouts.put_table(handle, table),
        layouts.put(handle, RULE.init(layouts.VOCAB)),
    )
    rows, new_table, new_state, result = sharded(handle)(*arguments)

    expected_rows = oracle.lookup(table, ids)
    grads = (np.sign(expected_rows.astype(np.float32)) * scale.astype(np.float32)).astype(BFLOAT16)
    tokens = oracle.compress(ids, layouts.VOCAB, handle.num_unique)
    expected_table, expected_state, expected = oracle.update(
        ORACLE_RULE,
        table,
        oracle.init(ORACLE_RULE, layouts.VOCAB),
        tokens.unique_tokens,
        grads,
        tokens.segment_ids,
    )
    assert_same_bits_on_every_device(rows, expected_rows)
    assert_same_bits_on_every_device(new_table, expected_table)
    for name in expected_state._fields:
        assert_same_bits_on_every_device(getattr(new_state, name), getattr(expected_state, name))
    assert (bool(result.valid), int(result.dropped)) == (True, expected.dropped)


def test_raise_is_checked_per_shard_too() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=4, out_of_range="raise")

    def look(ids: Any, table: Any) -> Any:
        pin = xrex.lookup_start_per_shard(handle, ids, table)
        return xrex.lookup_done_per_shard(handle, pin)

    def compress(ids: Any, table: Any) -> Any:
        return xrex.compress_token_ids_per_shard(handle, ids, table.shape[0]).segment_ids

    for body, out in ((look, P("x", None)), (compress, P("x"))):
        mapped = jax.shard_map(
            body,
            mesh=handle.mesh,
            in_specs=(P("x"), P(None, "x")),
            out_specs=out,
            check_vma=False,
        )
        error, _ = jax.jit(checkify.checkify(mapped))(jnp.array([0, 1, 2, 9]), jnp.ones((8, 2)))
        with pytest.raises(checkify.JaxRuntimeError, match="id 9 at position 3 is outside"):
            error.throw()


def _arguments(handle: xrex.AsyncEmbContextHandle) -> dict[str, Any]:
    """One shard's, of a communicator of one: what shard_map would hand over."""
    return {
        "ids": jnp.zeros((handle.tokens_per_rank,), jnp.int32),
        "table": jnp.ones((8, handle.shard_width)),
        "state": RULE.init(8),
        "update": xrex.GradientUpdate(
            unique_tokens=jnp.arange(handle.num_unique),
            grads=jnp.ones((handle.tokens_per_rank, handle.emb_width)),
            segment_ids=jnp.zeros((handle.tokens_per_rank,), jnp.int32),
        ),
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": jnp.zeros((8,), jnp.int32)}, ValueError, r"token_ids has shape \(8,\).*\(4,\)"),
        ({"ids": jnp.zeros((4,))}, TypeError, "token_ids must be integers, not float32"),
        ({"table": jnp.ones((8, 4))}, ValueError, r"table has shape \(8, 4\).*\(vocab, 2\)"),
        ({"table": jnp.ones((8, 2), jnp.float16)}, TypeError, "bfloat16 or float32"),
        ({"state": RULE.init(7)}, ValueError, r"state\.accumulator has shape \(7,\)"),
        ({"grads": jnp.ones((4, 2))}, ValueError, r"grads has shape \(4, 2\).*\(4, 4\)"),
        ({"grads": jnp.ones((4, 4), jnp.int32)}, TypeError, "grads must be bfloat16 or float32"),
        ({"segment_ids": jnp.zeros((8,), jnp.int32)}, ValueError, "segment_ids has shape"),
        ({"segment_ids": jnp.zeros((4,))}, TypeError, "segment_ids must be integers"),
        ({"unique_tokens": jnp.zeros((1,), jnp.int32)}, ValueError, "unique_tokens has shape"),
        ({"pending": jnp.ones((1,), bool)}, ValueError, "pending has shape"),
        ({"pending": jnp.float32(1)}, TypeError, "pending must be a bool"),
    ],
)
def test_what_the_per_shard_functions_refuse(changes: Any, error: Any, message: str) -> None:
    handle = layouts.line(2, tokens_per_batch=8, emb_width=4, num_unique=3)
    arguments = _arguments(handle)
    of_update = {key: value for key, value in changes.items() if key not in arguments}
    arguments |= {key: value for key, value in changes.items() if key in arguments}
    update = arguments["update"]._replace(**of_update)

    def body() -> None:
        ids, table = arguments["ids"], arguments["table"]
        xrex.lookup_start_per_shard(handle, ids, table)
        xrex.update_start_per_shard(handle, RULE, update, table, arguments["state"])

    with pytest.raises(error, match=message):
        # Only traced: outside of jit, shard_map would compile operation by operation.
        jax.eval_shape(
            jax.shard_map(body, mesh=handle.mesh, in_specs=(), out_specs=P(), check_vma=False)
        )
