"""One rule for several tables that lie one above the other, each with its own numbers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels import api as kernels
from xrex.rules.base import (
    RuleOrSchedule,
    TouchedRows,
    UpdateRule,
    is_rule,
    rule_at,
    rule_of_any_step,
)


@runtime_checkable
class StackableRule(UpdateRule, Protocol):
    """A rule that several tables may share, save its numbers."""

    @property
    def kind(self) -> Hashable:
        """What rules of one stack have in common: all that is no number."""

    def numbers(self) -> Any:
        """The rule's numbers: a pytree of scalars, float32 or Python's."""

    def apply_by_row(
        self,
        numbers: Any,
        table: jax.Array,
        state: Any,
        rows: TouchedRows,
        *,
        emb_width: int,
        implementation: kernels.Implementation,
    ) -> tuple[jax.Array, Any]:
        """`apply` with such numbers, each a scalar or one value per touched row."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class StackedRule:
    """The rule of a stack whose tables differ in their numbers.

    Attributes:
      rules: of each table; of one kind.
      first_rows: where each table begins, and where the last ends.
    """

    rules: tuple[StackableRule, ...]
    first_rows: tuple[int, ...]

    def init(self, vocab: int) -> Any:
        """The state of the whole stack."""
        return self.rules[0].init(vocab)

    def apply(
        self,
        table: jax.Array,
        state: Any,
        rows: TouchedRows,
        *,
        emb_width: int,
        implementation: kernels.Implementation,
    ) -> tuple[jax.Array, Any]:
        """See `UpdateRule.apply`."""
        ends = jnp.asarray(self.first_rows[1:], jnp.int32)
        table_of_row = jnp.searchsorted(ends, rows.ids, side="right")

        def by_row(*of_tables: Any) -> jax.Array:
            # Rows behind the last table are not touched. Their NaN keeps XLA from seeing one number
            # in all, and from rounding otherwise where tables happen to agree.
            values = [*of_tables, jnp.nan]
            return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])[table_of_row]

        numbers = jax.tree.map(by_row, *[rule.numbers() for rule in self.rules])
        return self.rules[0].apply_by_row(
            numbers, table, state, rows, emb_width=emb_width, implementation=implementation
        )

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The rules are children."""
        return self.rules, self.first_rows

    @classmethod
    def tree_unflatten(cls, first_rows: tuple[int, ...], rules: Sequence[Any]) -> "StackedRule":
        """Undoes `tree_flatten`."""
        return cls(tuple(rules), first_rows)


def kind_of(rule: RuleOrSchedule) -> Hashable:
    """Tables whose rules have equal kinds may be stacked."""
    first = rule_of_any_step(rule)
    if isinstance(first, StackableRule):
        return type(first), first.kind
    # A rule of another sort can be shared if it is the same for all.
    try:
        hash(rule)
    except TypeError:
        return id(rule)
    return rule  # type: ignore[return-value]


def stacked(rules: Sequence[RuleOrSchedule], first_rows: Sequence[int]) -> RuleOrSchedule:
    """The rule of a stack of tables with these rules, which are of one kind."""
    if all(rule is rules[0] or rule == rules[0] for rule in rules):
        return rules[0]
    rows = tuple(first_rows)
    if all(is_rule(rule) for rule in rules):
        return StackedRule(tuple(rules), rows)  # type: ignore[arg-type]
    return lambda step: StackedRule(tuple(rule_at(rule, step) for rule in rules), rows)  # type: ignore[misc]
