"""Reads the text of a compiled HLO module: its computations, and their instructions in order."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+(?:e\w+)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\(([^)]*)(.*)$")


class Shape(NamedTuple):
    """An array's element type and dimensions."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Without padding; types of less than a byte are packed."""
        bits = re.search(r"\d+", self.dtype)  # pred has none, and takes a byte.
        return -(-self.elements * int(bits.group() if bits else 8) // 8)


class Instruction(NamedTuple):
    """One line of an HLO module."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result, the parts of a tuple one after another
    operands: tuple[str, ...]
    rest: str  # what stands behind the operands
    text: str  # the whole line

    @property
    def bytes(self) -> int:
        """Of its result, all parts of a tuple together."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def operation(self) -> str:
        """The path of the JAX operation that it comes from; empty where there is none."""
        path = re.search(r'op_name="([^"]*)"', self.rest)
        return path.group(1) if path else ""

    def attribute(self, name: str) -> str:
        """The text of `name=`: a name without its %, or what is within braces; "" if absent."""
        # Behind these is free text, which could hold anything.
        own = re.split(r", (?:metadata|backend_config)=", self.rest, maxsplit=1)[0]
        match = re.search(rf"\b{name}=(?:%?([\w.\-]+)|\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}})", own)
        return (match.group(1) or match.group(2) or "") if match else ""


Computation = Mapping[str, Instruction]


class Module(NamedTuple):
    """A module; where it says is_scheduled=true, instructions are in the order of execution."""

    computations: Mapping[str, Computation]
    entry: str
    devices: int

    def instructions(self) -> Iterator[Instruction]:
        """Those of all computations."""
        for computation in self.computations.values():
            yield from computation.values()


def parse(text: str) -> Module:
    """Reads a module's text (`jax.stages.Compiled.as_text()`).

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header.group(2)
            computations[current] = {}
            entry = current if header.group(1) else entry
        elif current and (match := _INSTRUCTION.match(line)):
            name, shape, opcode, operands, rest = match.groups()
            computations[current][name] = Instruction(
                name=name,
                opcode=opcode,
                shapes=_shapes(shape),
                operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
                rest=rest,
                text=line.strip(),
            )
    if not entry:
        raise ValueError(f"the text is no HLO module: no line begins with ENTRY:\n{text[:200]}")
    sizes = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", text.split("\n", 1)[0])
    return Module(computations, entry, math.prod(map(int, sizes)))


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(d) for d in dimensions.split(",") if d))
        for dtype, dimensions in _SHAPE.findall(text)
    )
