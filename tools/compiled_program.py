"""Reads a compiled GPU program: memory, aliasing, collectives, kernels and ptxas' reports."""

import contextlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class Instruction(NamedTuple):
    """One line of an HLO module."""

    name: str
    opcode: str
    bytes: int  # of its result, all parts of a tuple together
    text: str


class Memory(NamedTuple):
    """Bytes of device memory, per device."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs, in buffers of donated arguments
    temporary: int


class Collective(NamedTuple):
    """A collective; asynchronous where a start and a done enclose other instructions."""

    name: str
    kind: str
    is_asynchronous: bool


class Kernel(NamedTuple):
    """A Mosaic GPU kernel's call."""

    name: str
    operands: str


class Report(NamedTuple):
    """What `read` finds in a program."""

    memory: Memory
    aliases: str
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    instructions: tuple[Instruction, ...]

    def copies(self, at_least: int) -> tuple[Instruction, ...]:
        """Instructions that copy a buffer of at least that many bytes."""
        return tuple(
            instruction
            for instruction in self.instructions
            if instruction.opcode in ("copy", "copy-start") and instruction.bytes >= at_least
        )


class Usage(NamedTuple):
    """What ptxas says of one kernel."""

    kernel: str
    registers: int  # a thread
    shared_bytes: int  # a block; 0 on JAX 0.10.2, which does not tell
    spilled_bytes: int  # stores and loads


def read(compiled: Any) -> Report:
    """Reads a `jax.stages.Compiled`."""
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    instructions = tuple(_instructions(text))
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", text)
    return Report(
        memory=Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
        ),
        aliases=aliases.group(1).strip() if aliases else "",
        collectives=tuple(_collectives(instructions)),
        kernels=tuple(
            Kernel(_kernel_name(instruction), instruction.text.split(")")[0].split("(", 1)[1])
            for instruction in instructions
            if "mosaic_gpu" in instruction.text and instruction.opcode == "custom-call"
        ),
        instructions=instructions,
    )


def _instructions(text: str) -> Iterator[Instruction]:
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            name, shape, opcode, _ = match.groups()
            yield Instruction(name, opcode, _shape_bytes(shape), line.strip())


def _shape_bytes(shape: str) -> int:
    total = 0
    for dtype, dimensions in _SHAPE.findall(shape):
        bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype[1:].split("e")[0]))
        total += bits // 8 * math.prod(int(d) for d in dimensions.split(",") if d)
    return total


def _collectives(instructions: tuple[Instruction, ...]) -> Iterator[Collective]:
    """One entry a collective: starts, and those without a start."""
    wrapped: set[str] = set()
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind == "async":
            inner = re.search(r"calls=%?([\w.\-]+)", instruction.text)
            kind = next((k for k in _COLLECTIVES if inner and k in inner.group(1)), kind)
            wrapped.add(kind)
        if kind in _COLLECTIVES:
            is_start = instruction.opcode.endswith("-start")
            if is_start or kind not in wrapped:
                yield Collective(instruction.name, kind, is_start)


def _kernel_name(instruction: Instruction) -> str:
    """The last part of the operation's path before the primitive: the kernel's own name."""
    path = re.search(r'op_name="([^"]*)"', instruction.text)
    parts = path.group(1).split("/") if path else []
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
