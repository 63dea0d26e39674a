"""The design's rules and their texts, stated once more and apart from the library."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from xrex.layout.layout import Layout

SIZES = ("tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node")


def expected_rejection(layout: Layout) -> str | None:
    """A pattern of the whole error text for the first rule that a layout breaks, or None."""
    mesh, table_axis, data_axis = layout.mesh, layout.table_axis, layout.data_axis
    for axes in (table_axis, data_axis):
        for axis in axes:
            if axes.count(axis) > 1:
                return f"async_emb .* names axis {axis!r} more than once"
    for name in SIZES:
        size = getattr(layout, name)
        if type(size) not in (int, np.int64) or size < 1:
            return re.escape(f"async_emb {name}={size!r} must be a positive integer")
    for axis in table_axis + data_axis:
        if axis not in mesh.axis_names:
            return re.escape(f"async_emb axis {axis!r} is not a mesh axis of {mesh}")
    return _expected_of_known_axes(layout)


def _expected_of_known_axes(layout: Layout) -> str | None:
    mesh, table_axis, data_axis = layout.mesh, layout.table_axis, layout.data_axis
    missing_axes = [axis for axis in table_axis if axis not in data_axis]
    if missing_axes:
        return re.escape(
            "async_emb requires token shards to vary across the communicator: "
            f"table_axis {missing_axes} missing from data_axis {data_axis}"
        )
    off = math.prod(mesh.shape[axis] for axis in data_axis if axis not in table_axis)
    if off != 1:
        return re.escape(
            "async_emb requires exactly one token shard per communicator rank: "
            f"data_axis {data_axis} shards tokens over {off} positions "
            f"outside table_axis {table_axis}"
        )
    ranks = math.prod(mesh.shape[axis] for axis in table_axis)
    for name in ("tokens_per_batch", "emb_width"):
        size = getattr(layout, name)
        if size % ranks:
            return re.escape(
                f"async_emb {name}={size} does not shard evenly over the {ranks}-rank communicator"
            )
    return None


def check_rejection(layout: Layout, make_handle: Callable[[Layout], Any]) -> None:
    """Raises AssertionError unless `make_handle(layout)` does what the design says."""
    pattern = expected_rejection(layout)
    error = None
    try:
        handle = make_handle(layout)
    except ValueError as raised:
        error = raised
    if error is None:
        assert pattern is None, f"accepted, but expected: {pattern}"
        assert handle.group_size * handle.tokens_per_rank == layout.tokens_per_batch
        assert handle.group_size * handle.shard_width == layout.emb_width
    else:
        assert pattern is not None, f"{error}, but expected: no error"
        assert re.fullmatch(pattern, str(error)), f"{error}, but expected: {pattern}"
        assert error.__notes__, f"{error}, but expected: advice"
