"""Exposed communication of a compiled GPU program: what its collectives take beyond the compute.

For each collective, the time of its bytes on the links less that of what is scheduled between its
start and its done; a synchronous one is exposed whole. It is a model, not a measurement: it knows
no latencies and no contention, but is deterministic, and two programs can be compared by it.

Collectives in flight at once share the links. Here the links serve one at a time: what runs
meanwhile is credited once, to the collective in flight that started first and is not through yet;
where the program waits for one, the links are that one's alone.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tools.gpu import collectives, roofline
from tools.gpu.hlo_text import Instruction, Module
from tools.gpu.topology import GpuTarget


class Beside(NamedTuple):
    """An instruction that runs while a collective travels, and its least time."""

    name: str
    seconds: float


class Exposure(NamedTuple):
    """One collective of a program; in a loop, all its executions together.

    Attributes:
      collective: the collective.
      wire_seconds: its bytes over the links' bandwidth.
      exposed_seconds: the part of it that no compute covers, by the rule above.
      beside: what is scheduled between start and done and takes time, in order; of one execution.
    """

    collective: collectives.Collective
    wire_seconds: float
    exposed_seconds: float
    beside: tuple[Beside, ...]

    @property
    def hidden_seconds(self) -> float:
        """The part of it that the compute beside it covers."""
        return self.wire_seconds - self.exposed_seconds


class _Walk(NamedTuple):
    """What came of a computation: the time in it that hides nothing yet, and its collectives."""

    free_seconds: float
    exposures: tuple[Exposure, ...]


def exposed_communication(module: Module, target: GpuTarget) -> tuple[Exposure, ...]:
    """Every collective of a scheduled module, in order, those within loops and branches last.

    A loop counts as often as XLA knows it to run, and once where it does not know; of a branch, the
    collectives of all its sides count, and the time of the shortest.

    Args:
      module: with is_scheduled=true, as compiled programs are.
      target: the GPU whose peaks count. Its links connect all GPUs of the program: between hosts,
        where a network is slower, communication is exposed more than is said here.
    """
    return _walk(module, module.entry, target).exposures


def _walk(module: Module, name: str, target: GpuTarget) -> _Walk:
    """Runs through a computation in its order."""
    computation = module.computations[name]
    exposures: dict[str, Exposure] = {}
    nested: list[Exposure] = []
    in_flight: list[str] = []
    free = 0.0
    for instruction in computation.values():
        collective = collectives.read_collective(module, computation, instruction)
        if collective is not None:
            wire_seconds = collective.wire_bytes / target.link_bandwidth
            exposures[instruction.name] = Exposure(collective, wire_seconds, wire_seconds, ())
            if collective.is_asynchronous:
                in_flight.append(instruction.name)
        elif instruction.opcode.endswith("-done"):
            in_flight = [start for start in in_flight if start not in instruction.operands]
        elif called := _called(instruction):
            inner = _combine([_walk(module, name, target) for name in called], _trips(instruction))
            nested += inner.exposures
            free += _credit(exposures, in_flight, Beside(instruction.name, inner.free_seconds))
        else:
            seconds = roofline.least_seconds(module, computation, instruction, target)
            free += _credit(exposures, in_flight, Beside(instruction.name, seconds))
    return _Walk(free, (*exposures.values(), *nested))


def _credit(exposures: dict[str, Exposure], in_flight: Sequence[str], running: Beside) -> float:
    """Credits an instruction's time to the collectives in flight; returns what is left of it."""
    left = running.seconds
    if not left:
        return left
    for name in in_flight:
        exposure = exposures[name]
        hidden = min(left, exposure.exposed_seconds)
        left -= hidden
        exposures[name] = exposure._replace(
            exposed_seconds=exposure.exposed_seconds - hidden, beside=(*exposure.beside, running)
        )
    return left


def _called(instruction: Instruction) -> list[str]:
    """The computations whose instructions run in an instruction's place."""
    if instruction.opcode == "while":
        return [instruction.attribute("body")]
    if instruction.opcode == "call":
        return [instruction.attribute("to_apply")]
    if instruction.opcode == "conditional":
        two = [instruction.attribute(f"{side}_computation") for side in ("true", "false")]
        many = re.findall(r"[\w.\-]+", instruction.attribute("branch_computations"))
        return many or two
    return []


def _trips(instruction: Instruction) -> int:
    """How often a loop runs, 1 where XLA does not know or there is no loop."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.rest)
    return int(known.group(1)) if known else 1


def _combine(sides: Sequence[_Walk], trips: int) -> _Walk:
    exposures = (
        exposure._replace(
            wire_seconds=trips * exposure.wire_seconds,
            exposed_seconds=trips * exposure.exposed_seconds,
        )
        for side in sides
        for exposure in side.exposures
    )
    return _Walk(trips * min(side.free_seconds for side in sides), tuple(exposures))
