"""Programs of xrex to compile for described GPUs: its kernels, and a whole training step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xrex
from pallas_kernels import api
from xrex.layout.layout import AnyMesh


class Program(NamedTuple):
    """A function and the shapes to compile it for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """Lowers the function for the devices that its arguments' shardings name."""
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.arguments)


def shapes(mesh: Any, tree: Any, *specs: Any) -> Any:
    """The shapes of `tree` (arrays or shapes), sharded over the mesh, all alike."""
    sharding = NamedSharding(mesh, PartitionSpec(*specs))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


@dataclass(frozen=True)
class KernelShape:
    """Sizes of a kernel's arguments, one shard's."""

    width: int
    dtype: str = "bfloat16"
    vocab: int = 10_000_000
    tokens: int = 1_048_576
    segments: int = 262_144


def kernel_programs(mesh: Mesh, shape: KernelShape) -> tuple[Program, ...]:
    """The three kernels, every device of the mesh with arguments of its own."""

    def local(*size: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype)

    def program(
        name: str, function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()
    ) -> Program:
        # Replicated by spec; no collective compares the copies.
        replicated = PartitionSpec()
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
        )
        return Program(f"{name} {shape.width} x {shape.dtype}", mapped, arguments, donated)

    table = shapes(mesh, local(shape.vocab, shape.width, dtype=shape.dtype))
    ids = shapes(mesh, local(shape.tokens))
    values = shapes(mesh, local(shape.tokens, shape.width, dtype=shape.dtype))
    unique = shapes(mesh, local(shape.segments))
    sums = shapes(mesh, local(shape.segments, shape.width, dtype=jnp.float32))
    steps = shapes(mesh, local(shape.segments, dtype=jnp.float32))

    def gather_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
        return api.gather_rows(table, ids, implementation="mosaic_gpu")

    def segment_sum(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return api.segment_sum(
            values, ids, shape.segments, dtype=shape.dtype, implementation="mosaic_gpu"
        )

    def update_rows(
        table: jax.Array, ids: jax.Array, sums: jax.Array, steps: jax.Array
    ) -> jax.Array:
        def descend(rows: Any, operands: Any, scalars: Any) -> tuple[jax.Array]:
            change = api.round_to(shape.dtype, scalars[0] * operands[0])
            return (api.round_to(shape.dtype, rows[0] - change),)

        (table,) = api.update_rows(
            (table,), ids, (sums,), (steps,), descend, implementation="mosaic_gpu"
        )
        return table

    return (
        program("gather_rows", gather_rows, table, ids),
        program("segment_sum", segment_sum, values, ids),
        program("update_rows", update_rows, table, unique, sums, steps, donated=(0,)),
    )


@dataclass(frozen=True)
class StepShape:
    """A training step's layout and sizes. The dense model is a stack of square layers."""

    layout: xrex.Layout
    vocab: int = 10_000_000
    dtype: str = "bfloat16"
    dense_layers: int = 3
    staleness: int = 1
    implementation: str = "auto"


def whole_mesh_layout(mesh: AnyMesh, **fields: Any) -> xrex.Layout:
    """A layout with table and tokens over all axes of the mesh.

    Args:
      mesh: the mesh.
      **fields: other fields of the layout. Default: 8,192 tokens per rank, 512 columns, room for
        every distinct id, nodes of 8.
    """
    tokens = fields.get("tokens_per_batch", 8192 * mesh.size)
    defaults = {
        "tokens_per_batch": tokens,
        "emb_width": 512,
        "num_unique": max(1, tokens),
        "num_devices_per_node": min(8, mesh.size),
    }
    return xrex.Layout(mesh, mesh.axis_names, data_axis=mesh.axis_names, **(defaults | fields))


def step_handle(shape: StepShape) -> xrex.AsyncEmbContextHandle:
    """The handle of the step's layout."""
    return xrex.make_context_handle(shape.layout, implementation=shape.implementation)


def lower_step(shape: StepShape) -> jax.stages.Lowered:
    """A step of the pipeline, rowwise Adagrad on the table and SGD on the dense model."""
    handle = step_handle(shape)
    mesh, emb_width = shape.layout.mesh, shape.layout.emb_width
    rule = xrex.RowwiseAdagrad(learning_rate=0.1)
    optimizer = optax.sgd(0.1)

    def loss_fn(params: Any, rows: jax.Array, inputs: Any) -> jax.Array:
        del inputs
        hidden = rows.astype(jnp.bfloat16)
        for weights in params:
            hidden = jax.nn.relu(hidden @ weights)
        return jnp.mean(jnp.square(hidden.astype(jnp.float32)))

    pipeline = xrex.make_pipeline(
        handle, rule, loss_fn, optimizer, vocab=shape.vocab, staleness=shape.staleness
    )
    weights = jax.ShapeDtypeStruct((emb_width, emb_width), jnp.bfloat16)
    params = (weights,) * shape.dense_layers
    table = jax.ShapeDtypeStruct((shape.vocab, emb_width), shape.dtype)
    tokens = jax.ShapeDtypeStruct((handle.tokens_per_batch,), jnp.int32)
    batch = xrex.Batch(shapes(mesh, tokens, mesh.axis_names), ())
    state = xrex.PipelineState(
        table=shapes(mesh, table, None, mesh.axis_names),
        rule_state=shapes(mesh, jax.eval_shape(lambda: rule.init(shape.vocab))),
        dense_params=shapes(mesh, params),
        optimizer_state=shapes(mesh, jax.eval_shape(optimizer.init, params)),
        step=shapes(mesh, jax.ShapeDtypeStruct((), jnp.int32)),
    )
    return pipeline.lower_step(state._replace(current_batch=batch), batch)
