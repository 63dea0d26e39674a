"""The layout: a mesh, two tuples of its axes and four sizes, which decide whether a table trains.

The one place that lists them: `xrex.layout.requirements` says what a layout has to fulfil,
`xrex.layout.handle` makes a handle of one that does.
"""

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import numpy as np
from jax.sharding import AbstractMesh, Mesh

AnyMesh = Mesh | AbstractMesh
AxisNames = str | Iterable[str]

# A layout's sizes, in the order in which they are checked.
SIZES = ("tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node")
# Positions are int32 on the devices.
LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """How a table and a batch lie on a mesh. Only types are checked: it need not work.

    `make_context_handle`, `explain_layout` and the command-line tools take a layout, or its
    attributes as arguments.

    Attributes:
      mesh: `Mesh` (Auto or Explicit axes), or `AbstractMesh` when only planning. Where a tuple has
        axes of both types, name the Explicit ones first, as JAX's types do: with another order JAX
        moves the arrays, the table too, into its own and back in every call.
      table_axis: mesh axes over which the table's columns are sharded, in rank order; a bare string
        is one axis. Devices that differ only along these form one communicator.
      data_axis: mesh axes over which tokens are sharded: those of `table_axis` in any order, and
        any of size 1.
      tokens_per_batch: tokens in a batch, over all ranks; a multiple of the communicator's size.
      emb_width: width of a whole row; a multiple of the communicator's size.
      num_unique: how many distinct ids of a batch are given room; `tokens_per_batch` is always
        enough. When a batch has more, the largest ids are left out: their tokens get no gradient
        and are counted in `dropped`.
      num_devices_per_node: devices in one machine; recorded and used for planning only.

    Raises:
      TypeError: `mesh` is no mesh, or an axis is not named by a string.
    """

    mesh: AnyMesh
    table_axis: tuple[str, ...]
    _: KW_ONLY
    data_axis: tuple[str, ...]
    tokens_per_batch: int
    emb_width: int
    num_unique: int
    num_devices_per_node: int

    def __post_init__(self) -> None:
        """Makes tuples of the axes."""
        if not isinstance(self.mesh, AnyMesh):
            raise TypeError(
                "async_emb mesh must be a jax.sharding.Mesh or AbstractMesh, "
                f"not {type(self.mesh).__name__}"
            )
        for name in ("table_axis", "data_axis"):
            object.__setattr__(self, name, axis_tuple(getattr(self, name), name))

    @property
    def group_size(self) -> int:
        """Ranks in the communicator; an axis that the mesh lacks counts once."""
        return axis_size(self.mesh, once(self.table_axis))

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that one rank holds."""
        return self.tokens_per_batch // self.group_size

    @property
    def shard_width(self) -> int:
        """Columns of the table that one rank holds."""
        return self.emb_width // self.group_size

    @property
    def off_communicator_axes(self) -> tuple[str, ...]:
        """The data axes outside of the table axis, each once, in the order of the data axis."""
        return tuple(axis for axis in once(self.data_axis) if axis not in self.table_axis)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The mesh's axes and their sizes, in order."""
        return dict(self.mesh.shape)


def as_layout(*layout: Any, **arguments: Any) -> Layout:
    """The layout itself, or one made of the arguments of `Layout`.

    Raises:
      TypeError: as `Layout`, or an argument is missing or unknown.
    """
    if len(layout) == 1 and not arguments and isinstance(layout[0], Layout):
        return layout[0]
    return Layout(*layout, **arguments)


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


def communicators(mesh: AnyMesh, table_axis: tuple[str, ...]) -> np.ndarray:
    """Positions in the mesh, (communicators, group_size), ranks in the order of the table axis."""
    names = tuple(mesh.shape)
    positions = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    others = [names.index(name) for name in names if name not in table_axis]
    ranks = [names.index(name) for name in table_axis]
    return positions.transpose(others + ranks).reshape(-1, axis_size(mesh, table_axis))


def once(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes without repetitions."""
    return tuple(dict.fromkeys(axes))


def resized(mesh: AnyMesh, sizes: dict[str, int]) -> AbstractMesh:
    """A mesh to plan with: the same axes and types, some of them of other sizes."""
    wanted = {name: sizes.get(name, size) for name, size in mesh.shape.items()}
    return AbstractMesh(tuple(wanted.values()), tuple(wanted), axis_types=mesh.axis_types)


def is_positive_integer(value: object) -> bool:
    """Whether a size is a positive integer: bool and float are none."""
    return (
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and int(cast(int, value)) > 0
    )
