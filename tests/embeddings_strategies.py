"""Hypothesis strategies for models of several tables and features, and for their batches."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import xrex
from tests import strategies
from tests.embeddings_cases import Descent, Step

COMBINERS = (None, "sum", "mean", "sqrtn")
# Numbers of ids whose factors are powers of two.
EXACT_LENGTHS = {
    None: (0, 1, 2, 3, 4),
    "sum": (0, 1, 2, 3, 4),
    "mean": (0, 1, 2, 4),
    "sqrtn": (0, 1, 4),
}
RULES = (
    Descent(0.5),
    Descent(0.25),
    xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30),
    xrex.RowwiseAdagrad(learning_rate=0.25, eps=1e-30),
    xrex.RowwiseAdagrad(learning_rate=0.5, eps=1e-30, lazy=True),
)


@st.composite
def models(draw: st.DrawFn, rules: tuple[Any, ...] = RULES) -> xrex.Embeddings:
    """Embeddings of 1 to 4 tables and up to 6 features, on any mesh."""
    layout = draw(strategies.legal_layouts())
    ranks = layout.group_size
    widths, dtypes = (ranks, 2 * ranks), [draw(st.sampled_from(strategies.DTYPES))]
    if draw(st.integers(0, 3)) == 3:
        dtypes = list(strategies.DTYPES)
    names = draw(st.permutations(["a", "b", "c", "d"]))[: draw(st.integers(1, 4))]
    tables = {
        name: xrex.Table(
            vocab=draw(st.sampled_from([64, 48, 100])),
            width=draw(st.sampled_from(widths)),
            dtype=draw(st.sampled_from(dtypes)),
            rule=draw(st.sampled_from(rules)),
        )
        for name in names
    }
    of_tables = [*names, *draw(st.lists(st.sampled_from(names), max_size=2))]
    features = {}
    for number, table in enumerate(draw(st.permutations(of_tables))):
        combiner = draw(st.sampled_from(COMBINERS))
        max_ids = 4 if combiner else draw(st.sampled_from([None, 3]))
        features[f"f{number}"] = xrex.Feature(table, max_ids=max_ids, combiner=combiner)
    return xrex.Embeddings(
        layout.mesh,
        tables=tables,
        features=features,
        batch_size=ranks * draw(st.sampled_from([1, 2])),
        table_axis=layout.table_axis,
        data_axis=layout.data_axis,
    )


@st.composite
def exact_steps(draw: st.DrawFn, embeddings: xrex.Embeddings, count: int) -> list[Step]:
    """Batches on which no operation of the rules above rounds.

    A table with rowwise Adagrad gets no id twice in a batch, and gradients of one size in all
    columns: its squares' mean is a power of four then.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    weighted = draw(st.booleans())
    return [_exact_step(rng, embeddings, weighted and k % 2 == 0) for k in range(count)]


def _exact_step(rng: np.random.Generator, embeddings: xrex.Embeddings, weighted: bool) -> Step:
    free = {
        name: rng.permutation(table.vocab).tolist() for name, table in embeddings.tables.items()
    }
    ids: dict[str, Any] = {}
    cotangents: dict[str, Any] = {}
    for name, feature in embeddings.features.items():
        table = embeddings.tables[feature.table]
        is_adagrad = isinstance(table.rule, xrex.RowwiseAdagrad)
        lengths = [n for n in EXACT_LENGTHS[feature.combiner] if n <= (feature.max_ids or 1)]
        examples = []
        for _ in range(embeddings.batch_size):
            length = int(rng.choice(lengths))
            if is_adagrad:
                length = length if length <= len(free[feature.table]) else 0
                chosen = [free[feature.table].pop() for _ in range(length)]
            else:
                chosen = rng.integers(0, table.vocab + 2, length).tolist()
            weights = None
            if weighted and feature.combiner is not None:
                weights = [float(rng.choice([0.5, 1.0, 2.0]))] * length
            examples.append((chosen, weights))
        ids[name] = examples
        shape = (embeddings.batch_size, *([feature.max_ids] if _is_sequence(feature) else []))
        sizes = 2.0 ** rng.integers(0, 2, (*shape, 1))
        signs = rng.choice([-1.0, 1.0], table.width)
        cotangents[name] = (sizes * signs).astype(np.float32)
    return Step(ids, cotangents)


def _is_sequence(feature: xrex.Feature) -> bool:
    return feature.max_ids is not None and feature.combiner is None


def exact_tables(rng: np.random.Generator, embeddings: xrex.Embeddings) -> dict[str, np.ndarray]:
    """Tables of small integers."""
    return {
        name: rng.integers(-4, 5, (table.vocab, table.width)).astype(table.dtype)
        for name, table in embeddings.tables.items()
    }
