"""Says whether validator and runtime agree on a layout of your own, on simulated devices.

    python -m tools.check_suite --mesh data=2,model=4 --table-axis model --data-axis model \
        --tokens 64 --width 32 --examples 20

Makes a mesh of that shape of CPU devices and asks the property suite about it: the validator's
decision, its words, and what becomes of a lookup and two updates without its checks, on every
device, against an oracle. A legal layout is then tried on random batches, also written down in
other ways: other devices, names, orders of tokens, finer axes. Exits with 0 where all of it holds.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DEVICES = 64


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    axes: tuple[tuple[str, int], ...]
    table_axis: tuple[str, ...]
    data_axis: tuple[str, ...]
    tokens_per_batch: int
    emb_width: int
    num_unique: int
    explicit: bool
    examples: int

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(size for _, size in self.axes)


def parse_axes(text: str) -> tuple[tuple[str, int], ...]:
    """`data=2,model=4` as names and sizes."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not name or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form name=size")
        if name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} names axis {name!r} twice")
        axes[name] = int(size)
    return tuple(axes.items())


def parse_size(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def parse_names(text: str) -> tuple[str, ...]:
    """`data,model` as a tuple; nothing as an empty one."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse(arguments: Sequence[str] | None = None) -> Request:
    """The request of a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--mesh", type=parse_axes, required=True, help="such as data=2,model=4")
    parser.add_argument("--table-axis", type=parse_names, required=True, help="such as model")
    parser.add_argument("--data-axis", type=parse_names, required=True, help="such as data,model")
    parser.add_argument(
        "--tokens", type=parse_size, help="a batch's tokens; two a device by default"
    )
    parser.add_argument("--width", type=parse_size, help="a row's columns; two a device by default")
    parser.add_argument("--num-unique", type=parse_size, help="distinct ids; the tokens by default")
    parser.add_argument("--explicit", action="store_true", help="axes of type Explicit")
    parser.add_argument(
        "--examples", type=parse_size, default=10, help="random batches; 10 by default"
    )
    options = parser.parse_args(arguments)
    devices = math.prod(size for _, size in options.mesh)
    if devices > MAX_DEVICES:
        parser.error(f"{devices} devices are too many to simulate: at most {MAX_DEVICES}")
    tokens = 2 * devices if options.tokens is None else options.tokens
    return Request(
        axes=options.mesh,
        table_axis=options.table_axis,
        data_axis=options.data_axis,
        tokens_per_batch=tokens,
        emb_width=2 * devices if options.width is None else options.width,
        num_unique=tokens if options.num_unique is None else options.num_unique,
        explicit=options.explicit,
        examples=options.examples,
    )


def check(request: Request) -> tuple[bool, str]:
    """Whether validator and runtime agree, and what to tell. Needs the devices to be there."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from tests import layout_report
    from xrex.layout.layout import Layout

    names, sizes = zip(*request.axes, strict=True)
    axis_type = AxisType.Explicit if request.explicit else AxisType.Auto
    devices = np.array(jax.devices("cpu")[: request.num_devices]).reshape(sizes)
    layout = Layout(
        mesh=Mesh(devices, names, axis_types=(axis_type,) * len(names)),
        table_axis=request.table_axis,
        data_axis=request.data_axis,
        tokens_per_batch=request.tokens_per_batch,
        emb_width=request.emb_width,
        num_unique=request.num_unique,
        num_devices_per_node=request.num_devices,
    )
    return layout_report.report(layout, request.examples)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    request = parse(arguments)
    # Before jax is imported: afterwards, the number of devices is fixed.
    flag = f"--xla_force_host_platform_device_count={request.num_devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    agree, words = check(request)
    print(words)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
