"""Models of several tables and features, and what the oracle makes of them.

The oracle keeps each table by itself, and each example's ids in lists: nothing is stacked, packed
or sharded. It knows only in which order the ids of a table come: rank after rank, single ids before
those of bags.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xrex
from pallas_kernels import api as kernels
from tests import oracle
from xrex.rules.base import TouchedRows, saturate, tick

RATE = 0.5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Descent:
    """A rule of a user's own, exact wherever no number rounds: row <- row - rate * gradient."""

    rate: float

    kind = "descent"

    def init(self, vocab: int) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def numbers(self) -> Any:
        return self.rate

    def apply(self, table, state, rows, **options):
        return self.apply_by_row(self.rate, table, state, rows, **options)

    def apply_by_row(
        self, numbers: Any, table: jax.Array, state: Any, rows: TouchedRows, **options: Any
    ) -> Any:
        rate = jnp.broadcast_to(jnp.asarray(numbers, jnp.float32), rows.ids.shape)

        def new_rows(rows: Any, operands: Any, scalars: Any) -> Any:
            (row,), (gradient,), (rate,) = rows, operands, scalars
            change = kernels.round_to(table.dtype, rate * gradient)
            return (saturate(table.dtype, kernels.round_to(table.dtype, row - change)),)

        (table,) = kernels.update_rows(
            (table,),
            rows.ids,
            (rows.gradients,),
            (rate,),
            new_rows,
            implementation=options["implementation"],
        )
        return table, tick(state, rows.valid)


# The ids of each example, and their weights or None.
Examples = list[tuple[list[int], list[float] | None]]


class Step(NamedTuple):
    """A batch: ids by feature, and the gradients of what each of them is embedded to."""

    ids: dict[str, Examples]
    cotangents: dict[str, np.ndarray]


class Tables(NamedTuple):
    """Tables and their rules' states, by name."""

    tables: dict[str, np.ndarray]
    states: dict[str, Any]


def loss_fn(params: Any, embedded: dict[str, jax.Array], inputs: Any) -> jax.Array:
    """Its gradients are the cotangents."""
    del params
    return sum(
        (jnp.sum(embedded[name].astype(jnp.float32) * inputs[name]) for name in embedded),
        start=jnp.zeros(()),
    )


def make_pipeline(embeddings: xrex.Embeddings, **options: Any) -> xrex.Pipeline:
    return xrex.make_pipeline(embeddings, loss_fn, optax.sgd(0.0), **options)


def batch_of(embeddings: xrex.Embeddings, step: Step, ragged: bool = True) -> xrex.Batch:
    """The batch as a caller passes it: ragged, or padded where no id has a weight."""
    ids = {}
    for name, feature in embeddings.features.items():
        examples = step.ids[name]
        if feature.max_ids is None:
            ids[name] = np.array([(each or [-1])[0] for each, _ in examples], np.int64)
        elif ragged or any(weights is not None for _, weights in examples):
            ids[name] = ragged_of(examples)
        else:
            ids[name] = np.array(
                [each + [-1] * (feature.max_ids - len(each)) for each, _ in examples], np.int32
            ).reshape(len(examples), feature.max_ids)
    return xrex.Batch(ids, step.cotangents)


def ragged_of(examples: Examples) -> xrex.Ragged:
    weights = None
    if any(each is not None for _, each in examples):
        weights = np.array([w for ids, each in examples for w in each or [1.0] * len(ids)])
    return xrex.Ragged(
        np.array([i for ids, _ in examples for i in ids], np.int64),
        np.array([len(ids) for ids, _ in examples]),
        weights,
    )


def begin(embeddings: xrex.Embeddings, tables: dict[str, np.ndarray]) -> Tables:
    states = {}
    for name, table in embeddings.tables.items():
        is_adagrad = isinstance(table.rule, xrex.RowwiseAdagrad)
        states[name] = (
            oracle.init(oracle.Adagrad(**vars(table.rule)), table.vocab) if is_adagrad else 0
        )
    return Tables(tables, states)


def embed(embeddings: xrex.Embeddings, tables: dict[str, np.ndarray], step: Step) -> dict[str, Any]:
    """What the loss function sees of each feature."""
    found = {}
    for name, feature in embeddings.features.items():
        table = tables[feature.table]
        rows = []
        for ids, weights in step.ids[name]:
            of_ids = oracle.lookup(table, np.array(ids, np.int64))
            if feature.combiner is not None:
                rows.append(oracle.pool(of_ids, oracle.factors(feature.combiner, ids, weights)))
            else:
                padded = np.zeros((feature.max_ids or 1, table.shape[1]), table.dtype)
                padded[: len(ids)] = of_ids
                rows.append(padded if feature.max_ids else padded[0])
        found[name] = np.stack(rows)
    return found


def train(embeddings: xrex.Embeddings, before: Tables, step: Step, ranks: int) -> Tables:
    """Tables and states after one update."""
    tables, states = dict(before.tables), dict(before.states)
    for name, table in tables.items():
        ids, grads = _gradients_of(embeddings, name, step, ranks, table.shape[1])
        unique, segments, _ = oracle.compress(ids, len(table), len(ids))
        rule = embeddings.tables[name].rule
        if isinstance(rule, xrex.RowwiseAdagrad):
            adagrad = oracle.Adagrad(**vars(rule))
            tables[name], states[name], _ = oracle.update(
                adagrad, table, states[name], unique, grads, segments
            )
        else:
            tables[name] = _descend(rule.rate, table, unique, grads, segments)
            states[name] += 1
    return Tables(tables, states)


def _gradients_of(
    embeddings: xrex.Embeddings, table: str, step: Step, ranks: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """A table's ids and their gradients, in the order in which they are added."""
    features = {n: f for n, f in embeddings.features.items() if f.table == table}
    in_order = sorted(features, key=lambda n: features[n].combiner is not None)
    per_rank = embeddings.batch_size // ranks
    dtype = embeddings.tables[table].dtype
    all_ids: list[int] = []
    all_grads = [np.zeros((0, width), np.float32)]
    for rank in range(ranks):
        for name in in_order:
            combiner = features[name].combiner
            for example in range(rank * per_rank, (rank + 1) * per_rank):
                ids, weights = step.ids[name][example]
                gradient = step.cotangents[name][example].astype(dtype)
                if combiner is not None:
                    grads = oracle.spread(gradient, oracle.factors(combiner, ids, weights))
                else:
                    grads = gradient.reshape(-1, width)[: len(ids)].astype(np.float32)
                all_ids += ids
                all_grads.append(grads)
    return np.array(all_ids, np.int64), np.concatenate(
        [np.zeros((0, width), np.float32), *all_grads]
    )


def _descend(rate: float, table: np.ndarray, unique: Any, grads: Any, segments: Any) -> np.ndarray:
    sums = oracle.round_to(table.dtype, oracle.segment_sums(grads, segments, len(unique)))
    new = table.copy()
    for row, gradient in zip(unique.tolist(), sums, strict=True):
        if row < len(table) and np.any(gradient):
            change = oracle.round_to(table.dtype, np.float32(rate) * gradient)
            new[row] = oracle.round_to(table.dtype, table[row].astype(np.float32) - change)
    return new
