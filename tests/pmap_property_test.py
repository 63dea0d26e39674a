"""`xrex.pmap` against `jax.pmap`: what one accepts the other accepts, and the values are the same.

Every difference is one of LISTED_DIFFERENCES, each with its reason. A case that shows one must be
rejected by `xrex.pmap`; nothing is asked of `jax.pmap` there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from xrex.checked_pmap.pmap import pmap

pytestmark = pytest.mark.property

LISTED_DIFFERENCES = {
    "negative axis": "jax.pmap documents axes as non-negative, but misplaces the mapped axis.",
    "varying output": "jax.pmap returns the first device's value for out_axes=None; here the "
    "output must be shown not to vary, and a plain all_gather counts as varying.",
    "too many devices": "jax.pmap documents one device an entry, but takes the first ones.",
    "boolean axis_size": "jax.pmap takes True for 1.",
}

AXIS = "i"
MAX_SIZE = 4  # one device an entry; the others are for choosing among


@dataclass(frozen=True)
class LeafCase:
    """One array: its shape on a device, and where the mapped axis goes (None: nowhere)."""

    shape: tuple[int, ...]
    dtype: str
    axis: int | None


@dataclass(frozen=True)
class OutputCase:
    """One output: an operation on the leaf at this position (modulo), and its out_axes."""

    operation: str
    leaf: int
    axis: int | None


@dataclass(frozen=True)
class Case:
    """One call of pmap; `tree` nests the positions of `leaves`."""

    size: int
    tree: Any
    leaves: tuple[LeafCase, ...]
    collapse: bool  # write one axis for equal ones where in_axes allows it
    outputs: tuple[OutputCase, ...]
    devices: tuple[int, ...] | None
    axis_size: int | bool | None
    keyword: bool  # pass the last argument by keyword, if it is mapped over axis 0
    under: str  # a transformation around the mapped function
    fault: str


def _elementwise(x: jax.Array) -> jax.Array:
    return x * x + x


OPERATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elementwise": _elementwise,
    "psum": lambda x: jax.lax.psum(x, AXIS),
    "all_gather": lambda x: jax.lax.all_gather(x, AXIS),
    "axis_index": lambda x: x + jax.lax.axis_index(AXIS).astype(x.dtype),
    "constant": lambda x: jax.numpy.full(x.shape, 7, x.dtype),
}
TREES = [
    (0,),
    (0, 1),
    ({"a": 0, "b": (1,)},),
    ([0, 1], {"c": 2}),
    ((0, (1, 2)), 3),
]
# At most one thing is wrong with a case; most have nothing wrong.
FAULTS = ["none"] * 12 + [
    "axis_size",
    "boolean axis_size",
    "leaf size",
    "leaf rank",
    "in_axes",
    "negative in_axes",
    "negative out_axes",
    "out_axes",
    "out axis",
    "too few devices",
    "too many devices",
]


def _num_leaves(tree: Any) -> int:
    return len(jax.tree.leaves(tree))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, MAX_SIZE))
    tree = draw(st.sampled_from(TREES))
    leaves = []
    for _ in range(_num_leaves(tree)):
        shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        axis = draw(st.sampled_from([0, 0, None, *range(len(shape) + 1)]))
        leaves.append(LeafCase(shape, draw(st.sampled_from(["float32", "int32"])), axis))
    outputs = []
    for _ in range(draw(st.integers(1, 3))):
        operation = draw(st.sampled_from(sorted(OPERATIONS)))
        leaf = draw(st.integers(0, len(leaves) - 1))
        rank = len(leaves[leaf].shape) + (operation == "all_gather")
        axis = draw(st.sampled_from([None, *range(rank + 1), *range(rank + 1)]))
        outputs.append(OutputCase(operation, leaf, axis))
    fault = draw(st.sampled_from(FAULTS))
    count = size + {"too few devices": -1, "too many devices": 1}.get(fault, 0)
    chosen = draw(st.permutations(range(jax.local_device_count())))[:count]
    devices = tuple(chosen) if "devices" in fault or draw(st.booleans()) else None
    return Case(
        size=size,
        tree=tree,
        leaves=tuple(leaves),
        collapse=draw(st.booleans()),
        outputs=tuple(outputs),
        devices=devices,
        axis_size={"axis_size": size + 1, "boolean axis_size": True}.get(
            fault, draw(st.sampled_from([None, size]))
        ),
        keyword=draw(st.booleans()),
        under=draw(st.sampled_from(["eager", "eager", "jit", "vmap"])),
        fault=fault,
    )


def _arguments(case: Case) -> tuple[Any, ...]:
    """The arrays, filled with small integers: sums are exact in any order."""
    arrays = []
    for position, leaf in enumerate(case.leaves):
        shape = list(leaf.shape)
        if leaf.axis is not None:
            last_one_off = case.fault == "leaf size" and position == len(case.leaves) - 1
            shape.insert(leaf.axis, case.size + last_one_off)
            if case.fault == "leaf rank":
                shape = []
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + position
        arrays.append(array.astype(leaf.dtype))
    return jax.tree.map(lambda position: arrays[position], case.tree)


def _collapse(axes: Any) -> Any:
    """One axis for a tree of equal ones."""
    leaves = jax.tree.leaves(axes, is_leaf=lambda axis: axis is None)
    return leaves[0] if len(set(leaves)) == 1 else axes


def _num_keywords(case: Case) -> int:
    """1 if the last argument goes by keyword, where in_axes does not count it."""
    axes = [case.leaves[position].axis for position in jax.tree.leaves(case.tree[-1])]
    return int(case.keyword and set(axes) == {0})


def _in_axes(case: Case) -> Any:
    axes = jax.tree.map(lambda position: case.leaves[position].axis, case.tree)
    axes = axes[: len(axes) - _num_keywords(case)]
    if case.collapse and axes:
        axes = _collapse(tuple(_collapse(axis) for axis in axes))
    if case.fault == "in_axes":
        return (0,) * (len(case.tree) + 1)
    if case.fault == "negative in_axes":
        return -1
    return axes


def _out_axes(case: Case) -> Any:
    axes = tuple(output.axis for output in case.outputs)
    match case.fault:
        case "out_axes":
            return (*axes, 0)
        case "out axis":
            return (4, *axes[1:])
        case "negative out_axes":
            return (-1, *axes[1:])
    return axes


def _run(implementation: Callable[..., Any], case: Case) -> Any:
    """The outputs as arrays, or the exception."""

    def fun(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        return tuple(OPERATIONS[out.operation](leaves[out.leaf]) for out in case.outputs)

    devices = None if case.devices is None else [jax.devices()[i] for i in case.devices]
    arguments, keywords = _arguments(case), {}
    if _num_keywords(case):
        *arguments, keywords["last"] = arguments
    try:
        mapped = implementation(
            fun,
            AXIS,
            in_axes=_in_axes(case),
            out_axes=_out_axes(case),
            devices=devices,
            axis_size=case.axis_size,
        )
        if case.under == "jit":
            mapped = jax.jit(mapped)
        elif case.under == "vmap":
            mapped = jax.vmap(mapped)
            arguments, keywords = jax.tree.map(
                lambda x: np.stack([x, x + 1]), (arguments, keywords)
            )
        return mapped(*arguments, **keywords)
    except Exception as error:
        return error


def _listed(case: Case) -> str | None:
    """Which listed difference the case shows."""
    if case.fault in ("negative in_axes", "negative out_axes"):
        return "negative axis"
    if case.fault in ("too many devices", "boolean axis_size"):
        return case.fault
    for out in case.outputs:
        varies = out.operation in ("axis_index", "all_gather") or (
            out.operation == "elementwise" and case.leaves[out.leaf].axis is not None
        )
        if out.axis is None and varies:
            return "varying output"
    return None


@settings(max_examples=150, deadline=None)
@given(cases())
def test_accepts_and_computes_what_jax_pmap_does(case: Case) -> None:
    ours, theirs = _run(pmap, case), _run(jax.pmap, case)
    listed = _listed(case)
    if isinstance(ours, Exception):
        event(f"rejected: {listed or case.fault}")
        assert isinstance(ours, (TypeError, ValueError)), repr(ours)
        assert listed in LISTED_DIFFERENCES or isinstance(theirs, Exception), repr(ours)
        if "Specified axis_size" in str(theirs) and case.fault == "axis_size":
            assert str(ours) == str(theirs)
        return
    event("accepted")
    assert listed is None
    assert not isinstance(theirs, Exception), repr(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        assert our.weak_type == their.weak_type
        if case.under == "eager":
            assert our.sharding.is_equivalent_to(their.sharding, our.ndim)
        np.testing.assert_array_equal(np.asarray(our), np.asarray(their))
