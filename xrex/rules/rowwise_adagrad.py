"""Rowwise Adagrad: one accumulator per row, with decay that may be caught up lazily."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api as kernels
from xrex.rules.base import TouchedRows, read_values, saturate, tick, write_values

# The positive numbers of float32; XLA flushes smaller ones to zero.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class RowwiseAdagradState(NamedTuple):
    """State of `RowwiseAdagrad`, replicated.

    Attributes:
      accumulator: each row's decayed sum of mean squared gradients.
        # shape=(vocab,), dtype=jnp.float32
      last_step: the clock at each row's last update; None unless lazy.
        # shape=(vocab,), dtype=jnp.int32
      clock: updates applied so far.  # shape=(), dtype=jnp.int32
    """

    accumulator: jax.Array
    last_step: jax.Array | None
    clock: jax.Array


class RowwiseAdagradNumbers(NamedTuple):
    """The numbers of a `RowwiseAdagrad`, each a scalar or one value per touched row.

    Attributes:
      learning_rate: see the rule
      eps: see the rule
      accumulator_decay: the accumulator is multiplied by e to its power once per update; 0 or less
      weight_decay: so are the weights
    """

    learning_rate: Any
    eps: Any
    accumulator_decay: Any
    weight_decay: Any


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Rowwise Adagrad with decay of the accumulator and of the weights.

    For a touched row with summed gradient G (rounded to the table's dtype), q the sum of G's
    squares over the full width, and bf() rounding to a bfloat16 table's dtype (nothing for
    float32), all else in float32:

        accumulator <- accumulator * d + q / emb_width
        row <- bf(bf(row * w) + bf(-(learning_rate / (sqrt(accumulator) + eps)) * G))

    What exceeds the largest finite number, of float32 or of the table's dtype, is kept at it: rows
    and accumulators stay finite.

    Eagerly, each update decays by d = 2^(-1 / half_life_steps) and w = exp(-weight_decay). Lazily,
    a row catches up with the n = max(0, clock - last_step) updates since its own last one:
    d = 2^(-n / half_life_steps) and w = exp(-n * weight_decay). Rows that are not touched keep
    every bit either way.

    For example, width 4, learning rate 1, and gradient [4, 0, 0, 0] on a row of zeros whose
    accumulator is 0: the accumulator becomes 16 / 4 = 4, and the row -4 / sqrt(4) = -2 in its first
    column.

    Source: Duchi, Hazan and Singer (2011), with one accumulator per row as in Gupta, Bengio and
    Weston (2014).

    Attributes:
      learning_rate: a non-negative number, or a traced scalar such as a schedule's value.
      eps: added to the root; positive.
      half_life_steps: applied updates after which the accumulator has halved; None never decays.
      weight_decay: rate of the weights' decay per update.
      lazy: whether rows catch up with decay when they are touched.

    Raises:
      ValueError: a parameter is not in its range.
    """

    learning_rate: float | jax.Array
    eps: float = 1e-8
    half_life_steps: float | None = None
    weight_decay: float = 0.0
    lazy: bool = False

    def __post_init__(self) -> None:
        """Checks the parameters; an array's value is not read."""
        if isinstance(self.learning_rate, jax.Array):
            rate = self.learning_rate
            if rate.ndim != 0 or not jnp.issubdtype(rate.dtype, jnp.floating):
                raise ValueError(
                    "learning_rate as an array must be a floating-point scalar, "
                    f"not {rate.dtype}{rate.shape}"
                )
        else:
            _check_number("learning_rate", self.learning_rate, positive=False)
            # One type, so that rules which differ in the rate alone share a program.
            object.__setattr__(self, "learning_rate", float(self.learning_rate))
        _check_number("eps", self.eps, positive=True)
        if self.half_life_steps is not None:
            _check_number("half_life_steps", self.half_life_steps, positive=True)
        _check_number("weight_decay", self.weight_decay, positive=False)
        if not isinstance(self.lazy, bool):
            raise ValueError(f"lazy={self.lazy!r} must be True or False")

    def init(self, vocab: int) -> RowwiseAdagradState:
        """The state of a table of `vocab` rows before the first update."""
        return RowwiseAdagradState(
            accumulator=jnp.zeros((vocab,), jnp.float32),
            last_step=jnp.zeros((vocab,), jnp.int32) if self.lazy else None,
            clock=jnp.zeros((), jnp.int32),
        )

    def apply(
        self,
        table: jax.Array,
        state: RowwiseAdagradState,
        rows: TouchedRows,
        *,
        emb_width: int,
        implementation: kernels.Implementation,
    ) -> tuple[jax.Array, RowwiseAdagradState]:
        """See `UpdateRule.apply`."""
        return self.apply_by_row(
            self.numbers(), table, state, rows, emb_width=emb_width, implementation=implementation
        )

    @property
    def kind(self) -> bool:
        """See `xrex.rules.stacked.StackableRule`."""
        return self.lazy

    def numbers(self) -> RowwiseAdagradNumbers:
        """See `xrex.rules.stacked.StackableRule`."""
        half_life = self.half_life_steps
        return RowwiseAdagradNumbers(
            learning_rate=self.learning_rate,
            eps=self.eps,
            accumulator_decay=0.0 if half_life is None else -math.log(2) / half_life,
            weight_decay=-self.weight_decay,
        )

    def apply_by_row(
        self,
        numbers: RowwiseAdagradNumbers,
        table: jax.Array,
        state: RowwiseAdagradState,
        rows: TouchedRows,
        *,
        emb_width: int,
        implementation: kernels.Implementation,
    ) -> tuple[jax.Array, RowwiseAdagradState]:
        """See `xrex.rules.stacked.StackableRule`."""
        elapsed, last_step = self._elapsed(state, rows)
        accumulator = read_values(state.accumulator, rows.ids)
        accumulator = accumulator * _decay(numbers.accumulator_decay, elapsed)
        accumulator = saturate(jnp.float32, accumulator + rows.square_sums / emb_width)
        rate = jnp.asarray(numbers.learning_rate, jnp.float32)
        eps = jnp.asarray(numbers.eps, jnp.float32)
        step = saturate(jnp.float32, -(rate / (jnp.sqrt(accumulator) + eps)))
        (table,) = kernels.update_rows(
            (table,),
            rows.ids,
            (rows.gradients,),
            (_decay(numbers.weight_decay, elapsed), step),
            _row_function(table.dtype),
            implementation=implementation,
        )
        return table, RowwiseAdagradState(
            accumulator=write_values(state.accumulator, rows.ids, accumulator),
            last_step=last_step,
            clock=tick(state.clock, rows.valid),
        )

    def _elapsed(
        self, state: RowwiseAdagradState, rows: TouchedRows
    ) -> tuple[jax.Array, jax.Array | None]:
        """Updates that each row's decay stands for, float32, and the new `last_step`."""
        if state.last_step is None:
            return jnp.ones(rows.ids.shape, jnp.float32), None
        last_step = read_values(state.last_step, rows.ids)
        elapsed = jnp.maximum(state.clock - last_step, 0)
        # The clock, by way of what was read: otherwise XLA reads `last_step` again after it was
        # written, from a copy. The barrier alone is not enough on CPUs, which drop it.
        now = elapsed + jnp.minimum(last_step, state.clock)
        elapsed, now = jax.lax.optimization_barrier((elapsed, now))
        return elapsed.astype(jnp.float32), write_values(state.last_step, rows.ids, now)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """The learning rate is a leaf; all else is static."""
        return (self.learning_rate,), (
            self.eps,
            self.half_life_steps,
            self.weight_decay,
            self.lazy,
        )

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any]) -> "RowwiseAdagrad":
        """Without checks: JAX passes placeholders through here."""
        rule = object.__new__(cls)
        names = ("learning_rate", "eps", "half_life_steps", "weight_decay", "lazy")
        for name, value in zip(names, (*leaves, *static), strict=True):
            object.__setattr__(rule, name, value)
        return rule


def _decay(rate: Any, elapsed: jax.Array) -> jax.Array:
    """What decay at a rate per update leaves after so many updates."""
    if isinstance(rate, float) and rate == 0:
        return jnp.ones_like(elapsed)
    return jnp.exp(elapsed * jnp.asarray(rate, jnp.float32))


def _row_function(dtype: jax.typing.DTypeLike) -> kernels.RowFunction:
    def new_rows(
        rows: tuple[jax.Array, ...], operands: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        (row,), (gradient,), (decay, step) = rows, operands, scalars
        kept = kernels.round_to(dtype, row * decay)
        change = kernels.round_to(dtype, saturate(dtype, step * gradient))
        return (saturate(dtype, kernels.round_to(dtype, kept + change)),)

    return new_rows


def _check_number(name: str, value: object, *, positive: bool) -> None:
    is_number = isinstance(value, int | float | np.integer | np.floating)
    is_number = is_number and not isinstance(value, bool)
    lowest = _SMALLEST if positive else 0
    if not is_number or not lowest <= value <= _LARGEST:  # type: ignore[operator]
        wanted = "positive" if positive else "non-negative"
        raise ValueError(f"{name}={value!r} must be a {wanted} number that float32 can hold")
