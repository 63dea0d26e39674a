"""What a training step is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from xrex.layout.handle import AsyncEmbContextHandle
from xrex.rules.base import UpdateRule

LossFunction = Callable[[Any, jax.Array, Any], Any]
RuleOrSchedule = UpdateRule | Callable[[jax.Array], UpdateRule]


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
    """What a step is made of; see `xrex.training.pipeline.make_pipeline`."""

    handle: AsyncEmbContextHandle
    rule: RuleOrSchedule
    loss_fn: LossFunction
    dense_optimizer: DenseOptimizer
    vocab: int
    staleness: int = 0
    accumulation_steps: int = 1
    per_example: Any = None
    donate: bool = True

    def rule_at(self, step: jax.Array) -> UpdateRule:
        """The update rule for the gradients of batch `step`."""
        # A rule may have a __call__ of its own: what tells it from a schedule is what it can do.
        if hasattr(self.rule, "apply") and hasattr(self.rule, "init"):
            return self.rule
        return self.rule(step)
