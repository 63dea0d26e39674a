"""The plan of a model of many tables as text for a terminal."""

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tools.layouts.layout_text import nodes_text
from tools.layouts.model_flags import Refusal
from xrex.embeddings.plan_model import ModelPlan, StackPlan


def rejection(refused: Refusal) -> RenderableType:
    """No, and the validator's own words: it names the first requirement that is broken."""
    return Group(
        Text("REJECTED: a requirement is broken", style="bold red"),
        Text(f"\n{refused.message}", style="bold"),
        *(Text(f"   {note}") for note in refused.notes),
    )


def plan_text(plan: ModelPlan) -> RenderableType:
    """Yes, and what the model costs."""
    tables = _count(sum(len(stack.tables) for stack in plan.stacks), "table")
    verdict = (
        f"ACCEPTED: {_count(plan.group_size, 'rank')}, {plan.examples_per_rank} examples per rank; "
        f"{tables} in {_count(len(plan.stacks), 'stack')}"
    )
    return Group(
        Text(verdict, style="bold green"),
        _stacks(plan),
        _features(plan),
        _memory(plan),
        _wire(plan),
        _room(plan),
        Text(nodes_text(plan.nodes)),
        *(Text(f"WARNING: {text}", style="yellow") for text in plan.warnings),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left")
    for heading in words:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _stacks(plan: ModelPlan) -> Table:
    numbers = ("rows", "columns", "table", "state", "sent per step")
    title = "Tables of each stack: columns and bytes per rank"
    shown = _table(title, ("stack", "table"), numbers)
    for stack in plan.stacks:
        for number, table in enumerate(stack.tables):
            sizes = (table.vocab, table.shard_width, table.table, table.state, table.wire)
            shown.add_row("" if number else stack.name, table.name, *(f"{n:,}" for n in sizes))
        of_tables = sum(table.state for table in stack.tables)
        shared = (stack.memory.state - of_tables, stack.shared_wire)
        shown.add_row("", "(the stack's own)", "", "", "0", *(f"{n:,}" for n in shared))
        shown.add_section()
    totals = (plan.memory.table, plan.memory.state, plan.wire)
    shown.add_row("all", "", "", "", *(f"{n:,}" for n in totals), style="bold")
    return shown


def _features(plan: ModelPlan) -> Table:
    numbers = ("rows that travel", "ids at most", "mean ids of a bag")
    shown = _table("Features, per rank and batch", ("feature", "table", "is"), numbers)
    for stack in plan.stacks:
        for feature in stack.features:
            shown.add_row(
                feature.name,
                feature.table,
                feature.kind,
                f"{feature.rows_per_rank:,}",
                f"{feature.ids_per_rank:,}",
                "" if feature.mean_ids is None else f"{feature.mean_ids:g}",
            )
    return shown


def _memory(plan: ModelPlan) -> Table:
    groups = ("table", "state", "pins", "temporary", "total")
    title = "Bytes per rank (staleness 1, reference kernels; the dense model comes on top)"
    shown = _table(title, ("stack",), groups)
    for stack in plan.stacks:
        shown.add_row(stack.name, *(f"{getattr(stack.memory, group):,}" for group in groups))
    shown.add_section()
    totals = [f"{getattr(plan.memory, group):,}" for group in groups]
    totals[-1] += f" ({decimal(plan.memory.total)})"
    shown.add_row("all", *totals, style="bold")
    return shown


def _wire(plan: ModelPlan) -> Table:
    words, numbers = ("stack", "what", "collective"), ("bytes sent", "across nodes", "per message")
    shown = _table("Wire per rank and step", words, numbers)
    for stack in plan.stacks:
        _add_wire(shown, stack)
    sent, across = f"{plan.wire:,}", f"{plan.wire_across_nodes:,}"
    shown.add_row("all", "", "", sent, across, "", style="bold")
    return shown


def _add_wire(shown: Table, stack: StackPlan) -> None:
    name = stack.name
    for collective in stack.wire:
        figures = (
            collective.bytes_sent,
            collective.bytes_across_nodes,
            collective.message_bytes,
        )
        parts = [part for part in stack.wire_parts if part.collective == collective.name]
        together = len(parts) > 1
        what = f"{collective.name}, with" if together else collective.name
        shown.add_row(name, what, collective.operation, *(f"{n:,}" for n in figures))
        name = ""
        for part in parts if together else ():
            shown.add_row("", f"  {part.name}", "", f"({part.bytes_sent:,})", "", "")
    shown.add_section()


def _room(plan: ModelPlan) -> Table:
    numbers = ("num_unique", "distinct ids", "capacity", "ids in bags", "ids in bags")
    limits = ("has room for", "a batch may hold", "per rank", "at most", "on average")
    headings = tuple(f"{a}\n{b}" for a, b in zip(numbers, limits, strict=True))
    shown = _table("Room for ids, per stack", ("stack",), headings)
    for stack in plan.stacks:
        room = stack.room
        sizes = (room.num_unique, room.most_unique, room.capacity, room.most_bag_ids)
        mean = "" if room.mean_bag_ids is None else f"{room.mean_bag_ids:,g}"
        shown.add_row(stack.name, *(f"{n:,}" for n in sizes), mean)
    return shown
