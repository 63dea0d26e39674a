"""A layout's report as text for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from xrex.layout.explain import BrokenRequirement, LayoutReport
from xrex.layout.plan import Plan
from xrex.layout.plan_memory import ArrayPlan
from xrex.layout.plan_wire import NodePlan


def verdict(report: LayoutReport) -> RenderableType:
    """Yes or no, in one line."""
    if report.plan is None:
        count = len(report.broken)
        broken = "1 requirement is" if count == 1 else f"{count} requirements are"
        return Text(f"REJECTED: {broken} broken", style="bold red")
    plan = report.plan
    return Text(
        f"ACCEPTED: {plan.group_size} ranks x {plan.shard_width} columns, "
        f"{plan.tokens_per_rank} tokens per rank",
        style="bold green",
    )


def overflow(report: LayoutReport) -> RenderableType | None:
    """That a batch may hold more distinct ids than there is room for; None where it cannot."""
    layout, plan = report.layout, report.plan
    if plan is None:
        return None
    most = layout.tokens_per_batch if plan.vocab is None else plan.vocab
    most = min(most, layout.tokens_per_batch)
    if layout.num_unique >= most:
        return None
    return Text(
        f"TOKENS CAN BE LEFT OUT: a batch may hold {most:,} distinct ids, and "
        f"num_unique={layout.num_unique:,} has room for {layout.num_unique:,}.\n"
        f"  Of a batch with more, the {layout.num_unique:,} smallest ids are trained. The largest "
        "ids are left out:\n  their tokens get no gradient, and each is counted in `dropped`.\n"
        f"  With --num_unique={most} none is ever left out.",
        style="bold yellow",
    )


def explanation(report: LayoutReport) -> RenderableType:
    """Every broken requirement, why it matters, and the changes; each change once."""
    shown: set[str] = set()
    parts: list[RenderableType] = []
    for number, broken in enumerate(report.broken, 1):
        parts.extend(_broken_part(number, broken, shown))
        shown.update(change.flags for change in broken.changes)
    return Group(*parts)


def _broken_part(
    number: int, broken: BrokenRequirement, shown: set[str]
) -> Iterator[RenderableType]:
    yield Text(f"\n{number}. {broken.message}", style="bold")
    yield Text(f"   Why: {broken.why}")
    new = [change for change in broken.changes if change.flags not in shown]
    if not new:
        yield Text("   Fixed by the changes above.")
        return
    yield Text("   Fix it (each line alone makes the whole layout valid):")
    for change in new:
        yield Text(f"     {change.flags}", style="green", no_wrap=True)


def plan_tables(plan: Plan) -> RenderableType:
    """Memory, wire, nodes, capacity and warnings."""
    parts: list[RenderableType] = [_memory(plan), _wire(plan), Text(nodes_text(plan.nodes))]
    parts.extend(Text(line) for line in _capacity(plan))
    parts.extend(Text(f"WARNING: {text}", style="yellow") for text in plan.warnings)
    return Group(*parts)


def _memory(plan: Plan) -> Table:
    table = Table(
        title="\nBytes per rank (staleness 1, reference kernels; the dense model comes on top)",
        title_justify="left",
    )
    for heading in ("", "array", "shape", "dtype"):
        table.add_column(heading)
    table.add_column("bytes", justify="right")
    memory = plan.memory
    totals = {
        "table": memory.table,
        "state": memory.state,
        "pins": memory.pins,
        "temporary": memory.temporary,
    }
    for group, total in totals.items():
        arrays = [array for array in memory.arrays if array.group == group]
        for array in arrays:
            table.add_row(group, array.name, _shape(array), array.dtype, f"{array.bytes:,}")
        known = "unknown: pass --vocab" if total is None else f"{total:,}"
        table.add_row(group, "in all", "", "", known, style="bold", end_section=True)
    if memory.total is not None:
        text = f"{memory.total:,} ({decimal(memory.total)})"
        table.add_row("all", "", "", "", text, style="bold")
    return table


def _shape(array: ArrayPlan) -> str:
    return " x ".join(f"{size}" for size in array.shape) or "scalar"


def _wire(plan: Plan) -> Table:
    table = Table(title="\nWire per rank and step", title_justify="left")
    for heading in ("what", "collective"):
        table.add_column(heading)
    for heading in ("bytes sent", "across nodes", "messages per peer", "of bytes"):
        table.add_column(heading, justify="right")
    for part in plan.wire:
        table.add_row(
            part.name,
            part.operation,
            f"{part.bytes_sent:,}",
            f"{part.bytes_across_nodes:,}",
            str(part.messages_per_peer),
            f"{part.message_bytes:,}",
        )
    sent = sum(part.bytes_sent for part in plan.wire)
    across = sum(part.bytes_across_nodes for part in plan.wire)
    table.add_section()
    table.add_row("all", "", f"{sent:,}", f"{across:,}", "", "", style="bold")
    return table


def nodes_text(nodes: NodePlan) -> str:
    """How communicators lie on nodes, in one line."""
    return (
        f"\nNodes of {nodes.devices_per_node} devices: {nodes.num_nodes}. "
        f"A communicator lies on {_between(nodes.nodes_per_communicator)} of them, with "
        f"{_between(nodes.ranks_per_node)} ranks each; "
        f"{nodes.pairs_across_nodes:.0%} of the pairs of peers are on different nodes."
    )


def _between(least_and_most: tuple[int, int]) -> str:
    least, most = least_and_most
    return f"{least}" if least == most else f"{least} to {most}"


def _capacity(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    reserved = f" and {memory.reserved:,} reserved bytes" if memory.reserved else ""
    for capacity in memory.largest_vocab:
        yield (
            f"Largest vocabulary in {capacity.device_bytes // 10**9} GB, beside pins, "
            f"temporary{reserved}: {capacity.vocab:,} rows of {memory.bytes_per_row} bytes per "
            "rank."
        )
