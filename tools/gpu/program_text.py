"""A compiled program's report as text."""

from collections import Counter
from collections.abc import Sequence

from tools.gpu.compiled_program import Report, Usage
from tools.gpu.exposed_communication import Exposure
from tools.gpu.topology import GpuTarget


def describe(report: Report, usages: Sequence[Usage]) -> str:
    """A program's report in a few lines."""
    memory = report.memory
    kinds = Counter(
        f"{collective.kind} ({'asynchronous' if collective.is_asynchronous else 'synchronous'})"
        for collective in report.collectives
    )
    lines = [
        f"  memory per device: arguments {memory.arguments:,}, outputs {memory.outputs:,} "
        f"(of which in place {memory.aliased:,}), temporary {memory.temporary:,} bytes",
        f"  in place: {report.aliases or 'nothing'}",
        "  collectives: " + (", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "none"),
        "  kernels: " + (", ".join(kernel.name for kernel in report.kernels) or "none"),
    ]
    lines += [
        f"  ptxas: {usage.kernel}: {usage.registers} registers per thread, "
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
