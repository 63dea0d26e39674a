"""Says whether a layout works, why not, what to change, and what it costs. Needs no device.

    python -m tools.check_mesh --mesh=replica=2,batch=8 --table_axis=batch \
        --data_axis=batch,replica --tokens_per_batch=65536 --emb_width=512 --num_unique=65537 \
        --num_devices_per_node=8 [--vocab=100000000 --dtype=bfloat16] [--json] [--png=FILE]

or, for a layout that a program makes:

    python -m tools.check_mesh --from_python=MODULE:FUNCTION

where `FUNCTION()` returns an `xrex.Layout`, or a mesh and a dictionary of the other arguments of
`make_context_handle`; layout flags beside it replace its fields. It may return an `xrex.Embeddings`
as well, also one of an `AbstractMesh`: then the plan is of all its tables and features.

Exit status: 0 accepted, 1 rejected, 2 not a question that can be answered.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import xrex
from tools.common import user_function
from tools.common.command import DONE, NO, Command, UserError, wrong_value
from tools.common.paths import output_file
from tools.layouts.layout_flags import FIELDS, LayoutFlags
from tools.layouts.model_flags import ModelFlags, Refusal, refusal
from xrex.embeddings.plan_model import ModelPlan, plan_model
from xrex.layout.layout import SIZES

COMMAND = Command("check_mesh", __doc__)
_LAYOUT = LayoutFlags(COMMAND)
_FROM_PYTHON = COMMAND.words(
    "from_python",
    None,
    "MODULE:FUNCTION",
    "MODULE:FUNCTION that returns a layout, a mesh and a dictionary of arguments, or embeddings.",
)
_VOCAB = COMMAND.integer(
    "vocab", None, "Rows of the table. Default: unknown.", at_least=1, at_most=2**31 - 1
)
_DTYPE = COMMAND.choice("dtype", "bfloat16", ("bfloat16", "float32"), "Type of the table.")
_LAZY_DECAY = COMMAND.switch("lazy_decay", False, "Whether the state has a step for each row.")
_MODEL = ModelFlags(COMMAND, _LAYOUT)
_RESERVED_GB = COMMAND.number(
    "reserved_gb", 0.0, "GB (10^9 bytes) per device for the dense model.", at_least=0, below=1e9
)
_JSON = COMMAND.switch("json", False, "Print the report as JSON.")
_PNG = COMMAND.words("png", None, "the name of a file", "File that gets the picture as an image.")

# Arguments of make_context_handle that decide nothing about a layout.
_POLICIES = ("out_of_range", "padding_id", "implementation")
# What embeddings say of their tables, and where there is no picture of one layout.
_NOT_OF_MODELS = ("vocab", "dtype", "lazy_decay", "png")


class Settings(NamedTuple):
    """What the command line asks for.

    Attributes:
      asked: a layout; a model; or what the validator had against one.
      png: the picture's file.
    """

    asked: xrex.Layout | xrex.Embeddings | Refusal
    png: Path | None


def settings() -> Settings:
    """The flags as settings.

    Raises:
      UserError: they make no layout to ask about, or the picture cannot be written.
    """
    try:
        base = None if _FROM_PYTHON.value is None else from_python(_FROM_PYTHON.value)
        if isinstance(base, xrex.Embeddings):
            return Settings(_MODEL.model(base, _NOT_OF_MODELS), None)
    except ValueError as error:
        # Embeddings are checked as they are made: by the function, or here with other fields.
        refused = refusal(error) or refusal(error.__cause__)
        if refused is None:
            raise
        return Settings(refused, None)
    _MODEL.check_unused()
    layout = _LAYOUT.layout(base)
    return Settings(layout, None if _PNG.value is None else output_file("png", _PNG.value))


def from_python(named: str) -> xrex.Layout | xrex.Embeddings:
    """The layout or the model that `MODULE:FUNCTION` returns.

    Raises:
      UserError: there is no such function, it raises, or it returns something else.
    """
    try:
        made = user_function.call(named)
    except UserError as error:
        raise UserError(f"--from_python={error}") from error.__cause__
    if isinstance(made, xrex.Layout | xrex.Embeddings):
        return made
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise wrong_value(
            "from_python",
            named,
            "it must return an xrex.Layout, or a mesh and a dictionary, or an xrex.Embeddings, not "
            f"{type(made).__name__}",
        )
    mesh, arguments = made
    unknown = sorted(set(map(str, arguments)) - set(FIELDS[1:]) - set(_POLICIES))
    if unknown:
        raise wrong_value("from_python", named, f"unknown arguments {', '.join(unknown)}")
    kept = {name: value for name, value in arguments.items() if name not in _POLICIES}
    given = _LAYOUT.given()
    missing = [name for name in FIELDS[1:] if name not in kept and name not in given]
    if missing:
        raise wrong_value("from_python", named, f"its dictionary lacks {', '.join(missing)}")
    try:
        return xrex.Layout(**{"mesh": mesh, **kept, **given})
    except TypeError as error:
        raise wrong_value("from_python", named, str(error)) from error


def main() -> int:
    """Prints the report of the layout or the model that the flags describe."""
    asked, png = settings()
    if isinstance(asked, xrex.Layout):
        return report_layout(asked, png)
    return report_model(asked)


def report_layout(layout: xrex.Layout, png: Path | None) -> int:
    """Prints a layout's report, and draws its picture."""
    # Late, since rich is an extra.
    from tools.layouts import mesh_picture
    from tools.layouts.show import show

    report = xrex.explain_layout(
        layout,
        vocab=_VOCAB.value,
        dtype=_DTYPE.value,
        rule=xrex.RowwiseAdagrad(learning_rate=0.0, lazy=_LAZY_DECAY.value),
        reserved_bytes=_reserved_bytes(),
    )
    drawn = mesh_picture.picture(layout)
    if png is not None:
        if drawn is None:
            raise wrong_value("png", _PNG.value, "there is no picture of such axes and sizes")
        try:
            mesh_picture.write_png(drawn, png)
        except ImportError as error:
            raise wrong_value("png", _PNG.value, f"{error}: install matplotlib") from error
    if _JSON.value:
        print(json.dumps(as_json(report), indent=2, default=_plain))
    else:
        show(report, drawn)
    return DONE if report.accepted else NO


def report_model(asked: xrex.Embeddings | Refusal) -> int:
    """Prints a model's plan, or why it was refused."""
    # Late, since rich is an extra.
    from tools.layouts import model_text
    from tools.layouts.show import console

    if isinstance(asked, Refusal):
        said = {"accepted": False} | asked._asdict() | {"plan": None}
        text = model_text.rejection(asked)
    else:
        plan = plan_model(asked, reserved_bytes=_reserved_bytes(), **_MODEL.arguments())
        said, text = model_as_json(asked, plan), model_text.plan_text(plan)
    if _JSON.value:
        print(json.dumps(said, indent=2, default=_plain))
    else:
        console().print(text)
    return NO if isinstance(asked, Refusal) else DONE


def _reserved_bytes() -> int:
    return round(_RESERVED_GB.value * 10**9)


def model_as_json(model: xrex.Embeddings, plan: ModelPlan) -> dict[str, Any]:
    """The model's plan as what `json` can write."""
    layout = model.handle.layout
    return {
        "accepted": True,
        "mesh": layout.mesh_sizes,
        "table_axis": layout.table_axis,
        "data_axis": layout.data_axis,
        "plan": dataclasses.asdict(plan),
    }


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


if __name__ == "__main__":
    COMMAND.run(main)
