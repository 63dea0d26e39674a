"""Compiles programs for NVIDIA GPUs on a machine without any, and says what became of them.

    python -m tools.compile_for_gpu kernels --widths=8,64 --dtype=bfloat16 --ptx=out/ptx
    python -m tools.compile_for_gpu step --gpus=8 --emb_width=512 --tokens_per_batch=65536
    python -m tools.compile_for_gpu mymodel.steps:train --gpus=8 --hosts=8

The last form compiles your own function: `mymodel/steps.py` has `def train(mesh): return function,
arguments`, where the mesh has one axis, "x", over all GPUs, and the arguments are
`jax.ShapeDtypeStruct`s with shardings; `function` may be jitted already, with donated arguments.

Printed for each program: memory per device, which outputs reuse donated buffers, the collectives,
the Mosaic GPU kernels and, from ptxas, registers, shared memory and spills; of a program with
collectives, its exposed communication, by a model (tools/gpu/exposed_communication.py). Nothing is
measured: there is no GPU. Needs what `bash tools/setup_env.sh --aot` installs.

Exit status: 0 compiled, 2 cannot be compiled.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from tools.gpu.aot_folder import add_aot_folder

add_aot_folder()

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import xrex
from pallas_kernels import api
from tools.common import user_function
from tools.common.command import Command, UserError, wrong_value
from tools.common.flag_values import integer, several
from tools.common.paths import output_folder
from tools.gpu import compiled_program, program_text, topology
from tools.gpu.exposed_communication import exposed_communication
from tools.layouts.layout_flags import LayoutFlags

PROGRAMS = ("kernels", "step")
MOST_GPUS = 4096

COMMAND = Command("compile_for_gpu", __doc__, "PROGRAM: kernels, step or MODULE:FUNCTION")
_GPU = COMMAND.choice("gpu", "h100", sorted(topology.TARGETS), "The model to compile for.")
_GPUS = COMMAND.integer("gpus", 8, "GPUs per host.", at_least=1, at_most=MOST_GPUS)
_HOSTS = COMMAND.integer("hosts", 1, "Hosts.", at_least=1, at_most=MOST_GPUS)
_WIDTHS = COMMAND.flag(
    "widths",
    (8, 32, 128),
    "kernels: columns per shard.",
    several(integer(at_least=1, at_most=2**16)),
)
_DTYPE = COMMAND.choice("dtype", "bfloat16", ("bfloat16", "float32"), "Type of table and rows.")
_VOCAB = COMMAND.integer("vocab", 10_000_000, "Rows of the table.", at_least=1, at_most=2**31 - 1)
_LAYOUT = LayoutFlags(COMMAND, "tokens_per_batch", "emb_width", "num_unique")
_STALENESS = COMMAND.integer("staleness", 1, "Of the step.", at_least=0, at_most=1)
_IMPLEMENTATION = COMMAND.choice(
    "implementation",
    "auto",
    ("auto", *get_args(api.Implementation)),
    "Which kernels the step uses.",
)
_PTX = COMMAND.words(
    "ptx", None, "the name of a folder", "Folder that gets the kernels' PTX and ptxas' reports."
)
_HLO = COMMAND.words(
    "hlo", None, "the name of a folder", "Folder that gets the scheduled HLO of each program."
)


class Settings(NamedTuple):
    """What the command line asks for."""

    program: str
    target: topology.GpuTarget
    ptx: Path | None
    hlo: Path | None


def settings() -> Settings:
    """The flags as settings.

    Raises:
      UserError: there is no such program, or it cannot be of such sizes.
    """
    program = COMMAND.operand
    if program not in PROGRAMS and ":" not in program:
        raise UserError(f"{program!r} is no program: wanted kernels, step or MODULE:FUNCTION")
    gpus = _GPUS.value * _HOSTS.value
    if gpus > MOST_GPUS:
        raise wrong_value(
            "hosts", _HOSTS.value, f"with --gpus={_GPUS.value}, wanted {MOST_GPUS} GPUs at most"
        )
    if program == "step":
        _LAYOUT.check_works(_step_layout(AbstractMesh((gpus,), ("x",))))
    elif program not in PROGRAMS:
        user_function.find(program)
    return Settings(
        program,
        topology.TARGETS[_GPU.value],
        None if _PTX.value is None else output_folder("ptx", _PTX.value),
        None if _HLO.value is None else output_folder("hlo", _HLO.value),
    )


def _step_layout(mesh: Mesh | AbstractMesh) -> xrex.Layout:
    from tools.gpu import programs

    return programs.whole_mesh_layout(
        mesh, **{"num_devices_per_node": _GPUS.value} | _LAYOUT.given()
    )


def lowered_programs(what: str, mesh: Mesh) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The programs that a command line names, lowered one at a time."""
    # Imported here: optax may be missing.
    from tools.gpu import programs

    if what == "kernels":
        for width in _WIDTHS.value:
            shape = programs.KernelShape(width, _DTYPE.value, vocab=_VOCAB.value)
            for program in programs.kernel_programs(mesh, shape):
                yield program.name, program.lower()
    elif what == "step":
        step = programs.StepShape(
            _step_layout(mesh),
            vocab=_VOCAB.value,
            dtype=_DTYPE.value,
            staleness=_STALENESS.value,
            implementation=_IMPLEMENTATION.value,
        )
        print(programs.step_handle(step).describe())
        yield "step", programs.lower_step(step)
    else:
        yield what, lowered_by_user(what, mesh)


def lowered_by_user(named: str, mesh: Mesh) -> jax.stages.Lowered:
    """What `MODULE:FUNCTION` makes for a mesh, lowered.

    Raises:
      UserError: there is no such function, it returns something else, or it cannot be lowered.
    """
    made = user_function.call(named, mesh)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise UserError(
            f"{named}: it must return a function and a tuple of its arguments, "
            f"not {type(made).__name__}"
        )
    function, arguments = made
    if not callable(function) or not isinstance(arguments, tuple | list):
        raise UserError(
            f"{named}: it must return a function and a tuple of its arguments, "
            f"not {type(function).__name__} and {type(arguments).__name__}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(arguments)):
        if getattr(leaf, "sharding", None) is None:
            raise UserError(
                f"{named}: argument {jax.tree_util.keystr(path)} has no sharding: make it a "
                "jax.ShapeDtypeStruct with a sharding over the mesh"
            )
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    with user_function.blamed(named, "lowering its program"):
        return jitted.lower(*arguments)


def main() -> None:
    """Compiles what the command line names."""
    asked = settings()
    topology.allow_without_gpu()
    jax.config.update("jax_platforms", "cpu")
    obstacle = topology.missing()
    if obstacle is not None:
        raise UserError(obstacle)
    devices = topology.gpu_devices(asked.target, _GPUS.value, hosts=_HOSTS.value)
    print(f"for {len(devices)} x {asked.target.description}")
    programs = lowered_programs(asked.program, Mesh(np.array(devices), ("x",)))
    while compile_next(programs, asked):
        pass


def compile_next(programs: Iterator[tuple[str, jax.stages.Lowered]], asked: Settings) -> bool:
    """Lowers and compiles one program and prints what became of it; False if none is left."""
    # Lowering makes the kernels' PTX already.
    with compiled_program.ptxas_usage(keep=asked.ptx) as usages:
        started = time.perf_counter()
        named = next(programs, None)
        if named is None:
            return False
        name, lowered = named
        if asked.program in PROGRAMS:
            compiled = lowered.compile()
        else:
            with user_function.blamed(name, "compiling its program"):
                compiled = lowered.compile()
        seconds = time.perf_counter() - started
    print(f"{name}: compiled in {seconds:.1f} s")
    report = compiled_program.read(compiled)
    print(program_text.describe(report, usages), flush=True)
    if report.collectives:
        exposures = exposed_communication(report.module, asked.target)
        print(program_text.describe_exposed(exposures, asked.target))
    if asked.hlo is not None:
        file = asked.hlo / f"{re.sub('[ :]', '_', name)}.hlo"
        file.write_text(compiled.as_text() or "")
    return True


if __name__ == "__main__":
    COMMAND.run(main)
