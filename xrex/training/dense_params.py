"""The dense parameters: which leaves are trained, and which are left alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def split(params: Any) -> tuple[Any, Any]:
    """The trainable leaves (of floating-point numbers) and all others.

    Each is the tree of the parameters with None in the place of the other's leaves: what
    optimizers see has no integers, booleans and random keys.
    """
    trainable = jax.tree.map(lambda leaf: leaf if is_trainable(leaf) else None, params)
    fixed = jax.tree.map(lambda leaf: None if is_trainable(leaf) else leaf, params)
    return trainable, fixed


def merge(trainable: Any, fixed: Any) -> Any:
    """Undoes `split`."""
    return jax.tree.map(
        lambda ours, other: other if ours is None else ours,
        trainable,
        fixed,
        is_leaf=lambda leaf: leaf is None,
    )


def is_trainable(leaf: Any) -> bool:
    """Whether a leaf has gradients."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, or the one that a number gets on the devices."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def check(name: str, tree: Any) -> None:
    """Raises TypeError for a leaf that is no array or number, by its path."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        if np.asarray(leaf).dtype.kind not in "biufcV":
            error = TypeError(
                f"{name}{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, and must be an "
                "array or a number"
            )
            error.add_note(
                "Keep functions and names out of the tree: close over them, or part them from the "
                "arrays, as equinox.partition and flax.nnx.split do."
            )
            raise error
