"""The requirements of a layout, one object each, in the order in which they are checked.

`xrex.layout.handle` raises the first requirement that a layout breaks; `xrex.layout.explain` lists
all of them, and what would fix each. Both read `REQUIREMENTS`.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from xrex.layout.layout import (
    LARGEST_SIZE,
    SIZES,
    Layout,
    axis_size,
    is_positive_integer,
    once,
    resized,
)


@dataclass(frozen=True)
class Requirement:
    """One requirement of layouts.

    Attributes:
      name: a short identifier.
      violation: the error text for a layout that breaks the requirement, None for one that
        fulfils it. Total: a report asks it of layouts that break other requirements too.
      why: what would go wrong, in one sentence.
      advice: what to change, one remedy per line, in the layout's own names. Only asked for layouts
        that keep all earlier requirements.
      remedies: layouts near a broken one that fulfil the requirement, or come nearer to that; they
        may break others. Total, like `violation`.
    """

    name: str
    violation: Callable[[Layout], str | None]
    why: str
    advice: Callable[[Layout], tuple[str, ...]]
    remedies: Callable[[Layout], Iterator[Layout]]


def first_violation(layout: Layout) -> tuple[Requirement, str] | None:
    """The first requirement that a layout breaks, and the error's text; None if there is none."""
    for requirement in REQUIREMENTS:
        message = requirement.violation(layout)
        if message is not None:
            return requirement, message
    return None


def _repeated_axis(layout: Layout) -> str | None:
    for name in ("table_axis", "data_axis"):
        axes = getattr(layout, name)
        for axis in axes:
            if axes.count(axis) > 1:
                return f"async_emb {name} {axes} names axis {axis!r} more than once"
    return None


def _not_positive(layout: Layout) -> str | None:
    for name in SIZES:
        value = getattr(layout, name)
        if not is_positive_integer(value):
            return f"async_emb {name}={value!r} must be a positive integer"
        if value > LARGEST_SIZE:
            return (
                f"async_emb {name}={value} must be at most {LARGEST_SIZE}, as int32 positions are"
            )
    for axis, size in layout.mesh.shape.items():
        if size < 1:
            return f"async_emb mesh axis {axis!r} of size {size} must have a positive size"
    return None


def _unknown_axis(layout: Layout) -> str | None:
    for axis in (*layout.table_axis, *layout.data_axis):
        if axis not in layout.mesh.shape:
            return f"async_emb axis {axis!r} is not a mesh axis of {layout.mesh}"
    return None


def _missing_axes(layout: Layout) -> list[str]:
    return [axis for axis in layout.table_axis if axis not in layout.data_axis]


def _tokens_do_not_vary(layout: Layout) -> str | None:
    missing_axes = _missing_axes(layout)
    if not missing_axes:
        return None
    return (
        "async_emb requires token shards to vary across the communicator: "
        f"table_axis {missing_axes} missing from data_axis {layout.data_axis}"
    )


def _shards_off_communicator(layout: Layout) -> str | None:
    off_communicator_shards = axis_size(layout.mesh, layout.off_communicator_axes)
    if off_communicator_shards == 1:
        return None
    return (
        "async_emb requires exactly one token shard per communicator rank: "
        f"data_axis {layout.data_axis} shards tokens over {off_communicator_shards} "
        f"positions outside table_axis {layout.table_axis}"
    )


def _divides(group_size: int, size: int) -> bool:
    """Whether ranks share a size evenly; true of sizes that break another requirement."""
    return not is_positive_integer(size) or group_size < 1 or size % group_size == 0


def _uneven_tokens(layout: Layout) -> str | None:
    if _divides(layout.group_size, layout.tokens_per_batch):
        return None
    return (
        f"async_emb tokens_per_batch={layout.tokens_per_batch} does not shard evenly "
        f"over the {layout.group_size}-rank communicator"
    )


def _uneven_width(layout: Layout) -> str | None:
    if _divides(layout.group_size, layout.emb_width):
        return None
    return (
        f"async_emb emb_width={layout.emb_width} does not shard evenly "
        f"over the {layout.group_size}-rank communicator"
    )


def _advise_names(layout: Layout) -> tuple[str, ...]:
    return (f"The mesh's axes are {tuple(layout.mesh.shape)}.",)


def _advise_missing(layout: Layout) -> tuple[str, ...]:
    missing = tuple(_missing_axes(layout))
    kept = tuple(axis for axis in layout.table_axis if axis not in missing)
    return (
        f"Shard the tokens over the table's axes too: data_axis={(*layout.data_axis, *missing)}.",
        f"Or shard the table over fewer axes: table_axis={kept}.",
    )


def _advise_off_communicator(layout: Layout) -> tuple[str, ...]:
    extra = tuple(
        axis for axis in layout.off_communicator_axes if layout.mesh.shape.get(axis, 1) != 1
    )
    kept = tuple(axis for axis in layout.data_axis if axis not in extra)
    return (
        f"Add the extra axes to the table's: table_axis={(*layout.table_axis, *extra)}.",
        f"Or drop them from the tokens': data_axis={kept}.",
        f"Or drop {extra} from the mesh, or run one job per replica.",
    )


def _advise_multiples(name: str) -> Callable[[Layout], tuple[str, ...]]:
    def advise(layout: Layout) -> tuple[str, ...]:
        choices = [
            f"{name}={getattr(changed, name)}" for changed in _nearest_multiples(name)(layout)
        ]
        return (
            f"Use a multiple of {layout.group_size}: {' or '.join(choices)}.",
            f"Or a communicator whose size divides {getattr(layout, name)}.",
        )

    return advise


def _name_once(layout: Layout) -> Iterator[Layout]:
    yield replace(layout, table_axis=once(layout.table_axis), data_axis=once(layout.data_axis))


def _make_positive(layout: Layout) -> Iterator[Layout]:
    sizes: dict[str, Any] = {
        name: min(value, LARGEST_SIZE) if is_positive_integer(value) else _nearest_positive(value)
        for name, value in ((name, getattr(layout, name)) for name in SIZES)
    }
    if not is_positive_integer(layout.num_unique) or layout.num_unique > LARGEST_SIZE:
        sizes["num_unique"] = sizes["tokens_per_batch"]  # Room for every id of any batch.
    empty = {axis: 1 for axis, size in layout.mesh.shape.items() if size < 1}
    yield replace(layout, mesh=resized(layout.mesh, empty) if empty else layout.mesh, **sizes)


def _nearest_positive(value: object) -> int:
    try:
        return min(max(1, round(float(cast(Any, value)))), LARGEST_SIZE)
    except (TypeError, ValueError, OverflowError):
        return 1


def _name_known_axes(layout: Layout) -> Iterator[Layout]:
    """Puts a mesh axis for the first unknown one, the most alike first; or leaves that one out."""
    known = tuple(layout.mesh.shape)
    named = (*layout.table_axis, *layout.data_axis)
    unknown = next((axis for axis in named if axis not in known), None)
    if unknown is None:
        return
    alike = difflib.get_close_matches(unknown, known, n=len(known) or 1, cutoff=0.0)
    for names in (*((axis,) for axis in alike), ()):
        # Where the new name stands already, the unknown one is one too many.
        table_axis, data_axis = (
            once(tuple(n for axis in axes for n in (names if axis == unknown else (axis,))))
            for axes in (layout.table_axis, layout.data_axis)
        )
        yield replace(layout, table_axis=table_axis, data_axis=data_axis)


def _vary_tokens(layout: Layout) -> Iterator[Layout]:
    missing = tuple(_missing_axes(layout))
    yield replace(layout, data_axis=(*layout.data_axis, *missing))
    kept = tuple(axis for axis in layout.table_axis if axis not in missing)
    yield replace(layout, table_axis=kept)


def _bring_shards_in(layout: Layout) -> Iterator[Layout]:
    extra = tuple(a for a in layout.off_communicator_axes if layout.mesh.shape.get(a, 1) != 1)
    yield replace(layout, table_axis=(*layout.table_axis, *extra))
    yield replace(layout, data_axis=tuple(a for a in layout.data_axis if a not in extra))
    yield replace(layout, mesh=resized(layout.mesh, dict.fromkeys(extra, 1)))


def _nearest_multiples(name: str) -> Callable[[Layout], Iterator[Layout]]:
    def remedies(layout: Layout) -> Iterator[Layout]:
        group_size, value = layout.group_size, getattr(layout, name)
        if _divides(group_size, value):
            return
        below = int(value) // group_size * group_size
        for size in (below, below + group_size):
            if size > 0:
                changed: dict[str, Any] = {name: size}
                yield replace(layout, **changed)

    return remedies


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "repeated_axis",
        _repeated_axis,
        "An axis shards an array once; named twice it has no meaning.",
        lambda layout: ("Name each axis once.",),
        _name_once,
    ),
    Requirement(
        "positive_sizes",
        _not_positive,
        "A batch, a row, a capacity and a node each hold at least one of their kind.",
        lambda layout: (f"Pass a Python integer from 1 to {LARGEST_SIZE}.",),
        _make_positive,
    ),
    Requirement(
        "known_axes",
        _unknown_axis,
        "Nothing can be sharded over an axis that the mesh does not have.",
        _advise_names,
        _name_known_axes,
    ),
    Requirement(
        "tokens_vary",
        _tokens_do_not_vary,
        "Ranks that hold the same tokens would each add the same gradients: they count twice.",
        _advise_missing,
        _vary_tokens,
    ),
    Requirement(
        "one_shard_per_rank",
        _shards_off_communicator,
        "Copies of the table would each see other tokens and drift apart, without any error.",
        _advise_off_communicator,
        _bring_shards_in,
    ),
    Requirement(
        "even_tokens",
        _uneven_tokens,
        "Every rank sends and receives the same number of rows.",
        _advise_multiples("tokens_per_batch"),
        _nearest_multiples("tokens_per_batch"),
    ),
    Requirement(
        "even_width",
        _uneven_width,
        "Every rank holds the same number of columns.",
        _advise_multiples("emb_width"),
        _nearest_multiples("emb_width"),
    ),
)
