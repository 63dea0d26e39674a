"""Packing: the features of one stack as one vector of ids. NumPy; no loop over examples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from xrex.embeddings.feature import Feature
from xrex.embeddings.read import FeatureIds
from xrex.embeddings.stack import Plan
from xrex.pooling import Bags, PackedIds


@dataclass(frozen=True)
class Policy:
    """What becomes of ids that have no row, and of those that have no room.

    Attributes:
      raises_out_of_range: whether an id outside its table is an error; else its row is zeros.
      cuts: whether ids that have no room are left out and counted; else they are an error.
    """

    raises_out_of_range: bool
    cuts: bool


class PackedStack(NamedTuple):
    """The ids of one stack."""

    ids: jax.Array | PackedIds | np.ndarray
    out_of_range: int
    cut: int


def pack_stack(
    plan: Plan,
    features: Mapping[str, Feature],
    vocabs: Mapping[str, int],
    read: Mapping[str, FeatureIds],
    policy: Policy,
) -> PackedStack:
    """The ids of one stack, of all ranks.

    Args:
      plan: the stack.
      features: of the model.
      vocabs: of each table.
      read: the ids of each feature, for as many examples as the batch has.
      policy: for ids that have no row or no room.

    Raises:
      ValueError: an example has more ids than `max_ids`, a rank more than its capacity, or, by the
        policy, an id is outside its table.
    """
    kept, cut = {}, 0
    for name in (*plan.singles, *plan.bags):
        kept[name], left_out = _within_max_ids(name, features[name], read[name], policy)
        cut += left_out
    if plan.bags:
        cut += _within_capacity(plan, kept, policy)
    ranks = len(next(iter(kept.values())).lengths) // plan.examples
    ids = np.full((ranks, plan.ids_per_rank), -1, np.int32)
    start, out_of_range = 0, 0
    rows = {}
    for name, each in kept.items():
        table = features[name].table
        rows[name], outside = _rows_of(name, table, each, plan.first_rows[table], vocabs, policy)
        out_of_range += outside
    for name, per_example in plan.singles.items():
        end = start + plan.examples * per_example
        ids[:, start:end] = _padded(rows[name], kept[name], per_example).reshape(ranks, -1)
        start = end
    if not plan.bags:
        return PackedStack(ids.reshape(-1), out_of_range, cut)
    bags = _pack_bags(plan, features, kept, rows, ids[:, start:])
    packed = PackedIds(ids.reshape(-1), bags)  # type: ignore[arg-type]
    return PackedStack(packed, out_of_range, cut)


def _rows_of(
    name: str,
    table: str,
    read: FeatureIds,
    first_row: int,
    vocabs: Mapping[str, int],
    policy: Policy,
) -> tuple[np.ndarray, int]:
    """The ids of a feature as rows of its stack, -1 outside its table; and how many those are."""
    vocab = vocabs[table]
    outside = read.ids.view(np.uint32) >= np.uint32(vocab)  # Negative ids, too.
    count = int(np.count_nonzero(outside))
    rows = read.ids + np.int32(first_row)
    if count:
        if policy.raises_out_of_range:
            position = int(np.argmax(outside))
            raise ValueError(
                f"feature {name!r}: id {read.ids[position]} of example "
                f"{_example_of(read, position)} is outside the table {table!r} of {vocab} rows"
            )
        rows[outside] = -1
    return rows, count


def _example_of(read: FeatureIds, position: int) -> int:
    """The example that the id at a position belongs to."""
    return int(np.searchsorted(np.cumsum(read.lengths), position, side="right"))


def _within_max_ids(
    name: str, feature: Feature, read: FeatureIds, policy: Policy
) -> tuple[FeatureIds, int]:
    """The ids with no more per example than may be, and how many were left out."""
    most = int(feature.max_ids or 1)
    too_long = read.lengths > most
    if not too_long.any():
        return read, 0
    if not policy.cuts:
        example = int(np.argmax(too_long))
        error = ValueError(
            f"feature {name!r}: example {example} has {read.lengths[example]} ids, and "
            f"max_ids={feature.max_ids} allows {most}"
        )
        error.add_note("Make max_ids larger, or pass overflow='cut' to keep the first ones.")
        raise error
    return _first_ids(read, np.minimum(read.lengths, most))


def _first_ids(read: FeatureIds, lengths: np.ndarray) -> tuple[FeatureIds, int]:
    """So many of each example's ids, the first ones; and how many were left out."""
    starts = np.cumsum(read.lengths) - read.lengths
    place = np.arange(len(read.ids)) - np.repeat(starts, read.lengths)
    kept = place < np.repeat(lengths, read.lengths)
    weights = None if read.weights is None else read.weights[kept]
    left_out = int(len(kept) - np.count_nonzero(kept))
    return FeatureIds(read.ids[kept], lengths, weights), left_out


def _within_capacity(plan: Plan, kept: dict[str, FeatureIds], policy: Policy) -> int:
    """Leaves out the last ids of ranks that have more than the capacity; how many it were."""
    asked = np.stack([kept[name].lengths.reshape(-1, plan.examples) for name in plan.bags], axis=1)
    ranks = len(asked)
    ends = np.cumsum(asked.reshape(ranks, -1), axis=1)
    if (ends[:, -1] <= plan.capacity).all():
        return 0
    if not policy.cuts:
        _raise_capacity(plan, asked)
    lengths = np.diff(np.minimum(ends, plan.capacity), axis=1, prepend=0).reshape(asked.shape)
    cut = 0
    for number, name in enumerate(plan.bags):
        kept[name], left_out = _first_ids(kept[name], lengths[:, number].reshape(-1))
        cut += left_out
    return cut


def _raise_capacity(plan: Plan, asked: np.ndarray) -> None:
    totals = asked.sum(axis=(1, 2))
    rank = int(np.argmax(totals))
    largest = plan.bags[int(np.argmax(asked[rank].sum(axis=1)))]
    error = ValueError(
        f"rank {rank} has {totals[rank]} ids in the bags {list(plan.bags)}, and a capacity of "
        f"{plan.capacity}; most of them are of feature {largest!r}"
    )
    error.add_note("Make capacity larger, or pass overflow='cut' to leave out the last ones.")
    raise error


def _padded(rows: np.ndarray, read: FeatureIds, width: int) -> np.ndarray:
    """(examples, width), -1 behind the last id of an example."""
    if len(rows) == len(read.lengths) * width:
        return rows.reshape(-1, width)
    padded = np.full((len(read.lengths), width), -1, np.int32)
    padded[np.arange(width) < read.lengths[:, None]] = rows
    return padded


def _pack_bags(
    plan: Plan,
    features: Mapping[str, Feature],
    kept: Mapping[str, FeatureIds],
    rows: Mapping[str, np.ndarray],
    out: np.ndarray,
) -> Bags:
    """Writes the ids of the bags, (ranks, capacity), and returns where they belong."""
    ranks, capacity = out.shape
    shape = (ranks, len(plan.bags), plan.examples)
    lengths, scales = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    factors = {name: _factors(name, features[name], kept[name]) for name in plan.bags}
    weighted = any(each is not None for each in factors.values())
    weights = np.ones((ranks, capacity), np.float32) if weighted else None
    starts = np.zeros(ranks, np.int64)
    for number, name in enumerate(plan.bags):
        lengths[:, number] = kept[name].lengths.reshape(ranks, -1)
        if factors[name] is None:
            scales[:, number] = _scales(features[name], lengths[:, number])
        counts = lengths[:, number].sum(axis=1, dtype=np.int64)
        sources = np.cumsum(counts) - counts
        for rank in range(ranks):
            source = slice(sources[rank], sources[rank] + counts[rank])
            target = slice(starts[rank], starts[rank] + counts[rank])
            out[rank, target] = rows[name][source]
            if weights is not None and factors[name] is not None:
                weights[rank, target] = factors[name][source]  # type: ignore[index]
        starts += counts
    flat: Any = None if weights is None else weights.reshape(-1)
    return Bags(lengths.reshape(-1), scales.reshape(-1), flat)  # type: ignore[arg-type]


def _factors(name: str, feature: Feature, read: FeatureIds) -> np.ndarray | None:
    """Weights with the combiner's divisor in them; None where there are none."""
    if read.weights is None:
        return None
    weights = read.weights
    if feature.combiner != "sum":
        of_bag = np.repeat(np.arange(len(read.lengths)), read.lengths)
        squares = feature.combiner == "sqrtn"
        total = np.bincount(
            of_bag, weights * weights if squares else weights, minlength=len(read.lengths)
        )
        divisor = (np.sqrt(total) if squares else total)[of_bag]
        weights = np.divide(weights, divisor, out=np.zeros_like(weights), where=divisor != 0)
    with np.errstate(over="ignore"):
        factors = weights.astype(np.float32)
    if not np.isfinite(factors).all():
        position = int(np.argmin(np.isfinite(factors)))
        raise ValueError(
            f"feature {name!r}: the weight {read.weights[position]} of example "
            f"{_example_of(read, position)} is too large for float32, or too large beside the sum "
            "of its bag's weights"
        )
    return factors


def _scales(feature: Feature, lengths: np.ndarray) -> np.ndarray:
    """What the rows of each bag without weights are multiplied by, float32."""
    counts = np.maximum(lengths, 1).astype(np.float32)
    if feature.combiner == "mean":
        return np.float32(1) / counts
    if feature.combiner == "sqrtn":
        return np.float32(1) / np.sqrt(counts)
    return np.ones_like(counts)
