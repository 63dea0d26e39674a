"""Models of several tables to plan, and the collectives of a traced step to compare a plan with."""

import math
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax

import xrex

COLLECTIVES = {"all_gather": "all-gather", "all_to_all": "all-to-all", "psum": "all-reduce"}
BATCH_SIZE = 32
# What the bag "liked" may hold; "seen" has no weights.
MAX_SEEN, MAX_LIKED = 6, 4


def traced_collectives(jaxpr: Any) -> list[tuple[str, int]]:
    """Each collective of a traced function, and the bytes of a rank's operand."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name.removesuffix("_invariant")
        if name in COLLECTIVES:
            size = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in equation.invars)
            found.append((COLLECTIVES[name], size))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += traced_collectives(inner)
    return found


def sent(operation: str, size: int, ranks: int) -> int:
    """Bytes that a rank sends of an operand, each message straight to its peer."""
    if operation == "all-gather":
        return (ranks - 1) * size
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) * size // ranks


def per_rank_bytes(tree: Any) -> int:
    """Bytes of the arrays' shards on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def click_model(mesh: Any, axes: Any = "x", **changes: Any) -> xrex.Embeddings:
    """Two stacks: users and items, with single ids and two bags; words, a sequence."""
    arguments = {
        "tables": {
            "users": xrex.Table(vocab=100, width=16, rule=xrex.RowwiseAdagrad(learning_rate=0.1)),
            "items": xrex.Table(
                vocab=50, width=16, rule=lambda _: xrex.RowwiseAdagrad(learning_rate=0.2)
            ),
            "words": xrex.Table(
                vocab=30,
                width=8,
                dtype="bfloat16",
                rule=xrex.RowwiseAdagrad(learning_rate=0.1, lazy=True),
            ),
        },
        "features": {
            "user": xrex.Feature("users"),
            "item": xrex.Feature("items"),
            "query": xrex.Feature("words", max_ids=3),
            "seen": xrex.Feature("items", max_ids=MAX_SEEN, combiner="mean"),
            "liked": xrex.Feature("users", max_ids=MAX_LIKED, combiner="sum"),
        },
        "batch_size": BATCH_SIZE,
        "table_axis": axes,
        "data_axis": axes,
    }
    return xrex.Embeddings(mesh, **(arguments | changes))


def click_batch(*, weighted: bool) -> dict[str, Any]:
    """Two ids in each bag, so that half of what `max_ids` allows is room enough."""
    rows = np.arange(BATCH_SIZE, dtype=np.int32)
    lengths = np.full(BATCH_SIZE, 2)
    pairs = np.arange(2 * BATCH_SIZE) % 50
    weights = np.ones(len(pairs), np.float32) if weighted else None
    return {
        "user": rows,
        "item": rows,
        "query": np.tile(rows[:, None] % 30, (1, 3)),
        "seen": xrex.Ragged(pairs, lengths),
        "liked": xrex.Ragged(pairs, lengths, weights),
    }


def started(embeddings: xrex.Embeddings, ids: Any) -> tuple[xrex.Pipeline, xrex.PipelineState]:
    """A pipeline with staleness 1, and its state with a batch of those ids in flight."""

    def loss_fn(params: jax.Array, embedded: dict[str, jax.Array], inputs: Any) -> jax.Array:
        del inputs
        means = [jnp.mean(rows.astype(jnp.float32)) for rows in embedded.values()]
        return params * sum(means)

    pipeline = xrex.make_pipeline(embeddings, loss_fn, optax.sgd(0.1), staleness=1)
    state = pipeline.init(jax.random.key(0), jnp.ones(()))
    return pipeline, pipeline.start(state, xrex.Batch(ids, ()))
