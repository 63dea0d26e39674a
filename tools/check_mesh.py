r"""Says whether a layout works, why not, what to change, and what it costs. Needs no device.

    python -m tools.check_mesh --mesh replica=2,batch=8 --table_axis batch \
        --data_axis batch,replica --tokens_per_batch 65536 --emb_width 512 --num_unique 65537 \
        --num_devices_per_node 8 [--vocab 100000000 --dtype bfloat16] [--json] [--png FILE]

or, for a layout that a program makes:

    python -m tools.check_mesh --from_python MODULE:FUNCTION

where `FUNCTION()` returns a mesh and a dictionary of the other arguments of `make_context_handle`;
layout flags beside it replace its arguments.

Exit status: 0 accepted, 1 rejected, 2 not a question that can be answered (usage).
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from jax.sharding import AbstractMesh, AxisType
from rich.console import Console

import xrex
from tools import layout_text, mesh_picture
from tools.common.paths import from_caller
from xrex.layout.layout import SIZES, axis_tuple

ACCEPTED, REJECTED, USAGE = 0, 1, 2
_SIZES = ("tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node")
_NEEDED = ("mesh", "table_axis", "data_axis", *_SIZES)
# Arguments of make_context_handle that decide nothing about a layout.
_POLICIES = ("out_of_range", "padding_id", "implementation")
_PIPED_WIDTH = 120


class UsageError(Exception):
    """The command line does not make a layout to be asked about."""


def main(argv: Sequence[str]) -> int:
    """Runs the tool and returns its exit status."""
    options = _flags()
    try:
        left_over = options(argv)[1:]
        if _value(options, "help"):
            print(f"{__doc__}\n{options.get_help(include_special_flags=False)}")
            return ACCEPTED
        if left_over:
            raise UsageError(f"arguments without a flag: {' '.join(left_over)}")
        arguments = layout_arguments(options)
        report = explain(arguments, options)
    except (UsageError, flags.Error) as error:
        print(f"check_mesh: {error}\nTry --help.", file=sys.stderr)
        return USAGE
    drawn = _picture(arguments, report)
    if not _write_png(drawn, _value(options, "png")):
        return USAGE
    if _value(options, "json"):
        print(json.dumps(as_json(report), indent=2, default=_plain))
    else:
        show(report, drawn)
    return ACCEPTED if report.accepted else REJECTED


def _value(options: flags.FlagValues, name: str) -> Any:
    return options[name].value


def _flags() -> flags.FlagValues:
    """The tool's flags. Not the process' own: other tools name some of them too."""
    values = flags.FlagValues()
    text = {
        "mesh": "Axes and sizes, major first: replica=2,batch=8.",
        "from_python": "MODULE:FUNCTION that returns a mesh and a dictionary of arguments.",
        "png": "File that gets the picture as an image.",
    }
    for name, help_text in text.items():
        flags.DEFINE_string(name, None, help_text, flag_values=values)
    axes = {"table_axis": "the table's columns", "data_axis": "the tokens"}
    for name, what in axes.items():
        flags.DEFINE_list(name, None, f"Mesh axes that shard {what}.", flag_values=values)
    numbers = {
        "tokens_per_batch": "Tokens in a batch, over all ranks.",
        "emb_width": "Columns of a whole row.",
        "num_unique": "Distinct ids of a batch that there is room for.",
        "num_devices_per_node": "Devices in one machine.",
        "vocab": "Rows of the table. Default: unknown.",
    }
    for name, help_text in numbers.items():
        flags.DEFINE_integer(name, None, help_text, flag_values=values)
    flags.DEFINE_enum(
        "dtype", "bfloat16", ["bfloat16", "float32"], "Type of the table.", flag_values=values
    )
    flags.DEFINE_boolean(
        "lazy_decay", False, "Whether the state has a step for each row.", flag_values=values
    )
    flags.DEFINE_float(
        "reserved_gb",
        0.0,
        "GB (10^9 bytes) a device for the dense model.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_boolean("json", False, "Print the report as JSON.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this text.", flag_values=values)
    return values


def layout_arguments(options: flags.FlagValues) -> dict[str, Any]:
    """The arguments of `explain_layout` that make the layout, the mesh among them.

    Raises:
      UsageError: they are incomplete, or cannot be understood.
    """
    arguments: dict[str, Any] = {}
    if _value(options, "from_python") is not None:
        arguments = arguments_from_python(_value(options, "from_python"))
    if _value(options, "mesh") is not None:
        arguments["mesh"] = parse_mesh(_value(options, "mesh"))
    for name in ("table_axis", "data_axis"):
        if _value(options, name) is not None:
            arguments[name] = tuple(_value(options, name))
    for name in _SIZES:
        if _value(options, name) is not None:
            arguments[name] = _value(options, name)
    missing = [f"--{name}" for name in _NEEDED if name not in arguments]
    if missing:
        raise UsageError(f"missing {', '.join(missing)}")
    return arguments


def parse_mesh(text: str) -> AbstractMesh:
    """The mesh that `replica=2,batch=8` describes.

    Raises:
      UsageError: it describes none.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        name = name.strip()
        try:
            number = int(size)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise UsageError(f"--mesh={text}: {part!r} is not AXIS=SIZE, as in replica=2,batch=8")
        if name in sizes:
            raise UsageError(f"--mesh={text}: axis {name!r} is there twice")
        sizes[name] = number
    # Auto: what a mesh is unless its program says otherwise, in every version of JAX.
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def arguments_from_python(name: str) -> dict[str, Any]:
    """Calls `MODULE:FUNCTION` and returns its mesh and arguments as one dictionary.

    Raises:
      UsageError: there is no such function, or it returns something else.
    """
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:  # Whatever it is, it is the caller's.
        raise UsageError(f"--from_python={name}: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise UsageError(
            f"--from_python={name} must return a mesh and a dictionary, not {type(made).__name__}"
        )
    mesh, arguments = made
    unknown = sorted(set(arguments) - set(_NEEDED) - set(_POLICIES))
    if unknown:
        raise UsageError(f"--from_python={name}: unknown arguments {', '.join(unknown)}")
    kept = {key: value for key, value in arguments.items() if key not in _POLICIES}
    return {**kept, "mesh": mesh}


def explain(arguments: Mapping[str, Any], options: flags.FlagValues) -> xrex.LayoutReport:
    """The report of a layout.

    Raises:
      UsageError: an argument is not of a kind that could make a layout.
    """
    rest = {name: arguments[name] for name in ("data_axis", *_SIZES)}
    try:
        return xrex.explain_layout(
            arguments["mesh"],
            arguments["table_axis"],
            **rest,
            vocab=_value(options, "vocab"),
            dtype=_value(options, "dtype"),
            rule=xrex.RowwiseAdagrad(learning_rate=0.0, lazy=_value(options, "lazy_decay")),
            reserved_bytes=round(_value(options, "reserved_gb") * 10**9),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def as_json(report: xrex.LayoutReport) -> dict[str, Any]:
    """The report as what `json` can write."""
    layout = report.layout
    return {
        "accepted": report.accepted,
        "mesh": layout.mesh_sizes,
        "table_axis": layout.table_axis,
        "data_axis": layout.data_axis,
        "sizes": {name: getattr(layout, name) for name in SIZES},
        "broken": [dataclasses.asdict(broken) for broken in report.broken],
        "plan": None if report.plan is None else dataclasses.asdict(report.plan),
    }


def _plain(value: object) -> object:
    """What is neither number nor string for `json`: a size that is none, or one of NumPy's."""
    return value.item() if isinstance(value, np.generic) else str(value)


def show(report: xrex.LayoutReport, drawn: mesh_picture.Picture | None) -> None:
    """Prints a report: in colour on a terminal, plain elsewhere."""
    # The terminal breaks long lines, not the tool: errors and flags are to be copied whole.
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(layout_text.verdict(report))
    if drawn is not None:
        console.print(f"\n{drawn.title}")
        console.print(mesh_picture.as_table(drawn))
    if report.plan is None:
        console.print(layout_text.explanation(report))
    else:
        console.print(layout_text.plan_tables(report.plan))


def _picture(
    arguments: Mapping[str, Any], report: xrex.LayoutReport
) -> mesh_picture.Picture | None:
    return mesh_picture.picture(
        arguments["mesh"],
        axis_tuple(arguments["table_axis"], "table_axis"),
        axis_tuple(arguments["data_axis"], "data_axis"),
        tokens_per_batch=arguments["tokens_per_batch"],
        emb_width=arguments["emb_width"],
        num_devices_per_node=arguments["num_devices_per_node"],
    )


def _write_png(drawn: mesh_picture.Picture | None, path: str | None) -> bool:
    """Writes the picture where that is asked for; False where it cannot be written."""
    if path is None:
        return True
    if drawn is None:
        print("check_mesh: there is no picture of such axes and sizes", file=sys.stderr)
        return True
    try:
        mesh_picture.write_png(drawn, from_caller(path))
    except (ImportError, OSError) as error:
        print(f"check_mesh: --png={path}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv))
