"""One call of a mapped function, taken apart: what selects its program, and its arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from xrex.checked_pmap import checks
from xrex.checked_pmap.axes import broadcast_axes
from xrex.checked_pmap.checks import Leaf
from xrex.checked_pmap.mapping import Mapping


class Call(NamedTuple):
    """One call, taken apart and checked: all that selects the program, and its arguments."""

    treedef: Any  # of (args, kwargs)
    statics: tuple[tuple[type, Any], ...]  # with their types: 1 == True, yet not the same program
    size: int  # entries along the mapped axis, of this process
    axes: tuple[int | None, ...]  # one per leaf
    leaves: list[Any]
    args: tuple[Any, ...]  # without the static ones


def inside_map() -> bool:
    """Whether this is inside another pmap or shard_map."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def check_not_nested() -> None:
    """Raises ValueError inside another pmap or shard_map, and under jax.set_mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return
    if mesh.manual_axes:
        error = ValueError(
            "pmap cannot be called inside pmap or shard_map: the devices are already mapped over "
            f"{mesh.manual_axes}."
        )
        error.add_note(
            "Use jax.vmap for the inner map, or one jax.shard_map over a mesh with both axes."
        )
    else:
        error = ValueError(
            f"pmap cannot be called under jax.set_mesh: it makes its own mesh, but {mesh} is set."
        )
        error.add_note("Call it outside, or use jax.shard_map with the mesh that is set.")
    raise error


def read_call(
    mapping: Mapping,
    axes_of: dict[Any, tuple[int | None, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Takes a call apart; `axes_of` remembers the axes for each tree of arguments.

    Raises:
      ValueError: the arguments contradict `mapping` or one another.
    """
    statics: tuple[tuple[type, Any], ...] = ()
    if mapping.static_argnums:
        checks.check_static_arguments(mapping.static_argnums, args)
        statics = tuple((type(args[i]), args[i]) for i in mapping.static_argnums)
        args = tuple(args[i] for i in mapping.dynamic_argnums(len(args)))
    leaves, treedef = jax.tree.flatten((args, kwargs))
    axes = axes_of.get(treedef)
    if axes is None:
        axes = axes_of[treedef] = _input_axes(mapping, args, kwargs)
    # The common case in one pass; whatever it cannot say is said by infer_axis_size.
    try:
        sizes = {
            leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
        }
    except (AttributeError, IndexError):
        sizes = set()
    size = sizes.pop() if len(sizes) == 1 else 0
    if not size:
        size = checks.infer_axis_size(_describe_leaves(mapping, args, kwargs, axes))
    return Call(treedef, statics, size, axes, leaves, args)


def leaf_paths(mapping: Mapping, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Where each leaf of a call sits, e.g. "args[0]['w']"; `args` lack the static ones."""
    positions = mapping.dynamic_argnums(len(args) + len(mapping.static_argnums))
    named = {f"args[{position}]": arg for position, arg in zip(positions, args, strict=True)} | {
        f"kwargs[{key!r}]": kwargs[key] for key in sorted(kwargs)
    }
    return [
        name + keystr(path)
        for name, argument in named.items()
        for path, _ in tree_leaves_with_path(argument)
    ]


def choose_devices(mapping: Mapping, size: int) -> tuple[jax.Device, ...]:
    """The devices for `size` local entries, over all processes; checks axis_size against them."""
    if mapping.devices is not None:
        owners = [device.process_index for device in mapping.devices]
        checks.check_axis_size(mapping.axis_size, size, len(set(owners)), len(mapping.devices))
        checks.check_given_devices(owners, size, jax.process_index())
        return mapping.devices
    num_processes = jax.process_count()
    checks.check_axis_size(mapping.axis_size, size, num_processes)
    checks.check_device_count(size, jax.local_device_count())
    return tuple(
        device
        for process in range(num_processes)
        for device in jax.local_devices(process_index=process)[:size]
    )


def _input_axes(
    mapping: Mapping, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | None, ...]:
    """The mapped axis of each leaf of (args, kwargs); `args` lack the static ones."""
    in_axes = mapping.in_axes
    if mapping.static_argnums and isinstance(in_axes, tuple):
        # in_axes counts the static arguments, too; their entries mean nothing.
        positions = mapping.dynamic_argnums(len(args) + len(mapping.static_argnums))
        in_axes = tuple(in_axes[i] for i in positions if i < len(in_axes))
    try:
        return broadcast_axes((in_axes, 0), (args, kwargs))
    except ValueError as cause:
        error = ValueError(
            f"pmap in_axes is not a tree prefix of the positional arguments: got {mapping.in_axes}."
        )
        error.add_note(
            "Give one entry for each argument, in a tuple (static ones included), or one for all. "
            "Keyword arguments have none: they are mapped over axis 0."
        )
        raise error from cause


def _describe_leaves(
    mapping: Mapping,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: Sequence[int | None],
) -> list[Leaf]:
    """The leaves of a call with their paths, for an error."""
    paths = leaf_paths(mapping, args, kwargs)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves((args, kwargs))]
    return [Leaf(*leaf) for leaf in zip(paths, shapes, axes, strict=True)]
