"""`pmap`: a function mapped over devices, with the size of the mapped axis checked everywhere.

The mapped function runs once a device, on that device's entry of every mapped argument, inside a
`jax.shard_map` over one mesh axis. What the function computes is what `jax.pmap` computes; what
differs is that a call which cannot mean what it says is an error before anything is launched.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from xrex.checked_pmap import checks, processes
from xrex.checked_pmap.checks import ABSENT, Leaf, ProcessReport
from xrex.checked_pmap.program import Call, Mapping, Program, broadcast_axes, build_program

# The axis's name when the caller gives none.
_DEFAULT_AXIS_NAME = "_pmap_axis"


class PmappedFunction(Protocol):
    """What `pmap` returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the mapped function on every device."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the program for these arguments (arrays or `jax.ShapeDtypeStruct`)."""


def pmap(
    fun: Callable[..., Any],
    axis_name: Hashable = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> PmappedFunction:
    """Maps `fun` over devices: entry i of every mapped argument goes to device i.

    Takes what `jax.pmap` takes (without `backend`) and computes what it computes: collectives see
    the axis `axis_name`, gradients taken inside `fun` are those of `jax.pmap`. Beyond it, the sizes
    of all mapped arguments are compared, with one another, with `axis_size` and with the devices,
    and an output that `out_axes=None` would reduce to the first device's value is an error.

    One program is compiled for a signature: the tree of the arguments, their shapes and dtypes,
    the values of the static ones. Works under `jax.jit`, `jax.grad` and `jax.vmap` when the devices
    are those of one process; not inside another pmap or `shard_map`, and not under `jax.set_mesh`.

    Refused here, though `jax.pmap` takes it: negative axes and argument numbers (it misplaces or
    ignores them); more given devices than entries (it drops some); an `axis_size` that is no int;
    `out_axes=None` for an output that varies or cannot be shown not to (a plain `all_gather`); and
    over several processes, a call under a transformation (it sees one process only).

    In several processes each call is made by every process, with equally many local entries;
    results are local, too. Before a signature's first launch the processes compare their sizes, so
    that a wrong `axis_size` on one of them is an error on all; later launches are not compared.

    Args:
      fun: takes and returns trees of arrays: one entry of each mapped argument, without its mapped
        axis, and the whole of the others.
      axis_name: the mapped axis's name, for collectives in `fun`.
      in_axes: which axis of each positional argument is mapped: an int counted from the front, None
        for a value that every device gets whole, or a tree prefix of the arguments. Keyword
        arguments are mapped over axis 0.
      out_axes: where the mapped axis goes in each output: as in_axes. None: the output is the same
        on every device and is returned once. This is proved while tracing, by tracing `fun` a
        second time with `check_vma=True`.
      static_broadcasted_argnums: positional arguments that are hashable Python values; a new value
        compiles a new program.
      devices: the devices to use, over all processes, in the order of the entries; by default the
        first ones of each process.
      axis_size: the size of the mapped axis, over all processes. Checked; never needed.
      donate_argnums: positional arguments whose buffers the program may reuse. They must not be
        used after the call.

    Returns:
      The mapped function. It has `.lower(*args, **kwargs)`, which returns a `jax.stages.Lowered`
      (over global arrays when there are several processes).

    Raises:
      TypeError: `fun` is not callable; an axis, size or argument number is not an int.
      ValueError: a negative axis or argument number; an argument both static and donated; no
        device, or one given twice. From a call: every mismatch of arguments, `in_axes`,
        `out_axes`, `axis_size` and devices; an output with `out_axes=None` that varies.
      NotImplementedError: from a call that is being traced, over several processes.

    With two devices or more:

    >>> share = pmap(lambda x: x / jax.lax.psum(x, "i"), "i")
    >>> share(np.array([1.0, 3.0], np.float32))
    Array([0.25, 0.75], dtype=float32)
    """
    mapping = _checked_mapping(
        fun,
        axis_name,
        in_axes,
        out_axes,
        static_broadcasted_argnums,
        devices,
        axis_size,
        donate_argnums,
    )
    axes_of: dict[Any, tuple[int | None, ...]] = {}
    programs: dict[Hashable, Program] = {}

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Call]:
        _check_not_nested()
        size = None
        try:
            call = _read_call(mapping, axes_of, args, kwargs)
            size = call.size
            key = (call.treedef, call.statics, size)
            program = programs.get(key)
            if program is not None:
                return program, call
            chosen = _choose_devices(mapping, size)
        except Exception:
            # Before the first launch the others wait for a report; after it they may not.
            if not programs:
                _exchange_reports(mapping, size, accepted=False)
            raise
        checks.check_reports(_exchange_reports(mapping, size, accepted=True))
        programs[key] = program = build_program(mapping, call, chosen)
        return program, call

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        program, call = find(args, kwargs)
        if jax.process_count() > 1:
            return _run_across_processes(program, call)
        return program.run(*call.args, kwargs) if kwargs else program.run(*call.args)

    def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        program, call = find(args, kwargs)
        dynamic = call.args
        if jax.process_count() > 1:
            shapes = processes.to_global_shapes(call.leaves, program.mesh, program.in_specs)
            dynamic, kwargs = jax.tree.unflatten(call.treedef, shapes)
        if not kwargs:
            return program.run.lower(*dynamic)
        # jax.jit takes no in_shardings beside keyword arguments; they follow from shard_map.
        return jax.jit(program.function, donate_argnums=program.donate).lower(*dynamic, **kwargs)

    mapped.lower = lower  # type: ignore[attr-defined]
    return cast(PmappedFunction, mapped)


def _checked_mapping(
    fun: Callable[..., Any],
    axis_name: Hashable,
    in_axes: Any,
    out_axes: Any,
    static_argnums: int | Iterable[int],
    devices: Sequence[jax.Device] | None,
    axis_size: int | None,
    donate_argnums: int | Iterable[int],
) -> Mapping:
    """Checks what can be checked before any argument is seen, without touching a device."""
    if not callable(fun):
        raise TypeError(f"pmap expects a callable, but got {fun!r}.")
    hash(axis_name)  # raises TypeError
    if isinstance(axis_name, tuple):
        raise TypeError(f"pmap maps over one axis, but axis_name is the tuple {axis_name!r}.")
    checks.check_axes("in_axes", in_axes)
    checks.check_axes("out_axes", out_axes)
    static = checks.check_argnums("static_broadcasted_argnums", static_argnums)
    donated = checks.check_argnums("donate_argnums", donate_argnums)
    checks.check_static_and_donated(static, donated)
    if devices is not None:
        devices = tuple(devices)
        if not devices:
            raise ValueError("'devices' argument to pmap must be non-empty, or None.")
        if len(set(devices)) != len(devices):
            raise ValueError(f"pmap devices must differ, but got one twice: {list(devices)}.")
    return Mapping(
        fun=fun,
        axis_name=_DEFAULT_AXIS_NAME if axis_name is None else axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=static,
        donate_argnums=donated,
        devices=devices,
        axis_size=checks.check_axis_size_type(axis_size),
    )


def _read_call(
    mapping: Mapping,
    axes_of: dict[Any, tuple[int | None, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Takes a call apart; `axes_of` remembers the axes for each tree of arguments."""
    statics: tuple[tuple[type, Any], ...] = ()
    if mapping.static_argnums:
        checks.check_static_arguments(mapping.static_argnums, args)
        statics = tuple((type(args[i]), args[i]) for i in mapping.static_argnums)
        args = tuple(args[i] for i in _dynamic_argnums(mapping, len(args)))
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


def _check_not_nested() -> None:
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


def _dynamic_argnums(mapping: Mapping, num_args: int) -> list[int]:
    """The positions of the arguments that are not static."""
    return [i for i in range(num_args) if i not in mapping.static_argnums]


def _input_axes(
    mapping: Mapping, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | None, ...]:
    """The mapped axis of each leaf of (args, kwargs); `args` lack the static ones."""
    in_axes = mapping.in_axes
    if mapping.static_argnums and isinstance(in_axes, tuple):
        # in_axes counts the static arguments, too; their entries mean nothing.
        positions = _dynamic_argnums(mapping, len(args) + len(mapping.static_argnums))
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
    positions = _dynamic_argnums(mapping, len(args) + len(mapping.static_argnums))
    named = {f"args[{position}]": arg for position, arg in zip(positions, args, strict=True)} | {
        f"kwargs[{key!r}]": kwargs[key] for key in sorted(kwargs)
    }
    found = [
        (name + keystr(path), np.shape(leaf))
        for name, argument in named.items()
        for path, leaf in tree_leaves_with_path(argument)
    ]
    return [Leaf(name, shape, axis) for (name, shape), axis in zip(found, axes, strict=True)]


def _choose_devices(mapping: Mapping, size: int) -> tuple[jax.Device, ...]:
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


def _exchange_reports(mapping: Mapping, size: int | None, *, accepted: bool) -> list[ProcessReport]:
    """Tells the other processes how this one sees the call, and returns what all of them say."""
    if mapping.devices is None and jax.process_count() == 1:
        return []
    devices = jax.devices() if mapping.devices is None else mapping.devices
    if len({device.process_index for device in devices}) == 1:
        return []
    report = ProcessReport(
        process_index=jax.process_index(),
        accepted=int(accepted),
        axis_size=ABSENT if mapping.axis_size is None else mapping.axis_size,
        local_axis_size=ABSENT if size is None else size,
        num_devices=ABSENT if mapping.devices is None else len(mapping.devices),
    )
    return processes.gather_reports(report, devices)


def _run_across_processes(program: Program, call: Call) -> Any:
    """Runs a program over several processes on this process's part of the arguments."""
    leaves = processes.to_global(call.leaves, program.mesh, program.in_specs)
    args, kwargs = jax.tree.unflatten(call.treedef, leaves)
    outputs = program.run(*args, kwargs) if kwargs else program.run(*args)
    return processes.to_local(outputs, program.mesh, program.out_specs)
