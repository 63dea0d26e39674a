"""Handles are values: equal exactly when their contents are, in dicts, pickles and under jit."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import xrex
from tests import strategies
from tests.judge import abstract, make_handle
from xrex.layout import Layout

pytestmark = pytest.mark.property

Tally = Callable[[str], None]


@st.composite
def handles(draw: st.DrawFn) -> tuple[Layout, dict[str, Any]]:
    """A legal layout, on devices or not, and a policy: what a handle is made of."""
    layout = draw(strategies.legal_layouts(max_axes=strategies.MAX_AXES))
    if draw(st.booleans()):
        layout = abstract(layout)
    out_of_range = draw(st.sampled_from(["zero", "clip", "raise"]))
    return layout, {"out_of_range": out_of_range, "padding_id": draw(st.sampled_from([None, 0]))}


def rebuilt(layout: Layout) -> Layout:
    """The same layout, of new objects."""
    if not isinstance(layout.mesh, Mesh):
        return abstract(layout)
    mesh = layout.mesh
    devices = np.array(mesh.devices.tolist(), object).reshape(mesh.devices.shape)
    return replace(layout, mesh=Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))


@st.composite
def other_contents(
    draw: st.DrawFn, contents: tuple[Layout, dict[str, Any]]
) -> tuple[Layout, dict[str, Any]]:
    """Contents that differ in one thing."""
    layout, policy = contents
    kind = draw(st.sampled_from(["size", "capacity", "policy", "types", "devices", "data order"]))
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
    if kind == "data order":
        assume(len(layout.data_axis) > 1)
        return replace(layout, data_axis=layout.data_axis[::-1]), policy
    mesh = layout.mesh
    if kind == "types" or not isinstance(mesh, Mesh):
        flip = {AxisType.Auto: AxisType.Explicit, AxisType.Explicit: AxisType.Auto}
        types = tuple(flip[kind] for kind in mesh.axis_types)
        if isinstance(mesh, Mesh):
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        else:
            mesh = mesh.update(axis_types=types)
    else:
        assume(mesh.size > 1)
        devices = np.roll(mesh.devices, 1)
        mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        assume(mesh != layout.mesh)
    return replace(layout, mesh=mesh), policy


def make(contents: tuple[Layout, dict[str, Any]]) -> xrex.AsyncEmbContextHandle:
    layout, policy = contents
    return make_handle(layout, **policy)


@given(handles())
def test_equal_contents_make_equal_handles(tally: Tally, contents: tuple[Any, Any]) -> None:
    layout, policy = contents
    one, two = make(contents), make((rebuilt(layout), policy))
    assert one == two
    assert hash(one) == hash(two)
    assert one.context_id == two.context_id
    assert one.flatten_replicas == two.flatten_replicas
    assert {one: "found"}[two] == "found"
    tally("examples of equal handles")


@given(st.data())
def test_other_contents_make_other_handles(tally: Tally, data: st.DataObject) -> None:
    contents = data.draw(handles())
    one, two = make(contents), make(data.draw(other_contents(contents)))
    assert one != two
    assert len({one, two}) == 2
    tally("examples of different handles")


@given(handles())
def test_a_pickle_gives_the_handle_back(tally: Tally, contents: tuple[Any, Any]) -> None:
    handle = make(contents)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        again = pickle.loads(pickle.dumps(handle, protocol))
        assert again == handle
        assert hash(again) == hash(handle)
        assert again.context_id == handle.context_id
        assert again.implementation_reason == handle.implementation_reason
    tally("examples of pickled handles")


@given(st.data())
def test_jit_traces_once_for_each_content(tally: Tally, data: st.DataObject) -> None:
    contents = data.draw(handles())
    layout, policy = contents
    traced = []

    @jax.jit(static_argnums=0)
    def scaled(handle: xrex.AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
        traced.append(handle)
        return x * handle.group_size

    one, two = make(contents), make((rebuilt(layout), policy))
    other = make(data.draw(other_contents(contents)))
    x = jnp.ones((), jnp.int32)
    assert scaled(one, x) == scaled(two, x) == one.group_size
    assert traced == [one]
    assert scaled(other, x) == other.group_size
    assert traced == [one, other]
    tally("examples of handles under jit")
