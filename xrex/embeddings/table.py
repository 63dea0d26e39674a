"""What a table is: its size, its type, how it begins and how it is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xrex.checks import TABLE_DTYPES, check_vocab
from xrex.layout.layout import is_positive_integer
from xrex.rules.base import RuleOrSchedule

# As those of `jax.nn.initializers`.
Initializer = Callable[[jax.Array, tuple[int, int], Any], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One embedding table.

    Attributes:
      vocab: its rows.
      width: its columns; a multiple of the number of ranks.
      rule: its update rule, or a function from a batch's number (a traced int32) to one, for
        schedules.
      dtype: bfloat16 or float32.
      initializer: `initializer(key, (vocab, width), dtype)`, as of `jax.nn.initializers`.
        By default normally distributed with a deviation of 1 / sqrt(width).

    Raises:
      ValueError: a size is not a positive integer, or the rule is none.
      TypeError: the dtype is another one.
    """

    vocab: int
    width: int
    rule: RuleOrSchedule
    dtype: Any = "float32"
    initializer: Initializer | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_vocab(self.vocab)
        if not is_positive_integer(self.width):
            raise ValueError(f"width={self.width!r} must be a positive integer")
        object.__setattr__(self, "vocab", int(self.vocab))
        object.__setattr__(self, "width", int(self.width))
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype not in TABLE_DTYPES:
            raise TypeError(f"dtype={self.dtype!r} must be bfloat16 or float32")
        object.__setattr__(self, "dtype", dtype)
        is_rule = hasattr(self.rule, "apply") and hasattr(self.rule, "init")
        if isinstance(self.rule, type) or not (is_rule or callable(self.rule)):
            raise ValueError(f"rule={self.rule!r} must be an update rule or a function to one")
        if self.initializer is not None and not callable(self.initializer):
            raise ValueError(f"initializer={self.initializer!r} must be a function or None")

    def begin(self, key: jax.Array) -> jax.Array:
        """The table before the first update, (vocab, width). In a trace."""
        shape = (self.vocab, self.width)
        initialize = self.initializer or jax.nn.initializers.normal(self.width**-0.5)
        table = initialize(key, shape, self.dtype)
        if jnp.shape(table) != shape:
            raise ValueError(f"initializer returned shape {jnp.shape(table)}, and must {shape}")
        return jnp.asarray(table).astype(self.dtype)
