"""Stacks: tables of equal width, dtype and kind of rule lie one above the other in one array."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrex.embeddings.feature import Feature
from xrex.embeddings.table import Table
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.rules.base import rule_of_any_step
from xrex.rules.stacked import kind_of, stacked
from xrex.table_set import TableStack


@dataclass(frozen=True)
class Plan:
    """What a stack is made of, and how a rank's ids and rows are laid out.

    The ids of a rank are those of the singles, feature after feature and example after example, and
    then those of the bags, in the same order, up to a capacity. Its rows are those of the singles
    and then the bags.

    Attributes:
      name: the stack's.
      first_rows: where each table begins in the stack, by name.
      vocab: rows of all tables.
      singles: features whose ids have a row each, with their rows per example.
      bags: features whose ids are pooled.
      row_shapes: what an example gets of each feature, in the order of the rows.
      examples: of each rank.
      capacity: ids of bags per rank.
    """

    name: str
    first_rows: dict[str, int]
    vocab: int
    singles: dict[str, int]
    bags: tuple[str, ...]
    row_shapes: dict[str, tuple[int, ...]]
    examples: int
    capacity: int

    @property
    def single_ids(self) -> int:
        """Ids per rank that have a row each."""
        return self.examples * sum(self.singles.values())

    @property
    def num_bags(self) -> int:
        """Bags per rank."""
        return self.examples * len(self.bags)

    @property
    def ids_per_rank(self) -> int:
        """Ids per rank, single ones and those of bags."""
        return self.single_ids + self.capacity

    @property
    def rows_per_rank(self) -> int:
        """Rows per rank that travel."""
        return self.single_ids + self.num_bags


def group_tables(tables: Mapping[str, Table]) -> dict[str, list[str]]:
    """The names of the tables of each stack, in the tables' order, by the stack's name.

    A stack has the name of its width, dtype and rule, such as "64_float32_RowwiseAdagrad", with a
    number behind it where several have the same.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, table in tables.items():
        key = (table.width, table.dtype, kind_of(table.rule))
        groups.setdefault(key, []).append(name)
    stacks: dict[str, list[str]] = {}
    for names in groups.values():
        table = tables[names[0]]
        rule = type(rule_of_any_step(table.rule)).__name__
        base = name = f"{table.width}_{table.dtype.name}_{rule}"
        number = 2
        while name in stacks:
            name = f"{base}_{number}"
            number += 1
        stacks[name] = names
    return stacks


def plan_stack(
    name: str,
    tables: Mapping[str, Table],
    features: Mapping[str, Feature],
    examples: int,
    capacity: int | None,
) -> Plan:
    """How the stack of these tables, with the features of them, is laid out.

    Raises:
      ValueError: the tables have more rows than int32 ids can reach.
    """
    ends = np.cumsum([table.vocab for table in tables.values()], dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"the tables {list(tables)} are stacked, and have {ends[-1]} rows together: more than "
            f"the {np.iinfo(np.int32).max} that int32 ids can reach"
        )
    starts = [0, *ends[:-1].tolist()]
    bags = {n: f for n, f in features.items() if f.is_bag}
    singles = {n: f for n, f in features.items() if not f.is_bag}
    width = next(iter(tables.values())).width
    most = examples * sum(int(f.max_ids or 0) for f in bags.values())
    return Plan(
        name=name,
        first_rows=dict(zip(tables, starts, strict=True)),
        vocab=int(ends[-1]),
        singles={n: f.rows_per_example for n, f in singles.items()},
        bags=tuple(bags),
        row_shapes={n: f.row_shape(width) for n, f in (singles | bags).items()},
        examples=examples,
        capacity=most if capacity is None else min(capacity, most),
    )


def make_stack(
    plan: Plan, tables: Mapping[str, Table], handle: AsyncEmbContextHandle
) -> TableStack:
    """The stack as a training step sees it."""
    first_rows = [*plan.first_rows.values(), plan.vocab]
    rule: Any = stacked([table.rule for table in tables.values()], first_rows)
    return TableStack(handle, rule, plan.vocab)
