"""What differs between JAX 0.10.2, 0.11 and 0.12 for the kernels, and what Mosaic has to be taught.

The only module of the kernels that imports `jax._src`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import core as mosaic_core
from jax._src.pallas.mosaic_gpu import lowering as mosaic_lowering
from jax.experimental.mosaic.gpu import dialect_lowering

from pallas_kernels.row_blocks import WARPS

# JAX 0.10.2: a mutable Ref cannot be passed into `plgpu.kernel`, and the interpreter does not know
# `layout_cast`.
_OLD = jax.__version_info__ < (0, 11, 0)

# An `InterpretGPUParams`, which runs a kernel on a CPU; None compiles for a GPU.
Interpreter = Any


def launch(
    body: Callable[..., None],
    *,
    updated: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    scratch_types: Sequence[Any],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    name: str,
    interpret: Interpreter,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Launches a Mosaic GPU kernel of one warpgroup per block.

    Args:
      body: called with one Ref each, in this order: updated, operands, outputs, scratch.
      updated: arrays that the kernel changes in place; their buffers are reused where the caller's
        program donates them.
      operands: arrays that it only reads.
      out_types: arrays that it creates, uninitialised.
      scratch_types: `plgpu.SMEM`, `plgpu.Barrier`.
      grid, grid_names: blocks in each direction, and the names for `jax.lax.axis_index`.
      name: what profilers and dumps call the kernel.
      interpret: None to compile for a GPU.

    Returns:
      The updated arrays and the outputs.
    """
    parameters = plgpu.CompilerParams(
        # The kernels rely on layout inference, and on copies of fewer than 128 bytes.
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        # The default puts a barrier around every copy of a row. Every buffer of the kernels is
        # written either by threads or by copies, and `commit_smem` separates the two.
        unsafe_no_auto_barriers=True,
    )
    if _OLD and updated:
        return _launch_in_run_state(
            body,
            updated,
            operands,
            out_types,
            scratch_types,
            plgpu.Mesh(grid=grid, grid_names=grid_names, kernel_name=name),
            parameters,
            interpret,
        )
    references = [jax.new_ref(array) for array in updated]
    outputs = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        scratch_types=tuple(scratch_types),
        grid=grid,
        grid_names=grid_names,
        compiler_params=parameters,
        interpret=interpret,
        kernel_name=name,
    )(*references, *operands)
    return tuple(jax.freeze(reference) for reference in references), tuple(outputs)


def _launch_in_run_state(
    body: Callable[..., None],
    updated: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    scratch_types: Sequence[Any],
    mesh: plgpu.Mesh,
    parameters: plgpu.CompilerParams,
    interpret: Interpreter,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`launch` for JAX 0.10.2, whose kernels take mutable Refs only from `pl.run_state`."""
    outputs = [jax.lax.empty(out.shape, out.dtype) for out in out_types]

    def stateful(references: tuple[Any, ...]) -> None:
        def block() -> None:
            pl.run_scoped(functools.partial(body, *references), *scratch_types)

        block.__name__ = mesh.kernel_name or "kernel"  # Dumps show no other name of it.
        pl.core_map(mesh, compiler_params=parameters, interpret=interpret or False)(block)

    with jax.named_scope(mesh.kernel_name or "kernel"):  # Nor do programs.
        state = pl.run_state(stateful)((*updated, *operands, *outputs))
    return tuple(state[: len(updated)]), tuple(state[len(state) - len(outputs) :])


def keep_plain(refs: Sequence[Any], interpret: Interpreter) -> None:
    """Keeps arrays in shared memory row by row, whatever layout inference would rather have.

    Of an array that is read in tiles it may make one that is tiled and swizzled. Its rows are then
    copied by tensor maps, which need addresses that are multiples of 128 bytes: rows are shorter.
    """
    if interpret is not None:
        return
    for ref in refs:

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def as_it_is(context: Any, ref: Any) -> None:
            del context, ref

        as_it_is(ref)


def loop_by_warp(
    count: int, interpret: Interpreter
) -> Callable[[Callable[[jax.Array], None]], None]:
    """`pl.loop(0, count)` in which each of the four warps of a block takes every fourth turn.

    All four run every turn of a `pl.loop`. Turns of this one must not depend on each other: they
    may start copies, arrive at barriers, read and write single values.

    Args:
      count: turns, a multiple of 4.
      interpret: None to compile for a GPU.
    """
    if count % WARPS:
        raise ValueError(f"a loop of {count} turns does not divide over {WARPS} warps")

    def decorator(body: Callable[[jax.Array], None]) -> None:
        if _OLD and interpret is not None:  # That interpreter knows no warps.
            pl.loop(0, count)(body)
            return

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            @pl.loop(0, count // WARPS)
            def _(i: jax.Array) -> None:
                body(i * WARPS + warp)

    return decorator


def layout_cast(x: jax.Array, layout: mosaic_core.SomeLayout, interpret: Interpreter) -> jax.Array:
    """`plgpu.layout_cast`; nothing in the interpreter, which has no layouts."""
    return x if interpret is not None else plgpu.layout_cast(x, layout)


def load(ref: Any, layout: mosaic_core.SomeLayout, interpret: Interpreter) -> jax.Array:
    """Reads an array in shared memory into registers of a given layout."""
    if interpret is not None:
        return ref[...]
    if _OLD:
        return plgpu.load(ref, ..., layout=layout, optimized=False)
    # Not optimized: each thread reads its own values. The layouts of `row_blocks` let neighbouring
    # threads read neighbouring values, and the search for a better transfer fails for some widths.
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, values: jax.Array, interpret: Interpreter) -> None:
    """Writes registers into an array in shared memory."""
    if interpret is None and hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def _round(x: jax.Array, *, exponent_bits: int, mantissa_bits: int) -> jax.Array:
    if (exponent_bits, mantissa_bits) != (8, 7):
        raise NotImplementedError(
            "Mosaic GPU kernels round float32 to bfloat16 only (8 exponent and 7 mantissa bits), "
            f"not to {exponent_bits} exponent and {mantissa_bits} mantissa bits"
        )
    # Mosaic keeps a pair of casts; it is XLA that may drop one.
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _sqrt(x: jax.Array, *, accuracy: Any) -> jax.Array:
    """Within 2.6 units in the last place."""
    del accuracy
    exact = (x == 0) | (x == jnp.inf)
    return jnp.where(exact, x, x * jax.lax.rsqrt(x))


def _teach_mosaic() -> None:
    """Adds the primitives that row functions need and Mosaic GPU cannot lower."""
    rules = mosaic_lowering.mosaic_lowering_rules[mosaic_core.WGxWG_SEMANTICS]
    for primitive, function in (
        (jax.lax.reduce_precision_p, _round),
        (jax.lax.sqrt_p, _sqrt),
    ):
        if primitive not in rules:
            rules[primitive] = mosaic_lowering._lower_fun(function)
    # Its rule for reading a value does for one warp as it is.
    dialect_lowering._supported_warp_lowerings.add("memref.load")


_teach_mosaic()
