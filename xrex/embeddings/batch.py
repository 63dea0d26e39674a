"""A batch's features, checked and packed: what the stacks' lookups take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from xrex.embeddings.feature import Feature
from xrex.embeddings.packing import Policy, pack_stack
from xrex.embeddings.read import num_examples, read_feature
from xrex.embeddings.stack import Plan
from xrex.embeddings.table import Table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """A batch's ids as the stacks' lookups take them.

    Attributes:
      stacks: for each stack an array of ids, or `PackedIds` where some are in bags
      out_of_range: ids outside their table
      cut: ids left out for lack of room
    """

    stacks: dict[str, Any]
    out_of_range: int = field(default=0, metadata={"static": True})
    cut: int = field(default=0, metadata={"static": True})


def pack_batch(
    plans: Mapping[str, Plan],
    tables: Mapping[str, Table],
    features: Mapping[str, Feature],
    given: Any,
    batch_size: int,
    policy: Policy,
) -> tuple[PackedBatch, int]:
    """The batch packed, filled up with examples without ids; how many are its own.

    Raises:
      ValueError: a feature is missing or unknown, features or the batch have another number of
        examples; or as `read_feature` and `pack_stack`.
      TypeError: no dictionary; or as `read_feature`.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"a batch's ids must be a dictionary by feature, not {type(given).__name__}"
        )
    _check_features(features, given)
    examples = _check_examples(features, given, batch_size)
    read = {
        name: read_feature(name, feature, given[name], batch_size - examples)
        for name, feature in features.items()
    }
    vocabs = {name: table.vocab for name, table in tables.items()}
    packed = {
        name: pack_stack(plan, features, vocabs, read, policy) for name, plan in plans.items()
    }
    batch = PackedBatch(
        {name: each.ids for name, each in packed.items()},
        sum(each.out_of_range for each in packed.values()),
        sum(each.cut for each in packed.values()),
    )
    return batch, examples


def _check_features(features: Mapping[str, Feature], ids: Mapping[str, Any]) -> None:
    missing, unknown = [n for n in features if n not in ids], [n for n in ids if n not in features]
    if missing or unknown:
        told = [f"lacks {missing}"] * bool(missing) + [f"has unknown {unknown}"] * bool(unknown)
        raise ValueError(f"the batch {' and '.join(told)}; the features are {list(features)}")


def _check_examples(
    features: Mapping[str, Feature], given: Mapping[str, Any], batch_size: int
) -> int:
    """How many examples all features have."""
    first, *others = [(n, num_examples(n, f, given[n])) for n, f in features.items()]
    for name, examples in others:
        if examples != first[1]:
            raise ValueError(
                f"feature {name!r} has {examples} examples, and feature {first[0]!r} has {first[1]}"
            )
    if not 0 < first[1] <= batch_size:
        raise ValueError(
            f"the batch has {first[1]} examples, and the embeddings have batch_size={batch_size}"
        )
    return first[1]
