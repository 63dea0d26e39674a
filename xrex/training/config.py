"""What a training step is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from xrex.layout.handle import AsyncEmbContextHandle
from xrex.table_set import TableSet

LossFunction = Callable[[Any, Any, Any], Any]


class DenseOptimizer(Protocol):
    """What is used of an `optax.GradientTransformation`."""

    @property
    def init(self) -> Callable[..., Any]:
        """`init(params) -> state`."""

    @property
    def update(self) -> Callable[..., Any]:
        """`update(gradients, state, params) -> (updates, state)`."""


@dataclass(frozen=True)
class StepConfig:
    """What a step is made of; see `xrex.training.make_pipeline`."""

    tables: TableSet
    loss_fn: LossFunction
    dense_optimizer: DenseOptimizer
    staleness: int = 0
    accumulation_steps: int = 1
    per_example: Any = None
    donate: bool = True

    @property
    def handle(self) -> AsyncEmbContextHandle:
        """The mesh and the axes."""
        return self.tables.handle

    @property
    def batch_size(self) -> int:
        """The first axis of what the loss function sees."""
        return self.tables.batch_size

    def rules_at(self, step: jax.Array) -> Any:
        """Each stack's update rule for the gradients of batch `step`."""
        return [stack.rule_at(step) for stack in jax.tree.leaves(self.tables.stacks)]
