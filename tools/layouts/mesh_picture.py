"""Draws a layout: which devices form which communicator, and what each of their ranks holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh
from rich.table import Table
from rich.text import Text

from xrex.layout.layout import AnyMesh, Layout, communicators

# More ranks than these are drawn in groups; of more communicators, the first ones and the last.
MOST_RANKS = 16
MOST_COMMUNICATORS = 4
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")


@dataclass(frozen=True)
class Row:
    """One rank, or several with consecutive numbers, in all communicators.

    Attributes:
      ranks: their numbers.
      columns: columns of the table that they hold.
      tokens: tokens that they hold; empty where communicators differ in it.
      cells: one per communicator that is drawn: devices and nodes, and tokens where they differ.
    """

    ranks: str
    columns: str
    tokens: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """A layout as a table of text, for a terminal or an image.

    Attributes:
      title: what is drawn.
      communicators: headings of the cells; all are drawn, or the first ones and the last.
      rows: from rank 0 on.
    """

    title: str
    communicators: tuple[str, ...]
    rows: tuple[Row, ...]


def picture(layout: Layout) -> Picture | None:
    """The picture of a layout, accepted or not; None where axes or sizes have no meaning."""
    mesh, node = layout.mesh, layout.num_devices_per_node
    sizes = (*mesh.shape.values(), layout.tokens_per_batch, layout.emb_width, node)
    for axes in (layout.table_axis, layout.data_axis):
        if len(set(axes)) < len(axes) or not set(axes) <= set(mesh.shape):
            return None
    if any(not isinstance(size, int | np.integer) or size < 1 for size in sizes):
        return None
    groups = communicators(mesh, layout.table_axis)
    count, ranks = groups.shape
    devices = _device_numbers(mesh)[groups]
    shards, num_shards = _token_shards(mesh, layout.data_axis)
    shards = shards[groups]
    alike = bool((shards == shards[0]).all())
    held = _Held(devices // node, devices, shards, layout.tokens_per_batch, num_shards)
    drawn = _drawn(count)
    rows = tuple(
        Row(
            ranks=_named("rank", part),
            columns=_share(part, layout.emb_width, ranks),
            tokens=_share(shards[0][part], layout.tokens_per_batch, num_shards) if alike else "",
            cells=tuple(_cell(held, (number, part), alike) for number in drawn),
        )
        for part in np.array_split(np.arange(ranks), min(ranks, MOST_RANKS))
    )
    headings = tuple(f"communicator {number}" for number in drawn)
    return Picture(_title(mesh, count, ranks), headings, rows)


class _Held(NamedTuple):
    """Of each rank of each communicator, (communicators, ranks): node, device, token shard."""

    nodes: np.ndarray
    devices: np.ndarray
    shards: np.ndarray
    tokens_per_batch: int
    num_shards: int


def _drawn(count: int) -> tuple[int, ...]:
    """Which communicators are drawn."""
    if count <= MOST_COMMUNICATORS:
        return tuple(range(count))
    return (*range(MOST_COMMUNICATORS - 1), count - 1)


def _cell(held: _Held, where: tuple[int, np.ndarray], alike: bool) -> str:
    devices, nodes = held.devices[where], _named("node", held.nodes[where])
    place = f" ({nodes})" if len(devices) == 1 else f"\n{nodes}"
    text = _named("device", devices) + place
    if alike:
        return text
    return f"{text}\ntokens {_share(held.shards[where], held.tokens_per_batch, held.num_shards)}"


def as_table(drawn: Picture) -> Table:
    """The picture for a terminal, without its title: one colour per rank."""
    alike = any(row.tokens for row in drawn.rows)
    several_lines = any("\n" in cell for row in drawn.rows for cell in row.cells)
    table = Table(show_lines=several_lines)
    for heading in ("", "columns", *(["tokens"] if alike else []), *drawn.communicators):
        table.add_column(heading)
    for number, row in enumerate(drawn.rows):
        held = (row.columns, *([row.tokens] if alike else []))
        colour = _COLOURS[number % len(_COLOURS)]
        table.add_row(*(Text(text, style=colour) for text in (row.ranks, *held, *row.cells)))
    return table


def write_png(drawn: Picture, path: Path) -> None:
    """The picture as an image: a row per rank, a column per communicator, one colour per rank."""
    # Only here: the import takes as long as everything else.
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    wide, high = len(drawn.communicators), len(drawn.rows)
    deep = max(cell.count("\n") for row in drawn.rows for cell in row.cells)
    size = (4 + 2.6 * wide, 1.2 + (0.45 + 0.15 * deep) * high)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(drawn.rows):
        colour = colormaps["viridis"](0.25 + 0.7 * y / max(1, high - 1))
        for x, cell in enumerate(row.cells):
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", alpha=0.5))
            axes.text(x + 0.5, y + 0.5, cell, ha="center", va="center", fontsize=8)
    labels = [
        f"{row.ranks}: columns {row.columns}" + (f", tokens {row.tokens}" if row.tokens else "")
        for row in drawn.rows
    ]
    axes.set(xlim=(0, wide), ylim=(high, 0), title=drawn.title)
    axes.set_yticks(np.arange(high) + 0.5, labels)
    axes.set_xticks(np.arange(wide) + 0.5, drawn.communicators)
    axes.tick_params(length=0)
    figure.savefig(path, dpi=120, format="png")


def _title(mesh: AnyMesh, count: int, ranks: int) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    copies = "one copy of the table" if count == 1 else f"{count} copies of the table"
    text = f"{axes}: {_counted(count, 'communicator')} of {_counted(ranks, 'rank')}, {copies}"
    return f"{text}; {MOST_COMMUNICATORS} are drawn" if count > MOST_COMMUNICATORS else text


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _device_numbers(mesh: AnyMesh) -> np.ndarray:
    """Ids of the mesh's devices; positions where it has none."""
    if isinstance(mesh, AbstractMesh):
        return np.arange(mesh.size)
    return np.array([device.id for device in mesh.devices.flat])


def _token_shards(mesh: AnyMesh, data_axis: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Which shard of the tokens each position of the mesh holds, and how many shards there are."""
    sizes = tuple(mesh.shape.values())
    coordinates = dict(zip(mesh.shape, np.unravel_index(np.arange(mesh.size), sizes), strict=True))
    shard, count = np.zeros(mesh.size, np.int64), 1
    for axis in data_axis:
        shard = shard * mesh.shape[axis] + coordinates[axis]
        count *= mesh.shape[axis]
    return shard, count


def _share(shards: np.ndarray, total: int, num_shards: int) -> str:
    """Which of `total` things certain of their equal shards are."""
    if total % num_shards:
        return f"shards {ranges(shards)} of {num_shards}, uneven"
    first, last = int(shards.min()), int(shards.max())
    if len(np.unique(shards)) <= last - first:
        return f"shards {ranges(shards)} of {num_shards}"
    size = total // num_shards
    start, end = first * size, (last + 1) * size - 1
    return str(start) if start == end else f"{start}-{end}"


def _named(name: str, numbers: np.ndarray) -> str:
    several = len(np.unique(numbers)) > 1
    return f"{name}{'s' if several else ''} {ranges(numbers)}"


def ranges(numbers: np.ndarray) -> str:
    """Numbers in a few words: "3", "0-7", "0, 8, ... 56" or "0 ... 61 (12)"."""
    values = np.unique(numbers)
    first, last = int(values[0]), int(values[-1])
    if first == last:
        return str(first)
    if last - first + 1 == len(values):
        return f"{first}-{last}"
    if len(values) <= 3:
        return ", ".join(str(value) for value in values)
    if len(np.unique(np.diff(values))) == 1:
        return f"{first}, {values[1]}, ... {last}"
    return f"{first} ... {last} ({len(values)})"
