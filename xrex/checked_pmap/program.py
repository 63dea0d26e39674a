"""The compiled program behind a signature of `xrex.pmap`: a `jax.jit` around a `jax.shard_map`."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from xrex.checked_pmap.axes import axes_leaves, broadcast_axes, map_axes
from xrex.checked_pmap.call import Call
from xrex.checked_pmap.mapping import Mapping


class Program(NamedTuple):
    """A compiled program for one signature, and where its inputs and outputs lie."""

    function: Callable[..., Any]  # what `run` compiles
    run: Any  # a jax.jit of it: (*args) without keyword arguments, (*args, kwargs) with
    donate: tuple[int, ...]  # positions in args
    mesh: Mesh
    in_specs: tuple[PartitionSpec, ...]  # one per leaf
    out_specs: Any  # a tree prefix of the outputs


def build_program(mapping: Mapping, call: Call, devices: Sequence[jax.Device]) -> Program:
    """Returns the program for calls like `call`, on a mesh of `devices` in that order."""
    mesh = Mesh(np.array(devices), (mapping.axis_name,), axis_types=(AxisType.Auto,))
    in_specs = tuple(_spec(mapping, axis) for axis in call.axes)
    out_specs = map_axes(lambda axis: _spec(mapping, axis), mapping.out_axes)
    per_device = _per_device(mapping, call)
    whole_outputs = None in axes_leaves(mapping.out_axes)

    def block(*blocks: Any) -> Any:
        return _insert_mapped_axes(mapping, per_device(*blocks))

    def function(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        _check_no_explicit_sharding(leaves)
        # Without check_vma gradients inside the function are those of jax.pmap: of each device's
        # own output, where check_vma would sum them over the axis.
        run = jax.shard_map(
            block, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        outputs = run(*leaves)
        if whole_outputs:
            _check_whole_outputs(mapping, per_device, mesh, in_specs, leaves)
        return outputs

    function.__name__ = f"pmap_{getattr(mapping.fun, '__name__', 'function')}"
    args_shardings, kwargs_shardings = jax.tree.unflatten(
        call.treedef, [NamedSharding(mesh, spec) for spec in in_specs]
    )
    dynamic = mapping.dynamic_argnums(_num_args(mapping, call))
    donate = tuple(at for at, argnum in enumerate(dynamic) if argnum in mapping.donate_argnums)
    run = jax.jit(
        function,
        in_shardings=(*args_shardings, kwargs_shardings) if kwargs_shardings else args_shardings,
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs),
        donate_argnums=donate,
    )
    return Program(function, run, donate, mesh, in_specs, out_specs)


def _num_args(mapping: Mapping, call: Call) -> int:
    """How many positional arguments the call had, static ones included."""
    return len(call.args) + len(mapping.static_argnums)


def _spec(mapping: Mapping, axis: int | None) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, mapping.axis_name)


def _check_no_explicit_sharding(leaves: Sequence[Any]) -> None:
    """Raises ValueError for an array whose type says that it is sharded (AxisType.Explicit)."""
    for leaf in leaves:
        sharding = getattr(jax.typeof(leaf), "sharding", None)
        if sharding is not None and any(sharding.spec):
            error = ValueError(
                "pmap lays its arguments out over its own mesh, but one is sharded over another, "
                f"explicit one: {jax.typeof(leaf)}."
            )
            error.add_note(
                "Pass numpy.asarray(array), or lay it out on a mesh whose axes are AxisType.Auto, "
                "one entry per device; or use jax.shard_map with the array's mesh."
            )
            raise error


def _per_device(mapping: Mapping, call: Call) -> Callable[..., Any]:
    """The mapped function on one device's blocks of the leaves: mapped axes gone, statics bound."""
    statics = dict(zip(mapping.static_argnums, (value for _, value in call.statics), strict=True))
    num_args, treedef, axes = _num_args(mapping, call), call.treedef, call.axes

    def per_device(*blocks: Any) -> Any:
        entries = [
            block if axis is None else jax.lax.squeeze(block, (axis,))
            for block, axis in zip(blocks, axes, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, entries)
        dynamic = iter(args)
        return mapping.fun(
            *(statics[i] if i in statics else next(dynamic) for i in range(num_args)), **kwargs
        )

    return per_device


def _output_axes(mapping: Mapping, outputs: Any) -> tuple[int | None, ...]:
    """The mapped axis of each leaf of the outputs."""
    try:
        return broadcast_axes(mapping.out_axes, outputs)
    except ValueError as cause:
        error = ValueError(
            f"pmap out_axes is not a tree prefix of the output: got {mapping.out_axes} for "
            f"{jax.tree.structure(outputs)}."
        )
        error.add_note("Give out_axes the output's own structure, or one entry for all.")
        raise error from cause


def _insert_mapped_axes(mapping: Mapping, outputs: Any) -> Any:
    """Gives every output its mapped axis, of size 1 on each device."""
    axes = _output_axes(mapping, outputs)
    leaves = []
    for (path, leaf), axis in zip(tree_leaves_with_path(outputs), axes, strict=True):
        if axis is not None:
            if axis > jnp.ndim(leaf):
                raise ValueError(
                    f"pmap out_axes puts the mapped axis of the output{keystr(path)} at {axis}, "
                    f"but its rank is {jnp.ndim(leaf)} without it."
                )
            leaf = jax.lax.expand_dims(leaf, (axis,))
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(outputs), leaves)


def _check_whole_outputs(
    mapping: Mapping,
    per_device: Callable[..., Any],
    mesh: Mesh,
    in_specs: tuple[PartitionSpec, ...],
    leaves: Sequence[Any],
) -> None:
    """Proves, by tracing again, that every output with out_axes=None is the same on all devices.

    Raises:
      ValueError: one varies, or cannot be shown not to.
    """
    varying = []

    def probe(*blocks: Any) -> tuple[()]:
        outputs = per_device(*blocks)
        axes = _output_axes(mapping, outputs)
        for (path, leaf), axis in zip(tree_leaves_with_path(outputs), axes, strict=True):
            if axis is None and _varies(leaf, mapping.axis_name):
                varying.append(f"the output{keystr(path)}")
        return ()

    traced = jax.shard_map(probe, mesh=mesh, in_specs=in_specs, out_specs=(), check_vma=True)
    try:
        jax.eval_shape(traced, *leaves)
    except Exception as cause:
        # The function has just been traced without an error: what fails is the proof.
        error = ValueError(
            "pmap out_axes=None needs an output that is the same on every device, and this could "
            "not be shown."
        )
        error.add_note("Use out_axes=0 and take one entry of the result;")
        error.add_note(
            "or help the proof: the error above says what it stumbled over. A loop whose carry "
            "starts the same everywhere starts from jax.lax.pcast(init, axis_name, to='varying')."
        )
        raise error from cause
    if varying:
        error = ValueError(
            f"pmap out_axes=None needs the same value on every device, but {', '.join(varying)} "
            f"varies over the mapped axis {mapping.axis_name!r}."
        )
        error.add_note("Use out_axes=0 to get the value of every device;")
        error.add_note(
            "or make the values equal first: jax.lax.psum or pmean, or "
            "jax.lax.all_gather(..., to='invarying') (a plain all_gather counts as varying)."
        )
        raise error


def _varies(value: Any, axis_name: Hashable) -> bool:
    """Whether `value` may differ along the axis, inside a shard_map with check_vma."""
    try:
        jax.lax.pcast(value, axis_name, to="varying")
    except ValueError:  # it is varying already
        return True
    return False
