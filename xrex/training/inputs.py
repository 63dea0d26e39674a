"""The inputs of a batch: which leaves are per example, and how they come onto the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.checks import check_fits
from xrex.training import dense_params
from xrex.training.config import StepConfig


def per_example(config: StepConfig, inputs: Any) -> Any:
    """Which leaves are cut into micro-batches: a bool for each.

    As the pipeline's `per_example` names them; else those whose first axis has an entry for every
    example of the batch.

    Raises:
      ValueError: `per_example` does not fit the inputs, or a leaf that it names cannot be cut.
    """
    if config.per_example is None:
        return jax.tree.map(lambda leaf: np.shape(leaf)[:1] == (config.batch_size,), inputs)
    named = _named(config, inputs)
    jax.tree_util.tree_map_with_path(
        lambda path, leaf, flag: _check_cut(config, path, leaf) if flag else None, inputs, named
    )
    return named


def _named(config: StepConfig, inputs: Any) -> Any:
    """What `per_example` says of each leaf."""
    try:
        return jax.tree.map(
            lambda flag, part: jax.tree.map(lambda _: bool(flag), part), config.per_example, inputs
        )
    except ValueError as cause:
        raise ValueError(
            f"per_example={config.per_example!r} is no tree of booleans over the batch's inputs, "
            f"{jax.tree.structure(inputs)}"
        ) from cause


def _check_cut(config: StepConfig, path: Any, leaf: Any) -> None:
    ranks = config.handle.group_size
    pieces = config.accumulation_steps * ranks
    if np.ndim(leaf) == 0 or np.shape(leaf)[0] % pieces:
        raise ValueError(
            f"inputs{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, and "
            f"accumulation_steps={config.accumulation_steps} on {ranks} ranks needs a first axis "
            f"that is a multiple of {pieces}"
        )


def split(config: StepConfig, inputs: Any) -> tuple[Any, Any]:
    """The leaves that are per example, and the others; None in the place of the other's leaves."""
    flags = per_example(config, inputs)
    cut = jax.tree.map(lambda leaf, flag: leaf if flag else None, inputs, flags)
    whole = jax.tree.map(lambda leaf, flag: None if flag else leaf, inputs, flags)
    return cut, whole


def merge(cut: Any, whole: Any) -> Any:
    """Undoes `split`."""
    return dense_params.merge(cut, whole)


def place(config: StepConfig, inputs: Any) -> Any:
    """The inputs on the mesh, as copies of what the caller may write to.

    Leaves that `per_example` names, or, where it names none, those whose first axis divides evenly,
    are sharded over the data axis; others are replicated. JAX arrays that lie on the mesh's devices
    stay as they are sharded.

    Raises:
      TypeError: a leaf is no array or number.
      ValueError: an integer that does not fit in the type that it gets on the devices.
    """
    dense_params.check("inputs", inputs)
    flags = per_example(config, inputs)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, flag: _place_leaf(config, path, leaf, flag), inputs, flags
    )


def pad(config: StepConfig, inputs: Any, examples: int) -> Any:
    """Inputs of so many examples with zeros behind them, up to those of a whole batch.

    Leaves that `per_example` names, or, where it names none, those whose first axis has an entry
    for every example.

    Raises:
      ValueError: a leaf that `per_example` names has no such axis.
    """
    missing = config.batch_size - examples
    if config.per_example is None:
        flags = jax.tree.map(lambda leaf: np.shape(leaf)[:1] == (examples,), inputs)
    else:
        flags = _named(config, inputs)

    def padded(path: Any, leaf: Any, flag: bool) -> Any:
        if not flag or not missing:
            return leaf
        if np.shape(leaf)[:1] != (examples,):
            raise ValueError(
                f"inputs{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, and the batch has "
                f"{examples} examples"
            )
        widths = [(0, missing), *[(0, 0)] * (np.ndim(leaf) - 1)]
        is_jax = isinstance(leaf, jax.Array)
        return jnp.pad(leaf, widths) if is_jax else np.pad(np.asarray(leaf), widths)

    return jax.tree_util.tree_map_with_path(padded, inputs, flags)


def _place_leaf(config: StepConfig, path: Any, leaf: Any, is_per_example: bool) -> Any:
    handle = config.handle
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return leaf
    check_fits(f"inputs{jax.tree_util.keystr(path)}", leaf)
    if isinstance(leaf, jax.Array) and placement.is_on_mesh(handle, leaf):
        return placement.put_copy(leaf, leaf.sharding)
    divides = np.ndim(leaf) > 0 and np.shape(leaf)[0] % handle.group_size == 0
    is_sharded = is_per_example or (divides and config.per_example is None)
    spec = placement.token_spec(handle) if is_sharded else placement.REPLICATED
    return placement.put_copy(leaf, placement.sharding(handle, spec, np.ndim(leaf)))
