r"""Says whether validator and runtime agree on a layout of your own, on simulated devices.

    python -m tools.check_suite --mesh=data=2,model=4 --table_axis=model --data_axis=model \
        --tokens_per_batch=64 --emb_width=32 --examples=20

Makes a mesh of that shape of CPU devices and asks the property suite about it: the validator's
decision, its words, and what becomes of a lookup and two updates without its checks, on every
device, against an oracle. A legal layout is then tried on random batches, also written down in
other ways: other devices, names, orders of tokens, finer axes. By default there are two tokens and
two columns per device, room for every distinct id, and one node.

Exit status: 0 all of it holds, 1 it does not, 2 the layout cannot be simulated.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import xrex
from tools.common.command import DONE, NO, Command, UserError, wrong_value
from tools.common.devices import simulate
from tools.layouts.layout_flags import LayoutFlags
from xrex.layout.layout import SIZES, is_positive_integer

COMMAND = Command("check_suite", __doc__)
_LAYOUT = LayoutFlags(COMMAND)
_EXPLICIT = COMMAND.switch("explicit", False, "Whether the mesh's axes are of type Explicit.")
_EXAMPLES = COMMAND.integer("examples", 10, "Random batches.", at_least=1, at_most=100_000)

MOST_DEVICES = 64
# What simulated devices hold, in memory of this machine's and within minutes.
MOST_ROWS = 2**20
MOST_ELEMENTS = 2**24


class Settings(NamedTuple):
    """What the command line asks for."""

    layout: xrex.Layout
    explicit: bool
    examples: int


def settings() -> Settings:
    """The flags as settings.

    Raises:
      UserError: they make no layout, or one that is too large to simulate.
    """
    devices = _num_devices()
    tokens = _LAYOUT.given().get("tokens_per_batch", 2 * devices)
    layout = _LAYOUT.layout(
        tokens_per_batch=tokens,
        emb_width=2 * devices,
        num_unique=tokens,
        num_devices_per_node=devices,
    )
    for name in SIZES:
        if not is_positive_integer(getattr(layout, name)):
            raise wrong_value(name, getattr(layout, name), "wanted an integer of at least 1")
    for name in ("tokens_per_batch", "num_unique"):
        rows = getattr(layout, name)
        if rows > MOST_ROWS or rows * layout.emb_width > MOST_ELEMENTS:
            raise wrong_value(
                name,
                rows,
                f"too many to simulate with --emb_width={layout.emb_width}: wanted at most "
                f"{MOST_ROWS:,}, and at most {MOST_ELEMENTS:,} in all columns",
            )
    return Settings(layout, _EXPLICIT.value, _EXAMPLES.value)


def _num_devices() -> int:
    mesh = _LAYOUT.given().get("mesh")
    if mesh is None:
        raise UserError("missing --mesh: --help says what it is")
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    if min(mesh.shape.values()) < 1:
        raise wrong_value("mesh", sizes, "wanted sizes of at least 1")
    if mesh.size > MOST_DEVICES:
        raise wrong_value(
            "mesh", sizes, f"{mesh.size} devices are too many to simulate: at most {MOST_DEVICES}"
        )
    return int(mesh.size)


def check(asked: Settings) -> tuple[bool, str]:
    """Whether validator and runtime agree, and what to tell. Needs the devices to be there."""
    # Imports Hypothesis: not for those who only want to read the help.
    from tests import layout_report

    shape = asked.layout.mesh_sizes
    axis_type = AxisType.Explicit if asked.explicit else AxisType.Auto
    devices = np.array(jax.devices("cpu")[: asked.layout.mesh.size]).reshape(tuple(shape.values()))
    mesh = Mesh(devices, tuple(shape), axis_types=(axis_type,) * len(shape))
    return layout_report.report(replace(asked.layout, mesh=mesh), asked.examples)


def main() -> int:
    """Prints what was seen."""
    asked = settings()
    simulate(asked.layout.mesh.size)
    jax.config.update("jax_platforms", "cpu")
    agree, words = check(asked)
    print(words)
    return DONE if agree else NO


if __name__ == "__main__":
    COMMAND.run(main)
