"""The least time that one instruction of a compiled GPU program takes, from its shapes alone.

It is the larger of its operations over the peak rate and its bytes over the memory's bandwidth, and
rather too small than too large, for what runs beside a collective hides it:

- only dots have operations, all at the bfloat16 peak; launches, sorting and latencies are free;
- where an instruction selects (gather, slice) or is opaque (a custom call), it may read but a few
  rows of a table: each operand counts for at most the bytes of the whole result;
- where it writes in place (scatter, dynamic-update-slice), only the updates count, read and
  written;
- what a custom call takes over as a result (a table whose rows a kernel updates) does not count.

One case is too large: buffers that stay in the cache are counted as if they came from memory.
"""

import math
import re
from collections.abc import Iterator

from tools.gpu.hlo_text import Computation, Instruction, Module
from tools.gpu.topology import GpuTarget

# They run nothing, or nothing that is worth counting.
_FREE = (
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
)
_SELECTING = ("dynamic-slice", "gather", "slice")
_UPDATING = ("dynamic-update-slice", "scatter")


def least_seconds(
    module: Module, computation: Computation, instruction: Instruction, target: GpuTarget
) -> float:
    """The least time of an instruction of `computation` that neither loops nor branches.

    Halves of asynchronous operations take none: of a copy, too, only waiting would be seen.
    """
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-update", "-done")):
        return 0.0
    body = tuple(_body(module, computation, instruction))
    operations = sum(_operations(*part) for part in body)
    return max(
        operations / target.bf16_flops,
        _bytes(computation, instruction, body) / target.memory_bandwidth,
    )


def _body(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction and, of a fusion, all it is made of, each with its own computation."""
    yield computation, instruction
    if instruction.opcode == "fusion":
        called = module.computations[instruction.attribute("calls")]
        for part in called.values():
            yield from _body(module, called, part)


def _operations(computation: Computation, instruction: Instruction) -> int:
    """A multiplication and an addition for each product of a dot."""
    if instruction.opcode == "dot":
        axes = instruction.attribute("lhs_contracting_dims")
    elif _is_library_dot(instruction):
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
        axes = found.group(1) if found else ""
    else:
        return 0
    left = computation[instruction.operands[0]].shapes[0].dimensions
    contracted = math.prod(left[int(axis)] for axis in re.findall(r"\d+", axes))
    return 2 * instruction.shapes[0].elements * contracted


def _is_library_dot(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and '"__cublas$' in instruction.rest


def _bytes(
    computation: Computation,
    instruction: Instruction,
    body: tuple[tuple[Computation, Instruction], ...],
) -> int:
    """Read and written, by the rules above."""
    if any(part.opcode in _UPDATING for _, part in body):
        return sum(2 * _updated_bytes(*part) for part in body)
    if 'custom_call_target="AllocateBuffer"' in instruction.rest:
        return 0
    is_opaque = instruction.opcode == "custom-call" and not _is_library_dot(instruction)
    is_selecting = is_opaque or any(part.opcode in _SELECTING for _, part in body)
    # A library's dot has its scratch memory as a last result.
    results = instruction.shapes[:1] if _is_library_dot(instruction) else instruction.shapes
    taken = re.findall(r"\{(\d*)[\d,]*\}: \((\d+), ", _aliasing(instruction))
    taken_results = {int(result or 0) for result, _ in taken}
    written = sum(shape.bytes for index, shape in enumerate(results) if index not in taken_results)
    kept = set(instruction.operands) - {instruction.operands[int(index)] for _, index in taken}
    limit = instruction.bytes if is_selecting else math.inf
    return written + sum(int(min(computation[name].bytes, limit)) for name in kept)


def _aliasing(instruction: Instruction) -> str:
    return instruction.attribute("output_to_operand_aliasing")


def _updated_bytes(computation: Computation, instruction: Instruction) -> int:
    """Of what an instruction writes into a buffer; 0 for one that does not."""
    if instruction.opcode == "dynamic-update-slice":
        return computation[instruction.operands[1]].bytes
    if instruction.opcode == "scatter":
        # Buffers, then positions, then one update a buffer.
        updates = instruction.operands[len(instruction.operands) // 2 + 1 :]
        return sum(computation[name].bytes for name in updates)
    return 0
