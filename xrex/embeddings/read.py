"""What a caller passes for a feature, as ids per example. NumPy; no loop over examples."""

from typing import Any, NamedTuple

import numpy as np

from xrex.checks import as_int32
from xrex.embeddings.feature import Feature, Ragged


class FeatureIds(NamedTuple):
    """The ids of one feature, without those that mean "no id".

    Attributes:
      ids: one example after the other.  # shape=(n,), int32
      lengths: ids of each example.  # shape=(examples,), int64
      weights: shape=(n,), float64; None means 1
    """

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None


def num_examples(name: str, feature: Feature, given: Any) -> int:
    """How many examples there are.

    Raises:
      ValueError: it cannot be told.
    """
    if isinstance(given, Ragged):
        if (given.lengths is None) == (given.row_splits is None):
            raise ValueError(f"feature {name!r}: Ragged needs lengths or row_splits, one of them")
        counts = given.lengths if given.row_splits is None else given.row_splits
        shape = np.shape(counts)
        if len(shape) != 1 or (given.row_splits is not None and not shape[0]):
            raise ValueError(
                f"feature {name!r}: lengths and row_splits must have one dimension, not {shape}"
            )
        return int(shape[0]) - (given.row_splits is not None)
    shape = np.shape(given)
    dimensions = 1 if feature.max_ids is None else 2
    if len(shape) != dimensions:
        wanted = "(batch,)" if dimensions == 1 else f"(batch, {feature.max_ids}), or be a Ragged"
        raise ValueError(f"feature {name!r} has shape {shape}, and must have {wanted}")
    return int(shape[0])


def read_feature(name: str, feature: Feature, given: Any, missing: int = 0) -> FeatureIds:
    """The ids of one feature, with so many examples without ids behind those that are given.

    Raises:
      ValueError: a wrong shape, lengths that do not add up, an id that does not fit in int32,
        weights that are not finite, or weights of ids that are not in a bag.
      TypeError: ids or lengths that are not integers, weights that are not numbers.
    """
    if isinstance(given, Ragged):
        read = _read_ragged(name, feature, given)
    else:
        array = np.asarray(as_int32(f"feature {name!r}", given))
        examples = len(array)
        width = 1 if array.ndim == 1 else array.shape[1]
        if feature.max_ids is not None and width > feature.max_ids:
            raise ValueError(
                f"feature {name!r} has shape {array.shape}, and max_ids={feature.max_ids}"
            )
        read = FeatureIds(array.reshape(-1), np.full(examples, width, np.int64))
    read = _without_padding(feature, read)
    return read._replace(lengths=np.pad(read.lengths, (0, missing)))


def _read_ragged(name: str, feature: Feature, given: Ragged) -> FeatureIds:
    what = f"feature {name!r}"
    ids = np.asarray(given.ids)
    # An empty list is one of floats to NumPy.
    ids = np.asarray(as_int32(what, ids if ids.size else ids.astype(np.int32)))
    if ids.ndim != 1:
        raise ValueError(f"{what} has ids of shape {ids.shape}, and they must have (n,)")
    if given.row_splits is None:
        lengths = _integers(f"{what}: lengths", given.lengths)
    else:
        splits = _integers(f"{what}: row_splits", given.row_splits)
        if splits[0] != 0:
            raise ValueError(f"{what}: row_splits must begin with 0, not {splits[0]}")
        lengths = np.diff(splits)
    if (lengths < 0).any():
        example = int(np.argmax(lengths < 0))
        raise ValueError(f"{what}: example {example} has {lengths[example]} ids")
    if lengths.sum() != len(ids):
        raise ValueError(f"{what} has {len(ids)} ids, and lengths of {lengths.sum()} together")
    if given.weights is None:
        return FeatureIds(ids, lengths)
    if not feature.is_bag:
        raise ValueError(f"{what} has weights, and no combiner: only the ids of a bag have any")
    weights = np.asarray(given.weights)
    if weights.shape != ids.shape:
        raise ValueError(f"{what} has {len(ids)} ids, and weights of shape {weights.shape}")
    if weights.dtype.kind not in "fiu" and weights.dtype.name != "bfloat16":
        raise TypeError(f"{what}: weights must be numbers, not {weights.dtype}")
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all():
        position = int(np.argmin(np.isfinite(weights)))
        raise ValueError(f"{what}: the weight at position {position} is {weights[position]}")
    return FeatureIds(ids, lengths, weights)


def _integers(what: str, given: Any) -> np.ndarray:
    array = np.asarray(given)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{what} must be integers, not {array.dtype}")
    return array.astype(np.int64)


def _without_padding(feature: Feature, read: FeatureIds) -> FeatureIds:
    if feature.padding_id is None:
        return read
    kept = read.ids != feature.padding_id
    if kept.all():
        return read
    if len(read.ids) == len(read.lengths) and (read.lengths == 1).all():
        lengths = kept.astype(np.int64)
    else:
        before = np.concatenate([[0], np.cumsum(kept)])
        ends = np.cumsum(read.lengths)
        lengths = before[ends] - before[ends - read.lengths]
    weights = None if read.weights is None else read.weights[kept]
    return FeatureIds(read.ids[kept], lengths, weights)
