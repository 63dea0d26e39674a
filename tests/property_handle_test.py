"""Handles are values: equal exactly when their contents are, in dicts, pickles and under jit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

import xrex
from tests import one_layout, strategies
from tests.judge import abstract, make_handle
from tests.suite_report import Tally, examples
from xrex.layout.layout import Layout

pytestmark = pytest.mark.property


@st.composite
def handles(draw: st.DrawFn) -> tuple[Layout, dict[str, Any]]:
    """A legal layout, on devices or not, and a policy: what a handle is made of."""
    layout = draw(strategies.legal_layouts())
    if draw(st.booleans()):
        layout = abstract(layout)
    out_of_range = draw(st.sampled_from(["zero", "clip", "raise"]))
    return layout, {"out_of_range": out_of_range, "padding_id": draw(st.sampled_from([None, 0]))}


@st.composite
def other_contents(
    draw: st.DrawFn, contents: tuple[Layout, dict[str, Any]]
) -> tuple[Layout, dict[str, Any]]:
    """Contents that differ in one thing."""
    layout, policy = contents
    kinds = ["size", "capacity", "policy", "types", "devices", "order", "names", "shape"]
    kind = draw(st.sampled_from(kinds))
    if kind == "size":
        name = draw(st.sampled_from(["tokens_per_batch", "emb_width"]))
        return replace(layout, **{name: 2 * getattr(layout, name)}), policy
    if kind == "capacity":
        name = draw(st.sampled_from(["num_unique", "num_devices_per_node"]))
        return replace(layout, **{name: 1 + getattr(layout, name)}), policy
    if kind == "policy":
        changed = {"padding_id": 5} if draw(st.booleans()) else {"out_of_range": "zero"}
        assume(policy | changed != policy)
        return layout, policy | changed
    if kind == "order":
        name = draw(st.sampled_from(["table_axis", "data_axis"]))
        assume(len(getattr(layout, name)) > 1)
        return replace(layout, **{name: getattr(layout, name)[::-1]}), policy
    changed_layout = OTHER_MESHES[kind](layout)
    assume(changed_layout != layout)
    return changed_layout, policy


def with_mesh(layout: Layout, sizes: Any, names: Any, types: Any) -> Layout:
    """The layout on a mesh of that shape, of the same devices, or without any as before."""
    mesh = layout.mesh
    if isinstance(mesh, Mesh):
        made = Mesh(mesh.devices.reshape(sizes), names, axis_types=types)
        return replace(layout, mesh=made)
    return replace(layout, mesh=AbstractMesh(sizes, names, axis_types=types))


def flip_types(layout: Layout) -> Layout:
    mesh = layout.mesh
    flip = {AxisType.Auto: AxisType.Explicit, AxisType.Explicit: AxisType.Auto}
    types = tuple(flip[kind] for kind in mesh.axis_types)
    return with_mesh(layout, mesh.axis_sizes, mesh.axis_names, types)


def move_devices(layout: Layout) -> Layout:
    """Each device to another's place; a mesh without devices instead of one that has just one."""
    mesh = layout.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1:
        return abstract(layout)
    devices = np.roll(mesh.devices, 1)
    return replace(layout, mesh=Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))


def rename_axes(layout: Layout) -> Layout:
    mesh = layout.mesh
    names = {name: f"{name}_too" for name in mesh.axis_names}
    axes = {n: tuple(map(names.get, getattr(layout, n))) for n in ("table_axis", "data_axis")}
    renamed = with_mesh(layout, mesh.axis_sizes, tuple(names.values()), mesh.axis_types)
    return replace(renamed, **axes)


def add_an_axis(layout: Layout) -> Layout:
    mesh = layout.mesh
    names, types = (*mesh.axis_names, "one"), (*mesh.axis_types, AxisType.Auto)
    return with_mesh(layout, (*mesh.axis_sizes, 1), names, types)


OTHER_MESHES = {
    "types": flip_types,
    "devices": move_devices,
    "names": rename_axes,
    "shape": add_an_axis,
}


def make(contents: tuple[Layout, dict[str, Any]]) -> xrex.AsyncEmbContextHandle:
    layout, policy = contents
    return make_handle(layout, **policy)


@given(st.data())
def test_equal_contents_make_equal_handles(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts())
    layout = abstract(layout) if data.draw(st.booleans()) else layout
    one_layout.check_handle(data.draw, layout)
    tally("examples of equal and pickled handles")


@given(st.data())
def test_other_contents_make_other_handles(tally: Tally, data: st.DataObject) -> None:
    contents = data.draw(handles())
    one, two = make(contents), make(data.draw(other_contents(contents)))
    assert one != two
    assert len({one, two}) == 2
    tally("examples of different handles")


def check_traces(
    data: st.DataObject, size: Callable[[Any, xrex.AsyncEmbContextHandle], int]
) -> None:
    """A function of a handle, and of an equal one, is traced once, and again for another handle.

    Args:
      data: draws the handles.
      size: what it takes of the jitted function and a handle to know the result's length.
    """
    contents = data.draw(handles())
    layout, policy = contents
    traced = []

    @jax.jit(static_argnums=0)
    def ones(handle: xrex.AsyncEmbContextHandle) -> jax.Array:
        traced.append(handle)
        return jnp.ones(handle.group_size)

    one, two = make(contents), make((one_layout.rebuilt(layout), policy))
    other = make(data.draw(other_contents(contents)))
    for handle, so_far in ((one, [one]), (two, [one]), (other, [one, other])):
        assert size(ones, handle) == handle.group_size
        assert traced == so_far


@given(st.data())
def test_jit_traces_once_for_each_content(tally: Tally, data: st.DataObject) -> None:
    check_traces(data, lambda ones, handle: ones.eval_shape(handle).size)
    tally("examples of handles under jit")


# Fewer, since each compiles two programs.
@given(st.data())
@settings(max_examples=examples(0.1))
def test_a_call_traces_once_for_each_content(tally: Tally, data: st.DataObject) -> None:
    check_traces(data, lambda ones, handle: int(np.asarray(ones(handle)).sum()))
    tally("examples of handles under jit, called")
