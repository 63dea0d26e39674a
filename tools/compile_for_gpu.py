"""Compiles programs for NVIDIA GPUs on a machine without any, and says what became of them.

  python -m tools.compile_for_gpu kernels --widths=8,64 --dtype=bfloat16 --ptx=out/ptx
  python -m tools.compile_for_gpu step --gpus=8 --emb_width=512 --tokens_per_rank=8192
  python -m tools.compile_for_gpu mymodel.steps:train --gpus=8 --hosts=8

The last form compiles your own function: `mymodel/steps.py` has `def train(mesh): return function,
arguments`, where the mesh has one axis, "x", over all GPUs, and the arguments are
`jax.ShapeDtypeStruct`s with shardings; `function` may be jitted already, with donated arguments.

Printed for each program: memory a device, which outputs reuse donated buffers, the collectives, the
Mosaic GPU kernels and, from ptxas, registers, shared memory and spills; of a program with
collectives, its exposed communication, by a model (tools/exposed_communication.py). Nothing is
measured: there is no GPU. Needs what `bash tools/setup_env.sh --aot` installs.
"""

import contextlib
import importlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh

from tools import compiled_program, gpu_topology
from tools.common.paths import from_caller
from tools.compiled_program import Report, Usage
from tools.exposed_communication import Exposure, exposed_communication
from tools.gpu_topology import GpuTarget

_GPU = flags.DEFINE_enum("gpu", "h100", sorted(gpu_topology.TARGETS), "the model to compile for")
_GPUS = flags.DEFINE_integer("gpus", 8, "GPUs a host", lower_bound=1)
_HOSTS = flags.DEFINE_integer("hosts", 1, "hosts", lower_bound=1)
_WIDTHS = flags.DEFINE_list("widths", ["8", "32", "128"], "kernels: columns a shard")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of table and rows")
_VOCAB = flags.DEFINE_integer("vocab", 10_000_000, "rows of the table", lower_bound=1)
_EMB_WIDTH = flags.DEFINE_integer("emb_width", 512, "step: columns of the table", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens_per_rank", 8192, "step: tokens a GPU", lower_bound=1)
_STALENESS = flags.DEFINE_integer("staleness", 1, "step: 0 or 1", lower_bound=0, upper_bound=1)
_IMPLEMENTATION = flags.DEFINE_string("implementation", "auto", "step: which kernels")
_PTX = flags.DEFINE_string("ptx", None, "folder that gets the kernels' PTX and ptxas' reports")
_HLO = flags.DEFINE_string("hlo", None, "folder that gets the scheduled HLO of each program")


def lowered_programs(what: str, mesh: Mesh) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The programs that a command line names, lowered one at a time."""
    # Imported here: jax must not be used before the plugin may load, and optax may be missing.
    from tools import gpu_programs

    if what == "kernels":
        for width in map(int, _WIDTHS.value):
            shape = gpu_programs.KernelShape(width, _DTYPE.value, vocab=_VOCAB.value)
            for program in gpu_programs.kernel_programs(mesh, shape):
                yield program.name, program.lower()
    elif what == "step":
        step = gpu_programs.StepShape(
            vocab=_VOCAB.value,
            emb_width=_EMB_WIDTH.value,
            tokens_per_rank=_TOKENS.value,
            dtype=_DTYPE.value,
            staleness=_STALENESS.value,
            implementation=_IMPLEMENTATION.value,
        )
        print(gpu_programs.step_handle(mesh, step).describe())
        yield "step", gpu_programs.lower_step(mesh, step)
    else:
        module, _, name = what.partition(":")
        function, arguments = getattr(importlib.import_module(module), name)(mesh)
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        yield what, jitted.lower(*arguments)


def describe(report: Report, usages: Sequence[Usage]) -> str:
    """A program's report in a few lines."""
    memory = report.memory
    kinds = Counter(
        f"{collective.kind} ({'asynchronous' if collective.is_asynchronous else 'synchronous'})"
        for collective in report.collectives
    )
    lines = [
        f"  memory a device: arguments {memory.arguments:,}, outputs {memory.outputs:,} "
        f"(of which in place {memory.aliased:,}), temporary {memory.temporary:,} bytes",
        f"  in place: {report.aliases or 'nothing'}",
        "  collectives: " + (", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "none"),
        "  kernels: " + (", ".join(kernel.name for kernel in report.kernels) or "none"),
    ]
    lines += [
        f"  ptxas: {usage.kernel}: {usage.registers} registers a thread, "
        + (f"{usage.shared_bytes:,} bytes shared, " if usage.shared_bytes else "")
        + f"{usage.spilled_bytes} bytes spilled"
        for usage in usages
    ]
    return "\n".join(lines)


def describe_exposed(exposures: Sequence[Exposure], target: GpuTarget) -> str:
    """What a program's collectives expose, by which peaks, and a line for each that does."""
    exposed = sum(exposure.exposed_seconds for exposure in exposures)
    wire = sum(exposure.wire_seconds for exposure in exposures)
    lines = [
        f"  exposed communication: {1e6 * exposed:.2f} of {1e6 * wire:.2f} us on the wire, by a "
        f"model: links of {target.link_bandwidth / 1e9:,.0f} GB/s each way (between hosts, too), "
        f"memory of {target.memory_bandwidth / 1e9:,.0f} GB/s, dots at "
        f"{target.bf16_flops / 1e12:,.0f} TFLOP/s, no latencies"
    ]
    lines += [_describe_exposure(exposure) for exposure in exposures if exposure.exposed_seconds]
    return "\n".join(lines)


def _describe_exposure(exposure: Exposure) -> str:
    collective = exposure.collective
    longest = sorted(exposure.beside, key=lambda beside: -beside.seconds)[:3]
    beside = [f"{beside.name} ({1e6 * beside.seconds:.2f} us)" for beside in longest]
    if len(exposure.beside) > len(longest):
        beside.append(f"{len(exposure.beside) - len(longest)} shorter")
    return (
        f"    {1e6 * exposure.exposed_seconds:.2f} of {1e6 * exposure.wire_seconds:.2f} us: "
        f"{collective.name}, {collective.wire_bytes:,} bytes, "
        + (
            f"beside {', '.join(beside) or 'nothing'}"
            if collective.is_asynchronous
            else "synchronous"
        )
        + (f"; {collective.operation}" if collective.operation else "")
    )


def main(argv: Sequence[str]) -> int:
    """Compiles what the command line names; returns the exit status."""
    if len(argv) != 2 or (argv[1] not in ("kernels", "step") and ":" not in argv[1]):
        raise app.UsageError("name one of: kernels, step, MODULE:FUNCTION")
    gpu_topology.allow_without_gpu()
    jax.config.update("jax_platforms", "cpu")
    obstacle = gpu_topology.missing()
    if obstacle is not None:
        print(f"compile_for_gpu: {obstacle}", file=sys.stderr)
        return 1
    target = gpu_topology.TARGETS[_GPU.value]
    devices = gpu_topology.gpu_devices(target, _GPUS.value, hosts=_HOSTS.value)
    mesh = Mesh(np.array(devices), ("x",))
    print(f"for {len(devices)} x {target.description}")
    programs = lowered_programs(argv[1], mesh)
    while True:
        with contextlib.ExitStack() as stack:
            usages = stack.enter_context(
                compiled_program.ptxas_usage(keep=_PTX.value and from_caller(_PTX.value))
            )
            started = time.perf_counter()
            named = next(programs, None)
            if named is None:
                return 0
            name, lowered = named
            compiled = lowered.compile()
            seconds = time.perf_counter() - started
        print(f"{name}: compiled in {seconds:.1f} s")
        report = compiled_program.read(compiled)
        print(describe(report, usages), flush=True)
        if report.collectives:
            print(describe_exposed(exposed_communication(report.module, target), target))
        if _HLO.value is not None:
            file = from_caller(_HLO.value) / f"{re.sub('[ :]', '_', name)}.hlo"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(compiled.as_text() or "")


if __name__ == "__main__":
    app.run(main)
