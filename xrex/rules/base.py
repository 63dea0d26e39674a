"""What an update rule is: a state, and how touched rows and their state change."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp

from pallas_kernels import api as kernels


class TouchedRows(NamedTuple):
    """What an update rule is told of the rows to change, one shard's.

    Attributes:
      ids: the rows to change; `vocab` where an entry is to be skipped, as all are in an update that
        is not valid.  # shape=(num_unique,), dtype=jnp.int32
      gradients: each row's summed gradient, rounded to the table's dtype; this shard's columns.
        # shape=(num_unique, shard_width), dtype=jnp.float32
      square_sums: the gradient's squares, summed over the full width: the same on every rank.
        # shape=(num_unique,), dtype=jnp.float32
      valid: whether the update is applied.  # shape=(), dtype=bool
    """

    ids: jax.Array
    gradients: jax.Array
    square_sums: jax.Array
    valid: jax.Array


class UpdateRule(Protocol):
    """How rows change. Implementations are frozen dataclasses registered as pytrees.

    Leaves of the pytree are what may be traced (the learning rate); the rest is static.
    """

    def init(self, vocab: int) -> Any:
        """The state of a table of `vocab` rows before the first update.

        Leaves of two dimensions, (vocab, emb_width), are sharded like the table; all others are
        replicated.
        """

    def apply(
        self,
        table: jax.Array,
        state: Any,
        rows: TouchedRows,
        *,
        emb_width: int,
        implementation: kernels.Implementation,
    ) -> tuple[jax.Array, Any]:
        """The table and state after one update, of one shard.

        Must change nothing where `rows.ids` has no row, nor anything unless `rows.valid`, and must
        write finite numbers alone: gradients and their sums are finite, what the rule makes of
        them is its own (`saturate` keeps it at the largest number).
        """


RuleOrSchedule = UpdateRule | Callable[[jax.Array], UpdateRule]


def rule_at(rule: RuleOrSchedule, step: jax.Array) -> UpdateRule:
    """The update rule for the gradients of batch `step`."""
    if is_rule(rule):
        return rule
    schedule: Any = rule
    made: UpdateRule = schedule(step)
    return made


def rule_of_any_step(rule: RuleOrSchedule) -> UpdateRule:
    """A rule for what is the same in every step: its type, its kind, its state's shape.

    No device is touched, as a model may be planned where there is none: the numbers of a schedule's
    rule are those of a trace, not to be read.
    """
    if is_rule(rule):
        return rule
    found: list[UpdateRule] = []
    step = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(lambda step: found.append(rule_at(rule, step)), step)
    return found[0]


def is_rule(given: RuleOrSchedule) -> TypeGuard[UpdateRule]:
    """Whether it is a rule, rather than a schedule."""
    # A rule may have a __call__ of its own: what tells it from a schedule is what it can do.
    return hasattr(given, "apply") and hasattr(given, "init")


def is_finite(rule: UpdateRule) -> jax.Array:
    """Whether every number that a rule brings in, such as a traced learning rate, is finite."""
    finite = jnp.ones((), bool)
    for leaf in jax.tree.leaves(rule):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            finite &= jnp.all(jnp.isfinite(leaf))
    return finite


def check_state(rule: UpdateRule, state: Any, vocab: int, columns: int) -> None:
    """Raises unless the state is one that `rule.init(vocab)` could have grown into.

    Args:
      rule: the update rule.
      state: its state, whole or one shard's.
      vocab: rows of the table.
      columns: columns of the table, or of one shard of it.

    Raises:
      ValueError: a leaf is missing, unknown, or of another shape, as in the state of another table
        or of a rule with other options.
      TypeError: a leaf has another dtype.
    """
    wanted = _leaves(jax.eval_shape(lambda: rule.init(vocab)))
    found = _leaves(state)
    if wanted.keys() != found.keys():
        raise ValueError(
            f"async_emb state has the leaves {sorted(found)}, and {type(rule).__name__} with these "
            f"options keeps {sorted(wanted)}"
        )
    for name, leaf in wanted.items():
        shape = (vocab, columns) if len(leaf.shape) == 2 else leaf.shape
        if jnp.shape(found[name]) != shape:
            raise ValueError(
                f"async_emb state{name} has shape {jnp.shape(found[name])}, and must have {shape}"
            )
        dtype = jnp.result_type(found[name])  # Of a Python number too, such as a saved clock.
        if dtype != leaf.dtype:
            raise TypeError(f"async_emb state{name} must be {leaf.dtype}, not {dtype}")


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, such as ".accumulator"."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def read_values(values: jax.Array, ids: jax.Array) -> jax.Array:
    """One value per row, (vocab,), read at `ids`; zeros where there is no such row."""
    return values.at[ids].get(mode="fill", fill_value=0)


def write_values(values: jax.Array, ids: jax.Array, new: jax.Array) -> jax.Array:
    """Sets one value per row, (vocab,), at `ids`; skips those behind the last row."""
    return values.at[ids].set(new.astype(values.dtype), mode="drop")


def saturate(dtype: jax.typing.DTypeLike, x: jax.Array) -> jax.Array:
    """Keeps float32 values at the largest finite one of `dtype`; NaN stays NaN."""
    largest = jnp.float32(jnp.finfo(dtype).max)
    return jnp.minimum(jnp.maximum(x, -largest), largest)


def tick(clock: jax.Array, valid: jax.Array) -> jax.Array:
    """The clock of applied updates, one later when this one is applied."""
    return clock + valid.astype(jnp.int32)
