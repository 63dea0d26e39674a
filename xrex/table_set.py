"""The tables of a model, as the training step sees them: stacks, and what goes in and out of them.

A stack is one physical table: a table of its own, or several one above the other. `stacks` is one
`TableStack` or any pytree of them, and whatever a step keeps for each of them is a tree alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from xrex.layout.handle import AsyncEmbContextHandle
from xrex.rules.base import RuleOrSchedule, UpdateRule, rule_at


@dataclass(frozen=True)
class TableStack:
    """One physical table.

    Attributes:
      handle: its layout; `tokens_per_batch` is the number of rows that a batch gets of it.
      rule: the update rule of its rows, or a function from a batch's number to one.
      vocab: its rows.
    """

    handle: AsyncEmbContextHandle
    rule: RuleOrSchedule
    vocab: int

    def rule_at(self, step: jax.Array) -> UpdateRule:
        """The update rule for the gradients of batch `step`."""
        return rule_at(self.rule, step)


class TableSet(Protocol):
    """The tables of a model.

    Attributes:
      stacks: a pytree of `TableStack`s
      handle: a layout with the mesh and the axes that all of them have
      batch_size: the first axis of what the loss function sees for a batch
    """

    @property
    def stacks(self) -> Any:
        """See above."""

    @property
    def handle(self) -> AsyncEmbContextHandle:
        """See above."""

    @property
    def batch_size(self) -> int:
        """See above."""

    def make_tables(self, given: Any) -> Any:
        """The stacks' tables, of what `Pipeline.init` was given. Checked; nothing is donated."""

    def place(self, ids: Any) -> Any:
        """A batch's ids, checked and copied to the mesh; those that are placed stay as they are."""

    def place_part(self, ids: Any) -> tuple[Any, int]:
        """As `place`, of at most `batch_size` examples: padded ids, and the number of examples."""

    def by_stack(self, placed: Any) -> Any:
        """Of placed ids what each stack's lookup takes: an array, or `PackedIds`."""

    def counts(self, placed: Any) -> dict[str, Any]:
        """What was counted while the ids were placed: fields of `StepMetrics`."""

    def split(self, rows: Any) -> Any:
        """What the loss function sees, of each stack's rows. In a trace."""

    def join(self, embedded: Any) -> Any:
        """Undoes `split`, for gradients. In a trace."""


def for_each(stacks: Any, function: Callable[..., Any], *trees: Any) -> Any:
    """`function(stack, *parts)` for each stack, as a tree alike."""
    return jax.tree.map(function, stacks, *trees)


def for_each_unzip(stacks: Any, function: Callable[..., Any], *trees: Any) -> tuple[Any, ...]:
    """`for_each` of a function that returns a tuple: a tuple of trees."""
    results: list[Any] = []
    for_each(stacks, lambda *parts: results.append(function(*parts)), *trees)
    treedef = jax.tree.structure(stacks)
    return tuple(jax.tree.unflatten(treedef, column) for column in zip(*results, strict=True))
