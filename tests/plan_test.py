"""The plan's bytes against compiled programs and real arrays, its wire against traced collectives.

What is compared: the arguments of the pipeline's step, which are the plan's table, state and pins
to the byte; the temporary bytes of the table's own update, compiled for simulated CPU devices (the
dense model's are its own affair, and XLA's GPU backend holds other buffers); and the sum of all
four for a whole step whose table is as large, beside its batch, as tables are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xrex
from tests import layouts
from tests.planned_models import per_rank_bytes, sent, traced_collectives
from xrex.layout.plan import Plan, plan_layout
from xrex.training import step as train_step
from xrex.training.state import detach_bags

pytestmark = pytest.mark.usefixtures("users_buffers")

DTYPES = (jnp.bfloat16, jnp.float32)
WITHIN = 0.1
# Each layout, each dtype and both kinds of state, but not all products of them.
FEW_OF_EACH = tuple(
    zip(
        layouts.FEW_LAYOUTS,
        (jnp.float32, jnp.bfloat16, jnp.float32),
        (False, True, True),
        strict=True,
    )
)


def abstract(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def plan(mesh: Any = None, axes: Any = "x", *, data: Any = None, **changes: Any) -> Plan:
    sizes = {"tokens_per_batch": 65536, "emb_width": 512, "num_unique": 65536}
    planned = {"vocab": 10**8, "dtype": jnp.bfloat16, "rule": None, "reserved_bytes": 0}
    planned |= {name: changes.pop(name) for name in planned.keys() & changes.keys()}
    handle = xrex.make_context_handle(
        abstract(x=16) if mesh is None else mesh,
        axes,
        data_axis=axes if data is None else data,
        **(sizes | {"num_devices_per_node": 8} | changes),
    )
    return plan_layout(handle, planned["vocab"], **{k: planned[k] for k in planned if k != "vocab"})


def bytes_of(planned: Plan, group: str) -> int:
    return sum(array.bytes for array in planned.memory.arrays if array.group == group)


# Memory


def loss_fn(params: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((rows.astype(jnp.float32) @ params - labels) ** 2)


def running_pipeline(
    handle: xrex.AsyncEmbContextHandle, rule: Any, vocab: int, dtype: Any
) -> tuple[xrex.Pipeline, xrex.PipelineState, xrex.Batch]:
    pipeline = xrex.make_pipeline(handle, rule, loss_fn, optax.sgd(0.1), vocab=vocab, staleness=1)
    tokens = handle.tokens_per_batch
    batch = xrex.Batch(np.arange(tokens) % vocab, np.zeros(tokens, np.float32))
    table = np.zeros((vocab, handle.emb_width), dtype)
    state = pipeline.init(table, jnp.zeros(handle.emb_width))
    return pipeline, pipeline.start(state, batch), batch


@pytest.mark.parametrize(("case", "dtype", "lazy"), FEW_OF_EACH, ids=str)
def test_table_state_and_pins_are_the_pipelines(
    case: layouts.LayoutCase, dtype: Any, lazy: bool
) -> None:
    handle, vocab = case.handle(), layouts.VOCAB
    rule = xrex.RowwiseAdagrad(learning_rate=1.0, lazy=lazy)
    planned = plan_layout(handle, vocab, dtype, rule)
    _, state, _ = running_pipeline(handle, rule, vocab, dtype)
    assert planned.memory.table == bytes_of(planned, "table") == per_rank_bytes(state.table)
    assert planned.memory.state == bytes_of(planned, "state") == per_rank_bytes(state.rule_state)
    pins = (state.current_lookup, state.previous_update)
    assert planned.memory.pins == bytes_of(planned, "pins") == per_rank_bytes(pins)
    shapes = [array.shape for array in planned.memory.arrays if array.group == "pins"]
    held = [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(pins)]
    assert sorted(shapes) == sorted(held)


def shaped(handle: xrex.AsyncEmbContextHandle, shape: Any, dtype: Any, *spec: Any) -> Any:
    sharding = NamedSharding(handle.mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def update_arguments(handle: xrex.AsyncEmbContextHandle, vocab: int, dtype: Any) -> tuple[Any, ...]:
    """A rule, and the shapes that `update_start` takes."""
    rule = xrex.RowwiseAdagrad(learning_rate=1.0)
    tokens, data = handle.tokens_per_batch, handle.data_axis
    update = xrex.GradientUpdate(
        unique_tokens=shaped(handle, (handle.num_unique,), jnp.int32),
        grads=shaped(handle, (tokens, handle.emb_width), dtype, data, None),
        segment_ids=shaped(handle, (tokens,), jnp.int32, data),
        pending=shaped(handle, (), jnp.bool_),
    )
    state = jax.tree.map(
        lambda leaf: shaped(handle, leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: rule.init(vocab)),
    )
    table = shaped(handle, (vocab, handle.emb_width), dtype, None, handle.table_axis)
    return rule, update, table, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "copies", "tokens", "width", "num_unique"),
    [(2, 1, 512, 64, 512), (4, 2, 2048, 64, 2048), (8, 1, 4096, 64, 1024), (8, 1, 8192, 256, 8192)],
)
def test_temporary_bytes_are_those_of_the_compiled_update(
    ranks: int, copies: int, tokens: int, width: int, num_unique: int, dtype: Any
) -> None:
    sizes = {"tokens_per_batch": tokens, "emb_width": width, "num_unique": num_unique}
    handle = xrex.make_context_handle(
        layouts.mesh({"r": copies, "x": ranks}), "x", data_axis="x", num_devices_per_node=8, **sizes
    )
    vocab = 20_000
    planned = plan_layout(handle, vocab, dtype).memory
    assert planned.temporary == sum(a.bytes for a in planned.arrays if a.group == "temporary")
    rule, *arguments = update_arguments(handle, vocab, dtype)
    update = jax.jit(
        lambda *arguments: xrex.update_start(handle, rule, *arguments), donate_argnums=(1, 2)
    )
    compiled = update.lower(*arguments).compile().memory_analysis()
    assert planned.temporary == pytest.approx(compiled.temp_size_in_bytes, rel=WITHIN)
    assert compiled.alias_size_in_bytes >= planned.table + planned.state
    # A lookup holds less.
    ids = shaped(handle, (tokens,), jnp.int32, "x")
    lookup = jax.jit(lambda ids, table: xrex.lookup_start(handle, ids, table))
    compiled = lookup.lower(ids, arguments[1]).compile().memory_analysis()
    assert compiled.temp_size_in_bytes <= planned.temporary


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_all_is_that_of_the_compiled_step(dtype: Any) -> None:
    handle = layouts.line(4, tokens_per_batch=1024, emb_width=256, num_unique=1024)
    rule, vocab = xrex.RowwiseAdagrad(learning_rate=1.0), 50_000
    pipeline, state, batch = running_pipeline(handle, rule, vocab, dtype)
    batch = jax.tree.map(lambda x: layouts.put(handle, x, handle.data_axis), batch)
    batch = batch._replace(token_ids=batch.token_ids.astype(jnp.int32))
    compiled = pipeline.lower_step(state, batch).compile().memory_analysis()
    dense = (state.dense_params, state.optimizer_state, state.step, batch)
    planned = plan_layout(handle, vocab, dtype, rule).memory
    known = planned.table + planned.state + planned.pins
    assert compiled.argument_size_in_bytes == known + per_rank_bytes(dense)
    total = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    assert planned.total == pytest.approx(total, rel=WITHIN)


def test_the_largest_vocabulary_is_the_largest() -> None:
    reserved = 10**9
    for capacity in plan(vocab=None, reserved_bytes=reserved).memory.largest_vocab:
        assert 0 < capacity.vocab < 2**31 - 1
        fits, too_large = (
            plan(vocab=capacity.vocab + more, reserved_bytes=reserved) for more in (0, 1)
        )
        assert fits.memory.total + reserved <= capacity.device_bytes
        assert too_large.memory.total + reserved > capacity.device_bytes
        text = f"do not fit into {capacity.device_bytes // 10**9} GB"
        assert text in " ".join(too_large.warnings)
        assert text not in " ".join(fits.warnings)


def test_a_vocabulary_never_passes_what_ids_can_name() -> None:
    narrow = plan(abstract(x=8), emb_width=8, tokens_per_batch=8, num_unique=8, vocab=None)
    assert narrow.memory.bytes_per_row == 2 + 4
    largest = [capacity.vocab for capacity in narrow.memory.largest_vocab]
    assert largest == [2**31 - 1] * 2


def test_what_is_reserved_may_leave_no_room() -> None:
    memory = plan(vocab=None, reserved_bytes=100 * 10**9).memory
    assert [capacity.vocab > 0 for capacity in memory.largest_vocab] == [False, True]
    assert memory.table is memory.state is memory.total is None


# Wire


@pytest.mark.parametrize(("case", "dtype", "lazy"), FEW_OF_EACH, ids=str)
def test_the_wire_is_what_a_step_sends(case: layouts.LayoutCase, dtype: Any, lazy: bool) -> None:
    handle, vocab = case.handle(), layouts.VOCAB
    rule = xrex.RowwiseAdagrad(learning_rate=1.0, lazy=lazy)
    pipeline, state, batch = running_pipeline(handle, rule, vocab, dtype)
    state = state._replace(current_batch=None)
    ids = batch.token_ids.astype(np.int32)
    step = jax.make_jaxpr(lambda *arguments: train_step.step_ahead(pipeline.config, *arguments))
    arguments = (*detach_bags(state), layouts.put(handle, batch.inputs), ids)
    traced = traced_collectives(step(*arguments).jaxpr)
    wire = plan_layout(handle, vocab, dtype, rule).wire
    assert sorted((part.operation, part.bytes_sent) for part in wire) == sorted(
        (operation, sent(operation, size, handle.group_size)) for operation, size in traced
    )


def test_the_wire_of_an_example() -> None:
    """G = 16, T = 4096, E = 512, s = 2, U = 65536, by the formulas of the design."""
    wire = {part.name: part for part in plan().wire}
    assert {name: part.bytes_sent for name, part in wire.items()} == {
        "token ids": 4 * 4096 * 15,
        "rows": 4096 * 512 * 2 * 15 // 16,
        "segment ids": 4 * 4096 * 15,
        "gradients": 4096 * 512 * 2 * 15 // 16,
        "square sums by row": 2 * 15 * 4 * 65536 // 16,
    }
    assert {name: part.message_bytes for name, part in wire.items()} == {
        "token ids": 16384,
        "rows": 262144,
        "segment ids": 16384,
        "gradients": 262144,
        "square sums by row": 16384,
    }
    assert [part.messages_per_peer for part in wire.values()] == [1, 1, 1, 1, 2]
    # Of the 15 peers of a rank, 8 are on the other node.
    assert wire["rows"].bytes_across_nodes == 4096 * 512 * 2 * 8 // 16


def test_the_vocabulary_changes_nothing_on_the_wire() -> None:
    assert plan(vocab=100).wire == plan(vocab=10**9).wire == plan(vocab=None).wire


def test_one_rank_sends_nothing() -> None:
    assert plan(abstract(x=1)).wire == ()
    assert plan(abstract(x=1)).nodes.pairs_across_nodes == 0


# Nodes


@pytest.mark.parametrize(
    ("mesh", "axes", "nodes", "ranks", "even", "across"),
    [
        (abstract(r=2, x=8), "x", (1, 1), (8, 8), True, 0.0),
        (abstract(x=8, r=2), "x", (2, 2), (4, 4), True, 4 / 7),
        (abstract(x=16), "x", (2, 2), (8, 8), True, 8 / 15),
        (abstract(r=4, x=4), ("x", "r"), (2, 2), (8, 8), True, 8 / 15),
        (abstract(x=12, y=1), ("x", "y"), (2, 2), (4, 8), False, 64 / 132),
        (abstract(r=4, x=6), "x", (1, 2), (2, 6), False, 32 / 120),
    ],
)
def test_nodes_of_eight(
    mesh: Any, axes: Any, nodes: Any, ranks: Any, even: bool, across: float
) -> None:
    planned = plan(mesh, axes, tokens_per_batch=9600, emb_width=480)
    assert planned.nodes.nodes_per_communicator == nodes
    assert planned.nodes.ranks_per_node == ranks
    assert planned.nodes.even == even
    assert planned.nodes.pairs_across_nodes == pytest.approx(across)
    assert any("spans nodes unevenly" in text for text in planned.warnings) == (not even)


def test_devices_of_a_mesh_are_told_by_their_ids() -> None:
    sizes = {"tokens_per_batch": 8, "emb_width": 8, "num_unique": 8, "num_devices_per_node": 2}
    devices = np.array(jax.devices())[[0, 2, 1, 3]]
    mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("r", "x"))
    handle = xrex.make_context_handle(mesh, "x", data_axis="x", **sizes)
    assert plan_layout(handle).nodes.nodes_per_communicator == (2, 2)


# Warnings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_unique": 65535}, "A batch may hold 65536 distinct ids, and num_unique=65535"),
        ({"num_unique": 99, "vocab": 100}, "A batch may hold 100 distinct ids, and num_unique=99"),
        ({"tokens_per_batch": 16 * 1023}, "(token ids 4092 bytes, segment ids 4092 bytes)"),
        ({"mesh": abstract(x=32), "emb_width": 32}, "state is larger than the table"),
        ({"mesh": abstract(x=8, r=2)}, "axes ('r',) shard neither columns nor tokens: 2 commun"),
        ({"mesh": abstract(x=10), "emb_width": 100, "tokens_per_batch": 65530}, "is not full"),
        ({"vocab": 2 * 10**9}, "do not fit into 80 GB"),
    ],
)
def test_warnings(changes: Any, text: str) -> None:
    assert text in "\n".join(plan(**changes).warnings)


@pytest.mark.parametrize("changes", [{}, {"num_unique": 20_000, "vocab": 20_000}, {"vocab": None}])
def test_a_sound_layout_has_no_warnings(changes: Any) -> None:
    assert plan(**changes).warnings == ()
