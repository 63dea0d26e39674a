"""`pmap`: a function mapped over devices, with the size of the mapped axis checked everywhere.

The mapped function runs once per device, on that device's entry of every mapped argument, inside a
`jax.shard_map` over one mesh axis. What the function computes is what `jax.pmap` computes; what
differs is that a call which cannot mean what it says is an error before anything is launched.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, cast

import jax

from xrex.checked_pmap import processes
from xrex.checked_pmap.call import Call, check_not_nested, choose_devices, inside_map, read_call
from xrex.checked_pmap.mapping import Mapping, make_mapping
from xrex.checked_pmap.program import Program, build_program
from xrex.checked_pmap.together import launch_alone, together


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

    In several processes each call is made by every process that owns one of the devices, in the
    same order, with equally many local entries; results are local, too. Before each launch the
    processes tell one another what they would launch (the function, its arguments' tree, shapes and
    dtypes, static values, sizes, devices and a digest of the traced program), or what went wrong.
    If one of them rejects its call, would launch something else, or does not come within 30 seconds
    (`XREX_PMAP_SECONDS` in the environment changes that), no process launches, and all of them
    raise. `lower` launches nothing and may be called by one process alone.

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
      TimeoutError: from a call over several processes: one did not come to it in time.
      RuntimeError: from such a call: `jax.distributed` was not initialized.

    With two devices or more:

    >>> import numpy as np
    >>> share = pmap(lambda x: x / jax.lax.psum(x, "i"), "i")
    >>> share(np.array([1.0, 3.0], np.float32))
    Array([0.25, 0.75], dtype=float32)
    """
    mapping = make_mapping(
        fun,
        axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=static_broadcasted_argnums,
        donate_argnums=donate_argnums,
        devices=devices,
        axis_size=axis_size,
    )
    return _mapped(mapping)


def _mapped(mapping: Mapping) -> PmappedFunction:
    """The function that `pmap` returns, with the programs that it has built so far."""
    axes_of: dict[Any, tuple[int | None, ...]] = {}
    programs: dict[Hashable, Program] = {}
    # Asked for at the first call, when there are devices.
    meeting = functools.cache(lambda: together(mapping))

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Call]:
        check_not_nested()
        call = read_call(mapping, axes_of, args, kwargs)
        key = (call.treedef, call.statics, call.size)
        program = programs.get(key)
        if program is None:
            chosen = choose_devices(mapping, call.size)
            programs[key] = program = build_program(mapping, call, chosen)
        return program, call

    @functools.wraps(mapping.fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if jax.process_count() == 1:
            program, call = find(args, kwargs)
            return program.run(*call.args, kwargs) if kwargs else program.run(*call.args)
        # Inside another map, which is refused, each process traces for itself.
        calls = None if inside_map() else meeting()
        if calls is not None:
            return calls(lambda: find(args, kwargs))
        return launch_alone(*find(args, kwargs))

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
