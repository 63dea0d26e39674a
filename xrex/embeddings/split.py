"""A stack's rows by feature, and the gradients of features by row. In a trace."""

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.embeddings.stack import Plan
from xrex.layout.handle import AsyncEmbContextHandle


def split_rows(handle: AsyncEmbContextHandle, plan: Plan, rows: jax.Array) -> dict[str, jax.Array]:
    """Each feature's rows, (batch, *row shape), of a stack's."""
    sizes = [plan.examples * plan.singles.get(name, 1) for name in plan.row_shapes]

    def body(rows: jax.Array) -> dict[str, jax.Array]:
        parts = jnp.split(rows, np.cumsum(sizes)[:-1].tolist())
        return {
            name: part.reshape(plan.examples, *shape)
            for (name, shape), part in zip(plan.row_shapes.items(), parts, strict=True)
        }

    split = placement.shard_map(
        handle, body, (placement.token_rows_spec(handle),), _specs(handle, plan)
    )
    return split(rows)


def join_rows(
    handle: AsyncEmbContextHandle, plan: Plan, embedded: dict[str, jax.Array]
) -> jax.Array:
    """Undoes `split_rows`; features of other stacks are not looked at."""
    specs = _specs(handle, plan)

    def body(parts: dict[str, jax.Array]) -> jax.Array:
        width = handle.emb_width
        return jnp.concatenate([parts[name].reshape(-1, width) for name in plan.row_shapes])

    parts = placement.place(handle, {name: embedded[name] for name in specs}, specs)
    return placement.shard_map(handle, body, (specs,), placement.token_rows_spec(handle))(parts)


def _specs(handle: AsyncEmbContextHandle, plan: Plan) -> dict[str, jax.sharding.PartitionSpec]:
    return {
        name: placement.per_example_spec(handle, 1 + len(shape))
        for name, shape in plan.row_shapes.items()
    }
