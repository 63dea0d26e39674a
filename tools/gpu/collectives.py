"""The collectives of a compiled program, and what each of them sends."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from tools.gpu.hlo_text import Computation, Instruction, Module

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class Collective(NamedTuple):
    """A collective; asynchronous where a start and a done may enclose other instructions.

    Attributes:
      name: of its instruction, the start where there is one.
      kind: its opcode.
      is_asynchronous: false also for a start that XLA runs in line with the compute.
      wire_bytes: sent by a device, in one execution.
      operation: the path of the JAX operation that it comes from.
    """

    name: str
    kind: str
    is_asynchronous: bool
    wire_bytes: int
    operation: str


def find_collectives(module: Module) -> Iterator[Collective]:
    """All collectives of a module."""
    wrapped = {
        instruction.attribute("calls")
        for instruction in module.instructions()
        if instruction.opcode == "async-start"
    }
    for name, computation in module.computations.items():
        if name not in wrapped:
            for instruction in computation.values():
                found = read_collective(module, computation, instruction)
                if found is not None:
                    yield found


def read_collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Collective | None:
    """The collective that an instruction starts, or is; else None."""
    start = instruction
    if start.opcode == "async-start":
        # The collective itself is the root of the computation that the start calls.
        computation = module.computations[start.attribute("calls")]
        instruction = list(computation.values())[-1]
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _KINDS:
        return None
    return Collective(
        name=start.name,
        kind=kind,
        is_asynchronous=start.opcode.endswith("-start") and '"is_sync":true' not in start.rest,
        wire_bytes=_wire_bytes(module, computation, instruction, kind),
        operation=start.operation,
    )


def _wire_bytes(
    module: Module, computation: Computation, instruction: Instruction, kind: str
) -> int:
    """Sent by a device, as `plan_wire` counts; where data decide, the most there can be."""
    operands = [computation[name].bytes for name in instruction.operands]
    if kind in ("collective-permute", "collective-broadcast"):
        return sum(operands)
    group = group_size(module, instruction)
    if kind == "all-gather":
        return (group - 1) * sum(operands)
    if kind == "all-reduce":
        return -(-2 * (group - 1) * sum(operands) // group)
    # The other operands of a ragged one say where its pieces lie.
    sent = operands[0] if kind == "ragged-all-to-all" else sum(operands)
    return -(-(group - 1) * sent // group)


def group_size(module: Module, instruction: Instruction) -> int:
    """Devices in each group of a collective, from any of the forms in which HLO writes groups.

    `{{0,1},{2,3}}` lists them, `[2,4]<=[8]` is two groups of four, `mesh['a'=2,'b'=4] {'b'}` groups
    along axis b, `{'b':(1)2}` along a part of it; `{}` is one group of all.

    Raises:
      ValueError: the instruction has groups in another form, or none.
    """
    match = re.search(r"\breplica_groups=(.*)", instruction.rest)
    groups = match.group(1) if match else ""
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return len(listed.group(1).split(","))
    if groups.startswith("{}"):
        return module.devices
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota.group(1))
    if mesh := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups):
        sizes = dict(re.findall(r"('[^']*')=(\d+)", mesh.group(1)))
        axes = re.findall(r"('[^']*')(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(f"the groups of {instruction.name} are in no known form: {instruction.text}")
