"""The fields of `xrex.Layout` as flags: one name for one thing in every tool.

COMMAND = Command("check_mesh", __doc__)
_LAYOUT = LayoutFlags(COMMAND)
...
layout = _LAYOUT.layout()
"""

from dataclasses import MISSING, fields, replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType

import xrex
from tools.common.command import Command, UserError
from tools.common.flag_values import integer, several, words

FIELDS = tuple(field.name for field in fields(xrex.Layout))
# All positions of a mesh are looked at.
MOST_DEVICES = 2**20

_HELP = {
    "mesh": "Axes of the mesh and their sizes, major first: replica=2,batch=8.",
    "table_axis": "Mesh axes that shard the table's columns, in rank order.",
    "data_axis": "Mesh axes that shard the tokens.",
    "tokens_per_batch": "Tokens in a batch, over all ranks.",
    "emb_width": "Columns of a whole row.",
    "num_unique": "Distinct ids of a batch that there is room for.",
    "num_devices_per_node": "Devices in one machine.",
}


def parse_mesh(text: str) -> AbstractMesh:
    """The mesh that `replica=2,batch=8` describes.

    Raises:
      ValueError: it describes none.
    """
    sizes: dict[str, int] = {}
    devices = 1
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        try:
            number = integer()(size)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"{part!r} is not AXIS=SIZE, as in replica=2,batch=8")
        if name in sizes:
            raise ValueError(f"axis {name!r} is there twice: wanted each axis once")
        sizes[name] = number
        devices *= max(1, number)
        if devices > MOST_DEVICES:
            raise ValueError(f"wanted at most {MOST_DEVICES:,} devices")
    # Auto: what a mesh is unless its program says otherwise, in every version of JAX.
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def parse_axes(text: str) -> tuple[str, ...]:
    """Names with commas between them; an empty text is no axis."""
    return several(words("names of mesh axes, such as replica,batch"))(text) if text else ()


class LayoutFlags:
    """Some of the layout's fields as flags of one tool, without defaults of their own."""

    def __init__(self, command: Command, *names: str) -> None:
        """Defines the flags of the fields `names`, or of all fields."""
        parsers: dict[str, Any] = {"mesh": parse_mesh} | dict.fromkeys(
            ("table_axis", "data_axis"), parse_axes
        )
        self._holders = {
            name: command.flag(name, None, _HELP[name], parsers.get(name, integer()))
            for name in names or FIELDS
        }

    def given(self) -> dict[str, Any]:
        """The fields that the command line has, by name."""
        values = {name: holder.value for name, holder in self._holders.items()}
        return {name: value for name, value in values.items() if value is not None}

    def layout(self, base: xrex.Layout | None = None, **defaults: Any) -> xrex.Layout:
        """The layout of the command line.

        Args:
          base: the layout whose fields the flags replace.
          **defaults: fields of a layout that flags need not give.

        Raises:
          UserError: fields are missing.
        """
        if base is not None:
            return replace(base, **self.given())
        arguments = defaults | self.given()
        missing = [
            f"--{field.name}"
            for field in fields(xrex.Layout)
            if field.name not in arguments and field.default is MISSING
        ]
        if missing:
            raise UserError(f"missing {', '.join(missing)}: --help says what they are")
        return xrex.Layout(**arguments)

    def check_works(self, layout: xrex.Layout) -> None:
        """Refuses a layout that does not work, with the flags of this tool that change that.

        Raises:
          UserError: it does not work.
        """
        broken = xrex.explain_layout(layout).broken
        if not broken:
            return
        changes = [
            change.flags
            for change in broken[0].changes
            if all(name in self._holders for name, _ in change.arguments)
        ]
        advice = f" Change it: {' or '.join(changes)}" if changes else ""
        raise UserError(f"{broken[0].message}. {broken[0].why}{advice}")
