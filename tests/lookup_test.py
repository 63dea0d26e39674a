"""Lookups on every layout, bit for bit, and what they refuse."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xrex
from tests import layouts, oracle
from tests.assertions import assert_same_bits, assert_same_bits_on_every_device

BFLOAT16 = ml_dtypes.bfloat16


def lookup(handle: xrex.AsyncEmbContextHandle, ids: Any, table: Any, gate: Any = None) -> jax.Array:
    return xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table, gate=gate))


@pytest.mark.parametrize("case", layouts.LAYOUTS, ids=str)
def test_rows_arrive_bit_for_bit_on_every_device(case: layouts.LayoutCase) -> None:
    handle = case.handle()
    for dtype in (np.float32, BFLOAT16):
        table, ids = layouts.random_bits(1, dtype), layouts.random_ids(2)
        rows = lookup(handle, ids, layouts.put_table(handle, table))
        expected = oracle.lookup(table, ids)
        assert_same_bits_on_every_device(rows, expected, f"{case} {np.dtype(dtype)}")
        wanted = NamedSharding(handle.mesh, P(handle.data_axis, None))
        assert rows.sharding.is_equivalent_to(wanted, 2)


@pytest.mark.parametrize("case", layouts.FEW_LAYOUTS, ids=str)
def test_the_same_under_jit(case: layouts.LayoutCase) -> None:
    handle = case.handle()
    table, ids = layouts.random_bits(3, BFLOAT16), layouts.random_ids(4)
    rows = layouts.jitted(lookup, handle)(
        layouts.put(handle, ids, handle.data_axis), layouts.put_table(handle, table)
    )
    assert_same_bits_on_every_device(rows, oracle.lookup(table, ids), str(case))


@pytest.mark.parametrize("table_axis", [("explicit", "auto"), ("auto", "explicit")])
def test_axis_types_may_be_mixed(table_axis: tuple[str, ...]) -> None:
    """With Explicit axes first nothing is moved but ids and rows; otherwise the table is, too."""
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("auto", "explicit"), axis_types=types)
    sizes = {"tokens_per_batch": 16, "emb_width": 24, "num_unique": 16, "num_devices_per_node": 8}
    handle = xrex.make_context_handle(mesh, table_axis, data_axis=table_axis, **sizes)
    table, ids = layouts.random_table(1, BFLOAT16), layouts.random_ids(2, 16)
    arguments = layouts.put(handle, ids, handle.data_axis), layouts.put_table(handle, table)
    program = jax.jit(functools.partial(lookup, handle)).lower(*arguments).compile()
    assert_same_bits_on_every_device(program(*arguments), oracle.lookup(table, ids))
    sent = re.findall(r" (all-gather|all-to-all|collective-permute)\(", program.as_text())
    moves_rows_and_ids_alone = sorted(sent) == ["all-gather", "all-to-all"]
    assert moves_rows_and_ids_alone == (table_axis == ("explicit", "auto")), sent


@pytest.mark.parametrize("case", layouts.FEW_LAYOUTS, ids=str)
def test_arrays_may_come_from_anywhere(case: layouts.LayoutCase) -> None:
    """Host arrays and arrays with another sharding are placed as the layout wants them."""
    handle = case.handle()
    table, ids = layouts.random_bits(3, np.float32), layouts.random_ids(4)
    expected = oracle.lookup(table, ids)
    replicated = layouts.put(handle, ids), layouts.put(handle, table)
    for placed in ((ids, jnp.asarray(table)), replicated):
        assert_same_bits_on_every_device(lookup(handle, *placed), expected)


@pytest.mark.parametrize("padding_id", [None, 31, -2])
@pytest.mark.parametrize("out_of_range", ["zero", "clip"])
def test_ids_outside_of_the_table(out_of_range: oracle.OutOfRange, padding_id: int | None) -> None:
    case = layouts.FEW_LAYOUTS[0]
    handle = case.handle(out_of_range=out_of_range, padding_id=padding_id)
    table, ids = layouts.random_bits(5, np.float32), layouts.random_ids(6)
    ids[:8] = [-32, -33, -1, 32, 31, 3, -2, 40]
    rows = lookup(handle, ids, layouts.put_table(handle, table))
    assert_same_bits(rows, oracle.lookup(table, ids, oracle.IdPolicy(out_of_range, padding_id)))


def test_raise_names_the_first_bad_id() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=4, out_of_range="raise")
    table = layouts.put_table(handle, np.ones((8, 2), np.float32))
    message = "id 8 at position 1 is outside the table of 8 rows"
    with pytest.raises(ValueError, match=message):
        lookup(handle, np.array([7, 8, -1, 0]), table)
    with pytest.raises(ValueError, match=message):
        lookup(handle, layouts.put(handle, np.array([7, 8, -1, 0], np.int32), "x"), table)
    assert_same_bits(lookup(handle, [7, 0, 3, 3], table), np.ones((4, 2), np.float32))


def test_raise_under_jit_is_checkify() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=4, out_of_range="raise")
    table = layouts.put_table(handle, np.ones((8, 2), np.float32))
    checked = jax.jit(checkify.checkify(lambda ids: lookup(handle, ids, table)))
    error, rows = checked(jnp.array([7, 0, 3, 3]))
    error.throw()
    assert_same_bits(rows, np.ones((4, 2), np.float32))
    error, _ = checked(jnp.array([7, 0, -9, 8]))
    with pytest.raises(checkify.JaxRuntimeError, match="id -9 at position 2 is outside the table"):
        error.throw()


def test_raise_spares_padding() -> None:
    handle = layouts.line(
        2, tokens_per_batch=2, emb_width=2, num_unique=2, out_of_range="raise", padding_id=-1
    )
    table = layouts.put_table(handle, np.ones((8, 2), np.float32))
    assert np.asarray(lookup(handle, [-1, 7], table)).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(("tokens", "width", "vocab"), [(4, 4, 1), (4, 8, 5), (8, 4, 3)])
def test_smallest_shards(tokens: int, width: int, vocab: int) -> None:
    """One token a rank, one column a rank, one row."""
    handle = layouts.line(4, tokens_per_batch=tokens, emb_width=width, num_unique=1)
    table = layouts.random_bits(7, np.float32, vocab, width)
    ids = np.arange(tokens, dtype=np.int32) - 1
    rows = lookup(handle, ids, layouts.put_table(handle, table))
    assert_same_bits(rows, oracle.lookup(table, ids))


def test_a_gate_comes_before_the_exchange_and_changes_no_value() -> None:
    handle = layouts.FEW_LAYOUTS[0].handle()
    table, ids = layouts.random_bits(8, np.float32), layouts.random_ids(9)
    gate = jnp.full((5,), jnp.nan)

    def text(gate: jax.Array | None) -> str:
        lowered = jax.jit(lambda *a: lookup(handle, ids, *a)).lower(jnp.asarray(table), gate)
        return lowered.as_text()

    assert "optimization_barrier" not in text(None)
    gated = text(gate)
    barrier = gated.index("optimization_barrier")
    assert "tensor<5xf32>" in gated[barrier : gated.index("\n", barrier)]
    assert barrier < gated.index("stablehlo.all_to_all")
    assert_same_bits(lookup(handle, ids, table, gate), oracle.lookup(table, ids))


@pytest.mark.parametrize(
    "gate", [np.array(True), np.zeros((0,), np.int8), np.full((48, 2), -1), np.ones(8, BFLOAT16)]
)
def test_a_gate_may_be_any_array(gate: np.ndarray) -> None:
    for case in (layouts.FEW_LAYOUTS[-1], layouts.LAYOUTS[0]):
        handle, table, ids = case.handle(), layouts.random_bits(8, BFLOAT16), layouts.random_ids(9)
        rows = layouts.jitted(lookup, handle)(ids, table, gate)
        assert_same_bits(rows, oracle.lookup(table, ids))


def test_a_gate_has_no_gradient() -> None:
    handle, ids = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=4), np.arange(4)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(lookup(handle, ids, jnp.ones((8, 2)), jnp.exp(x)) * x)

    assert jax.grad(loss)(jnp.float32(3)) == 8


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_host_ids_of_any_integer_type(dtype: Any) -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=4)
    table = layouts.random_table(1, np.float32, 8, 2)
    ids = np.array([0, 7, 3, 100])
    rows = lookup(handle, ids.astype(dtype), layouts.put_table(handle, table))
    assert_same_bits(rows, oracle.lookup(table, ids))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 3])
def test_ids_that_do_not_fit_are_named(x64: bool, value: int) -> None:
    handle = layouts.line(2, tokens_per_batch=2, emb_width=2, num_unique=2)
    table = layouts.put_table(handle, np.ones((8, 2), np.float32))
    with jax.enable_x64(x64):
        with pytest.raises(ValueError, match=f"id {value} at position 1 does not fit in int32"):
            lookup(handle, np.array([0, value]), table)
        with pytest.raises(ValueError, match=f"id {value} at position 1"):
            xrex.compress_token_ids(handle, [0, value], 8)


def test_wide_device_ids_are_read_or_refused() -> None:
    handle = layouts.line(2, tokens_per_batch=2, emb_width=2, num_unique=2)
    table = layouts.put_table(handle, layouts.random_table(1, np.float32, 8, 2))
    with jax.enable_x64(True):
        ids = jnp.array([2, 2**32 + 3])
        assert ids.dtype == jnp.int64
        with pytest.raises(ValueError, match=f"id {2**32 + 3} at position 1"):
            lookup(handle, ids, table)
        with pytest.raises(TypeError, match="int64 cannot be checked in a traced function") as e:
            jax.jit(lambda ids: lookup(handle, ids, table))(ids)
        assert "Cast them to int32" in e.value.__notes__[0]
        assert_same_bits(lookup(handle, ids - jnp.array([0, 2**32]), table), table[2:4])


@pytest.mark.parametrize(
    ("ids", "table", "error", "message"),
    [
        ([0.0, 1.0], np.ones((8, 2), np.float32), TypeError, "must be integers, not float"),
        ([0, 2**70], np.ones((8, 2), np.float32), TypeError, "must be integers, not object"),
        ([True, False], np.ones((8, 2), np.float32), TypeError, "must be integers, not bool"),
        ([0], np.ones((8, 2), np.float32), ValueError, r"token_ids has shape \(1,\).*\(2,\)"),
        ([[0, 1]], np.ones((8, 2), np.float32), ValueError, "token_ids has shape"),
        ([0, 1], np.ones((8, 4), np.float32), ValueError, r"must have \(vocab, 2\)"),
        ([0, 1], np.ones((8,), np.float32), ValueError, "table has shape"),
        ([0, 1], np.ones((8, 2), np.float16), TypeError, "bfloat16 or float32, not float16"),
        ([0, 1], np.ones((0, 2), np.float32), ValueError, "vocab=0"),
    ],
)
def test_what_a_lookup_refuses(ids: Any, table: Any, error: Any, message: str) -> None:
    handle = layouts.line(2, tokens_per_batch=2, emb_width=2, num_unique=2)
    with pytest.raises(error, match=message):
        lookup(handle, np.array(ids), table)


def test_a_pin_of_another_layout_is_refused() -> None:
    handle = layouts.line(2, tokens_per_batch=4, emb_width=2, num_unique=2)
    other = layouts.line(2, tokens_per_batch=2, emb_width=2, num_unique=2)
    pin = xrex.lookup_start(handle, [0, 1, 2, 3], jnp.ones((8, 2)))
    with pytest.raises(ValueError, match=r"pin\.blocks has shape"):
        xrex.lookup_done(other, pin)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_the_rows_have_gradients_and_the_table_has_none(dtype: Any) -> None:
    handle = layouts.FEW_LAYOUTS[0].handle()
    table, ids = layouts.random_table(1, dtype), layouts.random_ids(2)

    def loss(table: jax.Array, offsets: jax.Array) -> jax.Array:
        return jnp.sum(lookup(handle, ids, table) + offsets)

    offsets = jnp.zeros((layouts.TOKENS, layouts.WIDTH), dtype)
    assert_same_bits(jax.grad(loss, argnums=1)(table, offsets), np.ones_like(offsets))
    with pytest.raises(TypeError, match="cannot be differentiated with respect to the table") as e:
        jax.grad(loss)(table, offsets)
    assert "lookup_done" in e.value.__notes__[0]
