"""Reads a compiled GPU program: memory, aliasing, collectives, kernels and ptxas' reports."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu import hlo_text
from tools.gpu.collectives import Collective, find_collectives
from tools.gpu.hlo_text import Instruction, Module


class Memory(NamedTuple):
    """Bytes of device memory, per device."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs, in buffers of donated arguments
    temporary: int


class Kernel(NamedTuple):
    """A Mosaic GPU kernel's call."""

    name: str
    operands: tuple[str, ...]


class Report(NamedTuple):
    """What `read` finds in a program."""

    memory: Memory
    aliases: str
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    module: Module

    def copies(self, at_least: int) -> tuple[Instruction, ...]:
        """Instructions that copy a buffer of at least that many bytes."""
        return tuple(
            instruction
            for instruction in self.module.instructions()
            if instruction.opcode in ("copy", "copy-start") and instruction.bytes >= at_least
        )


class Usage(NamedTuple):
    """What ptxas says of one kernel."""

    kernel: str
    registers: int  # per thread
    shared_bytes: int  # per block; 0 on JAX 0.10.2, which does not tell
    spilled_bytes: int  # stores and loads


def read(compiled: Any) -> Report:
    """Reads a `jax.stages.Compiled`."""
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    module = hlo_text.parse(text)
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", text)
    return Report(
        memory=Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
        ),
        aliases=aliases.group(1).strip() if aliases else "",
        collectives=tuple(find_collectives(module)),
        kernels=tuple(
            Kernel(_kernel_name(instruction), instruction.operands)
            for instruction in module.instructions()
            if "mosaic_gpu" in instruction.text and instruction.opcode == "custom-call"
        ),
        module=module,
    )


def _kernel_name(instruction: Instruction) -> str:
    """The last part of the operation's path before the primitive: the kernel's own name."""
    parts = instruction.operation.split("/")
    known = [part for part in parts if part in ("gather_rows", "segment_sum", "update_rows")]
    return known[-1] if known else instruction.name


@contextlib.contextmanager
def ptxas_usage(keep: str | Path | None = None) -> Iterator[list[Usage]]:
    """Collects what ptxas says of the Mosaic GPU kernels compiled within, once the context ends.

    Args:
      keep: a folder that then gets each kernel's PTX and ptxas' report.
    """
    usages: list[Usage] = []
    with tempfile.TemporaryDirectory() as folder:
        with _environment(
            MOSAIC_GPU_DUMP_TO=folder, MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1"
        ):
            yield usages
        usages.extend(_usage(file) for file in sorted(Path(folder).glob("*.ptxas")))
        if keep is not None:
            Path(keep).mkdir(parents=True, exist_ok=True)
            for pattern in ("*.ptx", "*.ptxas"):
                for file in Path(folder).glob(pattern):
                    shutil.copy(file, keep)


@contextlib.contextmanager
def _environment(**settings: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _usage(file: Path) -> Usage:
    report = file.read_text()
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill", report)
    if registers is None or not spills:
        raise ValueError(f"ptxas' report {file} has no line on registers and spills:\n{report}")
    resources = file.with_suffix(".resources.txt")
    text = resources.read_text() if resources.exists() else ""
    shared = re.search(r"smem_scratch_bytes=(\d+)", text)
    return Usage(
        kernel=file.stem,
        registers=int(registers.group(1)),
        shared_bytes=int(shared.group(1)) if shared else 0,
        spilled_bytes=sum(map(int, spills)),
    )
