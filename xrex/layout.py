"""The rules that a layout must keep, one object each, in the order in which they are checked.

A layout is a mesh, two tuples of its axes and four sizes. `xrex.context` raises the first rule that
a layout breaks; whoever explains layouts to people lists all of them. Both read `RULES`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
from jax.sharding import AbstractMesh, Mesh

AnyMesh = Mesh | AbstractMesh
AxisNames = str | Iterable[str]


@dataclass(frozen=True)
class Layout:
    """The arguments of `make_context_handle` that decide whether it can work, not yet checked."""

    mesh: AnyMesh
    table_axis: tuple[str, ...]
    data_axis: tuple[str, ...]
    tokens_per_batch: int
    emb_width: int
    num_unique: int
    num_devices_per_node: int

    @property
    def group_size(self) -> int:
        """How many ranks the communicator has; axes that the mesh lacks count once."""
        return axis_size(self.mesh, self.table_axis)

    @property
    def off_communicator_axes(self) -> tuple[str, ...]:
        """The data axes outside of the table axis, in the order of the data axis."""
        return tuple(axis for axis in self.data_axis if axis not in self.table_axis)


@dataclass(frozen=True)
class Rule:
    """One rule of layouts.

    Attributes:
      name: a short identifier.
      violation: the error text for a layout that breaks the rule, None for one that keeps it. Only
        asked for layouts that keep all earlier rules, unless a report lists every broken one.
      why: what would go wrong, in one sentence.
      advice: what to change, one remedy a line, in the layout's own names.
    """

    name: str
    violation: Callable[[Layout], str | None]
    why: str
    advice: Callable[[Layout], tuple[str, ...]]


def axis_tuple(axis: AxisNames, name: str) -> tuple[str, ...]:
    """A tuple of axis names; a bare string means that one axis.

    Raises:
      TypeError: `axis` is neither a string nor an iterable of them.
    """
    if isinstance(axis, str):
        return (axis,)
    names = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    for entry in names:
        if not isinstance(entry, str):
            raise TypeError(
                f"async_emb {name}={axis!r} must be an axis name or a tuple of them, "
                f"and {entry!r} is not a string"
            )
    return names


def axis_size(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    """The product of the axes' sizes; an axis that the mesh lacks counts once."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def first_violation(layout: Layout) -> tuple[Rule, str] | None:
    """The first rule that a layout breaks, and the error's text; None when it keeps them all."""
    for rule in RULES:
        message = rule.violation(layout)
        if message is not None:
            return rule, message
    return None


_SIZES = ("tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node")


def is_positive_integer(value: object) -> bool:
    """Whether a size is a positive integer: bool and float are none."""
    return (
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and int(cast(int, value)) > 0
    )


def _repeated_axis(layout: Layout) -> str | None:
    for name in ("table_axis", "data_axis"):
        axes = getattr(layout, name)
        for axis in axes:
            if axes.count(axis) > 1:
                return f"async_emb {name} {axes} names axis {axis!r} more than once"
    return None


def _not_positive(layout: Layout) -> str | None:
    for name in _SIZES:
        value = getattr(layout, name)
        if not is_positive_integer(value):
            return f"async_emb {name}={value!r} must be a positive integer"
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


def _uneven_tokens(layout: Layout) -> str | None:
    if layout.tokens_per_batch % layout.group_size == 0:
        return None
    return (
        f"async_emb tokens_per_batch={layout.tokens_per_batch} does not shard evenly "
        f"over the {layout.group_size}-rank communicator"
    )


def _uneven_width(layout: Layout) -> str | None:
    if layout.emb_width % layout.group_size == 0:
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


def _nearest_multiples(name: str, value: int, group_size: int) -> tuple[str, ...]:
    above = -(-value // group_size) * group_size
    below = above - group_size
    choices = [f"{name}={size}" for size in (below, above) if size > 0]
    return (
        f"Use a multiple of {group_size}: {' or '.join(choices)}.",
        f"Or a communicator whose size divides {value}.",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "repeated_axis",
        _repeated_axis,
        "An axis shards an array once; named twice it has no meaning.",
        lambda layout: ("Name each axis once.",),
    ),
    Rule(
        "positive_sizes",
        _not_positive,
        "A batch, a row, a capacity and a node each hold at least one of their kind.",
        lambda layout: ("Pass a Python integer of at least 1.",),
    ),
    Rule(
        "known_axes",
        _unknown_axis,
        "Nothing can be sharded over an axis that the mesh does not have.",
        _advise_names,
    ),
    Rule(
        "tokens_vary",
        _tokens_do_not_vary,
        "Ranks that hold the same tokens would each add the same gradients: they count twice.",
        _advise_missing,
    ),
    Rule(
        "one_shard_per_rank",
        _shards_off_communicator,
        "Copies of the table would each see other tokens and drift apart, without any error.",
        _advise_off_communicator,
    ),
    Rule(
        "even_tokens",
        _uneven_tokens,
        "Every rank sends and receives the same number of rows.",
        lambda layout: _nearest_multiples(
            "tokens_per_batch", layout.tokens_per_batch, layout.group_size
        ),
    ),
    Rule(
        "even_width",
        _uneven_width,
        "Every rank holds the same number of columns.",
        lambda layout: _nearest_multiples("emb_width", layout.emb_width, layout.group_size),
    ),
)
