"""The checks of `xrex.pmap`: pure functions over sizes, paths and process numbers.

None of them touches a device or traces anything, so each can be called on its own, for instance in
a launcher, before the first array exists. Every error says what was found and the rule it breaks;
its notes say how to fix it.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax


class Leaf(NamedTuple):
    """One array of a call: where it sits among the arguments, its shape, its mapped axis."""

    path: str  # e.g. "args[0]['w']"
    shape: tuple[int, ...]  # per process, the mapped axis included
    axis: int | None  # None: the same value for every device


def _fail(error: Exception, *notes: str) -> NoReturn:
    for note in notes:
        error.add_note(note)
    raise error


def check_axes(name: str, axes: Any) -> None:
    """Checks that `axes` (pmap's `in_axes` or `out_axes`, as `name` says) is made of axes.

    Raises:
      TypeError: a leaf is neither an int nor None (bool and numpy integers are not ints here).
      ValueError: a leaf is negative.
    """
    leaves = jax.tree.leaves(axes)
    if not all(type(leaf) is int for leaf in leaves):
        raise TypeError(
            f"pmap {name} must be an int, None, or (nested) container with those types as leaves, "
            f"but got {axes}."
        )
    if any(leaf < 0 for leaf in leaves):
        _fail(
            ValueError(f"pmap {name} must not be negative, but got {axes}."),
            "Count the axis from the front: for an array of rank r, write r - 1 for -1.",
        )


def check_argnums(name: str, argnums: Any) -> tuple[int, ...]:
    """Returns positions of arguments, given as one int or several, as a sorted tuple.

    Raises:
      TypeError: a position is not an int.
      ValueError: a position is negative.
    """
    several = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
    for argnum in several:
        if isinstance(argnum, bool) or not isinstance(argnum, int):
            raise TypeError(f"pmap {name} must be an int or a collection of ints, got {argnums!r}.")
        if argnum < 0:
            _fail(
                ValueError(f"pmap {name} must not be negative, but got {argnums!r}."),
                "Count positional arguments from the front, starting at 0.",
            )
    return tuple(sorted(set(several)))


def check_static_and_donated(static: Sequence[int], donated: Sequence[int]) -> None:
    """Checks that no argument is both static and donated.

    Raises:
      ValueError: one is.
    """
    if both := sorted(set(static) & set(donated)):
        _fail(
            ValueError(
                f"pmap static_broadcasted_argnums {tuple(static)} and donate_argnums "
                f"{tuple(donated)} both name argument {both[0]}."
            ),
            "A static argument has no buffer to donate: name it in one of the two only.",
        )


def check_static_arguments(static: Sequence[int], args: Sequence[Any]) -> None:
    """Checks that every static argument was passed by position and can be hashed.

    Raises:
      ValueError: one is missing, or is not hashable.
    """
    if static and max(static) >= len(args):
        raise ValueError(
            f"pmapped function has static_broadcasted_argnums={tuple(static)} but was called with "
            f"only {len(args)} positional argument{'' if len(args) == 1 else 's'}. All static "
            "broadcasted arguments must be passed positionally."
        )
    for argnum in static:
        try:
            hash(args[argnum])
        except TypeError as cause:
            error = ValueError(
                f"pmap static argument {argnum}, of type {type(args[argnum]).__name__}, is not "
                "hashable."
            )
            error.add_note(
                "A static argument selects the compiled program: pass a tuple for a list or a "
                "frozen dataclass for a dict, or make it an ordinary argument (in_axes=None gives "
                "every device the same value)."
            )
            raise error from cause


def check_axis_size_type(axis_size: Any) -> int | None:
    """Returns `axis_size` as an int, or None if it is None.

    Raises:
      TypeError: it is neither (a bool or a float is not a size).
    """
    if axis_size is None:
        return None
    try:
        if isinstance(axis_size, bool):
            raise TypeError
        return operator.index(axis_size)
    except TypeError:
        raise TypeError(f"pmap axis_size must be an int or None, but got {axis_size!r}.") from None


def infer_axis_size(leaves: Sequence[Leaf]) -> int:
    """Returns the size of the mapped axis, on which all mapped `leaves` must agree.

    Raises:
      ValueError: none is mapped; one has too few axes; two disagree; the mapped axis is empty.
    """
    mapped = [(leaf, leaf.axis) for leaf in leaves if leaf.axis is not None]
    if not mapped:
        _fail(
            ValueError("pmap requires at least one argument with a mapped axis."),
            "in_axes=None gives every device the same value, and axis_size alone maps nothing. Map "
            "at least one array, e.g. the devices' numbers: jax.numpy.arange(axis_size).",
        )
    for leaf, axis in mapped:
        if axis >= len(leaf.shape):
            _fail(
                ValueError(
                    f"pmap cannot map {leaf.path} over axis {axis}: it has rank {len(leaf.shape)} "
                    f"and shape {leaf.shape}."
                ),
                "Give in_axes=None for a value that every device gets whole, or stack one entry "
                "for each device along the mapped axis.",
            )
    (first, first_axis), *others = mapped
    size = first.shape[first_axis]
    for leaf, axis in others:
        if leaf.shape[axis] != size:
            _fail(
                ValueError(
                    "pmap got arguments whose mapped axes differ in size: "
                    f"{first.path} has {size} entries along axis {first_axis} (shape "
                    f"{first.shape}), {leaf.path} has {leaf.shape[axis]} along axis {axis} (shape "
                    f"{leaf.shape})."
                ),
                "Give both the same number of entries, or in_axes=None for the one that every "
                "device gets whole.",
            )
    if size == 0:
        raise ValueError(
            f"pmap needs at least one entry along the mapped axis, but {first.path} has shape "
            f"{first.shape} and is mapped over axis {first_axis}."
        )
    return size


def check_axis_size(
    axis_size: int | None,
    local_axis_size: int,
    process_count: int = 1,
    num_devices: int | None = None,
) -> None:
    """Checks a given `axis_size` against the mapped size that the arguments have.

    Args:
      axis_size: as given to pmap: the global size of the mapped axis; None accepts anything.
      local_axis_size: entries along the mapped axis of this process's arguments.
      process_count: processes that take part, each with `local_axis_size` entries.
      num_devices: with several processes, the number of devices given to pmap over all of them;
        None if none were given.

    Raises:
      ValueError: `axis_size` is not `local_axis_size` (one process), `num_devices` (several, with
        devices given) or `local_axis_size * process_count` (several, without).

    >>> check_axis_size(8, 4, process_count=2)
    >>> try:
    ...     check_axis_size(8, 4)
    ... except ValueError as error:
    ...     print(error)
    Specified axis_size 8 doesn't match received axis_size 4.
    """
    if process_count == 1:
        expected = local_axis_size
        explained = (
            f"axis_size={axis_size} was given to pmap; the mapped arguments have "
            f"{local_axis_size} entries along their mapped axis."
        )
    elif num_devices is not None:
        expected = num_devices
        explained = (
            f"axis_size={axis_size} is the global size; pmap was given {num_devices} devices, over "
            f"all processes, and this process passed {local_axis_size} entries."
        )
    else:
        expected = local_axis_size * process_count
        explained = (
            f"axis_size={axis_size} is the global size; this process passed {local_axis_size} "
            f"entries, so {process_count} processes pass {expected} together."
        )
    if axis_size is not None and axis_size != expected:
        _fail(
            ValueError(
                f"Specified axis_size {axis_size} doesn't match received axis_size "
                f"{local_axis_size}."
            ),
            explained,
            "Leave axis_size out, and pmap takes the size from the arguments;",
            f"or resize or pad the mapped axis, so that the global size is {axis_size};",
            "or compute axis_size from the batch, e.g. batch.shape[0] (times jax.process_count() "
            "when each process passes its own part), rather than from a device count.",
        )


def check_device_count(local_axis_size: int, available: int) -> None:
    """Checks that every mapped entry of a process has a device of its own.

    Raises:
      ValueError: there are more entries than devices.
    """
    if local_axis_size > available:
        _fail(
            ValueError(
                f"pmap maps over {local_axis_size} entries, but only {available} "
                f"device{' is' if available == 1 else 's are'} available."
            ),
            "Each entry runs on a device of its own: reshape to (devices, entries per device, ...) "
            "and use jax.vmap inside the mapped function.",
            f"On CPU, XLA_FLAGS=--xla_force_host_platform_device_count={local_axis_size} in the "
            "environment, set before JAX starts, gives that many devices.",
        )


def check_given_devices(
    device_processes: Sequence[int], local_axis_size: int, process_index: int = 0
) -> None:
    """Checks a list of devices given to pmap, by the process that owns each.

    Args:
      device_processes: the owner of each given device, in the order given.
      local_axis_size: entries along the mapped axis of this process's arguments.
      process_index: this process.

    Raises:
      ValueError: this process's devices are not as many as its entries, or the devices of one
        process are not neighbours in the list.
    """
    local = sum(owner == process_index for owner in device_processes)
    if local != local_axis_size:
        _fail(
            ValueError(
                f"pmap maps over {local_axis_size} entries, but was given {local} devices of this "
                f"process ({len(device_processes)} in all)."
            ),
            "Give exactly one device for each entry, e.g. devices=jax.devices()[:entries], or "
            "leave devices out.",
        )
    blocks = [
        owner
        for previous, owner in zip([None, *device_processes], device_processes, strict=False)
        if owner != previous
    ]
    if len(blocks) != len(set(blocks)):
        _fail(
            ValueError(
                "pmap devices of one process must be neighbours in `devices`, but their owners are "
                f"{list(device_processes)}."
            ),
            "Sort them: sorted(devices, key=lambda device: device.process_index).",
        )
