"""Trees of axes, in which None is a leaf: a value that every device gets whole."""

from collections.abc import Callable
from typing import Any

import jax

# Stands for None in a tree of axes, where None would be a subtree without leaves.
_WHOLE = object()


def map_axes(fun: Callable[[int | None], Any], axes: Any) -> Any:
    """Applies `fun` to every axis of a tree of axes, None included."""
    return jax.tree.map(fun, axes, is_leaf=_is_none)


def axes_leaves(axes: Any) -> list[int | None]:
    """The axes of a tree of axes, None included."""
    return jax.tree.leaves(axes, is_leaf=_is_none)


def broadcast_axes(axes: Any, tree: Any) -> tuple[int | None, ...]:
    """Returns the axis of each leaf of `tree`, given `axes` for a tree prefix of it.

    Raises:
      ValueError: `axes` is not a tree prefix.
    """
    marked = map_axes(lambda axis: _WHOLE if axis is None else axis, axes)
    spread = jax.tree.broadcast(marked, tree)
    return tuple(None if axis is _WHOLE else axis for axis in jax.tree.leaves(spread))


def _is_none(axis: Any) -> bool:
    return axis is None
