"""Hypothesis strategies for layouts, ids, tables and gradients.

Simple things come first in every choice, so that a failure shrinks to the fewest devices and axes
and the smallest sizes that still show it. Every layout drawn is noted: a failure prints the code
that makes it again.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
from hypothesis import assume, note
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from tests.expected_rejection import SIZES
from tests.judge import as_code
from tests.oracle import ZERO, IdPolicy, resolve
from tests.trial import Trial, exact_gradients
from xrex.layout.layout import Layout

MAX_DEVICES = 8
# More often those with many shapes.
_DEVICE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 4, 6, 8, 8)
MAX_AXES = 4
VOCAB = 32  # more than the most tokens of a layout, so that ids can all be distinct
NAMES = ("a", "b", "c", "d")
UNKNOWN = "unknown"
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


# Meshes


@functools.cache
def factorisations(number: int, max_axes: int = MAX_AXES) -> tuple[tuple[int, ...], ...]:
    """Every way to write a number as an ordered product, ones included: fewest factors first."""
    return tuple(
        sizes for axes in range(1, max_axes + 1) for sizes in _ordered_factors(number, axes)
    )


def _ordered_factors(number: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(number, 0, -1)
        if number % first == 0
        for rest in _ordered_factors(number // first, count - 1)
    ]


def device_orders(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Which of the simulated devices a mesh is made of, and in which order."""
    first = tuple(range(size))
    chosen = st.permutations(range(MAX_DEVICES)).map(lambda order: tuple(order[:size]))
    return st.one_of(st.just(first), st.just(first[::-1]), chosen)


def axis_types(count: int) -> st.SearchStrategy[tuple[AxisType, ...]]:
    """All Auto, all Explicit, or a mixture."""
    return st.one_of(
        st.just((AxisType.Auto,) * count),
        st.just((AxisType.Explicit,) * count),
        st.tuples(*[st.sampled_from([AxisType.Auto, AxisType.Explicit])] * count),
    )


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of 1 to 8 devices, of every shape there is."""
    size = draw(st.sampled_from(_DEVICE_COUNTS))
    sizes = draw(st.sampled_from(factorisations(size)))
    devices = np.array(jax.devices())[list(draw(device_orders(size)))]
    names = tuple(draw(st.permutations(NAMES[: len(sizes)])))
    return Mesh(devices.reshape(sizes), names, axis_types=draw(axis_types(len(sizes))))


# Layouts


def some_of(names: tuple[str, ...], least: int = 0) -> st.SearchStrategy[tuple[str, ...]]:
    """Any of the names, at least that many, each once, in any order."""
    if not names:
        return st.just(())
    return st.lists(st.sampled_from(names), min_size=least, unique=True).map(tuple)


def _order_of(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.permutations(names).map(tuple)


def product(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Positions along axes, each counted once and unknown ones not at all."""
    return math.prod(mesh.shape.get(name, 1) for name in set(axes))


@st.composite
def legal_axes(draw: st.DrawFn, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A table axis and a data axis that keep the rules: most tables lie over several devices."""
    large = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
    ones = tuple(name for name in mesh.axis_names if mesh.shape[name] == 1)
    over_all = draw(st.booleans())
    chosen = large if over_all else draw(some_of(large, min(1, len(large))))
    table_axis = draw(_order_of((*chosen, *draw(some_of(ones)))))
    rest = tuple(name for name in ones if name not in table_axis)
    return table_axis, draw(_order_of((*table_axis, *draw(some_of(rest)))))


@st.composite
def any_axes(draw: st.DrawFn, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A table axis and a data axis of any kind, disjoint ones and empty ones among them."""
    table_axis, data_axis = draw(some_of(mesh.axis_names)), draw(some_of(mesh.axis_names))
    if draw(st.booleans()):
        data_axis = tuple(axis for axis in data_axis if axis not in table_axis)
    return table_axis, data_axis


def _unknown_axis(draw: st.DrawFn, layout: Layout) -> Layout:
    where = draw(st.sampled_from([["data_axis"], ["table_axis"], ["table_axis", "data_axis"]]))
    changed = {name: draw(_order_of((*getattr(layout, name), UNKNOWN))) for name in where}
    return replace(layout, **changed)


def _repeated_axis(draw: st.DrawFn, layout: Layout) -> Layout:
    where = draw(st.sampled_from(["data_axis", "table_axis"]))
    axes = getattr(layout, where)
    again = draw(st.sampled_from(axes or layout.mesh.axis_names))
    return replace(layout, **{where: (*axes, again) if axes else (again, again)})


def _missing_axis(draw: st.DrawFn, layout: Layout) -> Layout:
    gone = draw(some_of(layout.table_axis, min(1, len(layout.table_axis))))
    return replace(layout, data_axis=tuple(a for a in layout.data_axis if a not in gone))


def _outside_axis(draw: st.DrawFn, layout: Layout) -> Layout:
    """A data axis that is not one of the table's, taken from those if it was."""
    names = layout.mesh.axis_names
    large = [name for name in names if layout.mesh.shape[name] > 1]
    outside = draw(st.sampled_from(large or names))
    table_axis = tuple(axis for axis in layout.table_axis if axis != outside)
    data_axis = tuple(axis for axis in layout.data_axis if axis != outside)
    return replace(layout, table_axis=table_axis, data_axis=draw(_order_of((*data_axis, outside))))


def _odd(size: str) -> Callable[[st.DrawFn, Layout], Layout]:
    def change(draw: st.DrawFn, layout: Layout) -> Layout:
        ranks = product(layout.mesh, layout.table_axis)
        by = draw(st.sampled_from([1, ranks - 1, -1, draw(st.integers(1, ranks))]))
        return replace(layout, **{size: max(1, getattr(layout, size) + by)})

    return change


# What breaks a rule of a legal layout, where its mesh is large enough for that. In this order:
# sizes are odd for the axes that are there in the end.
FAULTS: dict[str, Callable[[st.DrawFn, Layout], Layout]] = {
    "missing axis": _missing_axis,
    "outside axis": _outside_axis,
    "unknown axis": _unknown_axis,
    "repeated axis": _repeated_axis,
    "odd tokens": _odd("tokens_per_batch"),
    "odd width": _odd("emb_width"),
}
KINDS = (*FAULTS, "two faults", "any", "legal")


@st.composite
def layouts(draw: st.DrawFn, kind: str | None = None) -> Layout:
    """Layouts with positive sizes, of one of `KINDS` or of all.

    Legal ones; such with one fault or two; and any at all, which owe nothing to the rules. Sizes
    lie at, one below and one above multiples of the numbers that matter: how many ranks the table
    and the tokens are sharded over.
    """
    if kind is None:
        kind = draw(st.sampled_from(KINDS))
    mesh = draw(meshes())
    table_axis, data_axis = draw((any_axes if kind == "any" else legal_axes)(mesh))
    ranks, shards = product(mesh, table_axis), product(mesh, data_axis)
    bases = sorted({ranks, shards, math.lcm(ranks, shards)})
    off_by = draw(st.sampled_from([0, 0, 1, -1])) if kind == "any" else 0
    tokens = max(1, draw(st.sampled_from(bases)) * draw(st.integers(1, 3)) + off_by)
    layout = Layout(
        mesh=mesh,
        table_axis=table_axis,
        data_axis=data_axis,
        tokens_per_batch=tokens,
        emb_width=draw(st.sampled_from(bases)) * draw(st.integers(1, 3)),
        num_unique=draw(capacities(tokens, ranks)),
        num_devices_per_node=draw(st.sampled_from([MAX_DEVICES, 1, 3])),
    )
    two = st.sets(st.sampled_from(list(FAULTS)), min_size=2, max_size=2)
    faults = draw(two) if kind == "two faults" else {kind}
    for name, change in FAULTS.items():
        if name in faults:
            layout = change(draw, layout)
    return told(layout)


def legal_layouts() -> st.SearchStrategy[Layout]:
    """Layouts that keep the rules; most have room for every id of a batch."""
    return layouts("legal")


def capacities(tokens: int, ranks: int) -> st.SearchStrategy[int]:
    """Room for distinct ids: at, below and above the tokens, the ranks and the table's rows."""
    around = [tokens, tokens, tokens + 1, tokens - 1, 1, ranks - 1, ranks + 1, VOCAB, VOCAB - 1]
    return st.sampled_from([max(1, size) for size in around])


def told(layout: Layout) -> Layout:
    """The layout, which a failure will print."""
    note(as_code(layout))
    return layout


@st.composite
def layouts_of_any_sizes(draw: st.DrawFn) -> Layout:
    """Layouts, and those with sizes that are not positive integers."""
    layout = draw(layouts())
    bad = st.sampled_from([0, -1, 1.0, 2.5, True, None, "8", np.int64(0), np.int64(8)])
    names = draw(st.sampled_from([0, 0, 0, 1, 2])) and draw(some_of(SIZES, 1))
    return told(replace(layout, **{name: draw(bad) for name in names})) if names else layout


@st.composite
def layouts_of_the_exception(draw: st.DrawFn) -> Layout:
    """Layouts that break no rule but one: a table axis of size 1 is missing from the data axis."""
    layout = draw(legal_layouts())
    names = layout.mesh.axis_names
    ones = tuple(name for name in names if layout.mesh.shape[name] == 1)
    assume(ones)
    missing = draw(some_of(ones, 1))
    table_axis = tuple(axis for axis in layout.table_axis if axis not in missing) + missing
    data_axis = tuple(axis for axis in layout.data_axis if axis not in missing)
    return told(replace(layout, table_axis=draw(_order_of(table_axis)), data_axis=data_axis))


# Ids, tables and gradients


# "raise" is not among them: it stops a batch before it runs.
POLICIES = (IdPolicy(), IdPolicy("clip"), IdPolicy("zero", 3), IdPolicy("clip", -1))


@st.composite
def id_streams(draw: st.DrawFn, tokens: int, ranks: int = 1, vocab: int = VOCAB) -> np.ndarray:
    """A batch's ids, (tokens,) int32: the streams that trouble a sharded table.

    Args:
      draw: by Hypothesis.
      tokens: how many.
      ranks: in how many parts "one rank alone" cuts the batch.
      vocab: rows of the table.
    """
    # Half of the batches repeat a few ids.
    inside = st.integers(0, draw(st.sampled_from([min(vocab, 4), vocab])) - 1)
    edges = [-(2**31), -vocab - 1, -vocab, -1, vocab, vocab + 1, 2**31 - 1]
    kinds = ["equal", "distinct", "any", "zipf", "padded", "one rank alone", "edges"]
    kind = draw(st.sampled_from(kinds))
    if kind == "equal":
        ids = np.repeat(draw(inside), tokens)
    elif kind in ("distinct", "zipf"):
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        drawn = (rng.zipf(1.5, tokens) - 1).clip(0, vocab - 1)
        ids = np.resize(rng.permutation(vocab), tokens) if kind == "distinct" else drawn
    else:
        elements = st.sampled_from(edges) | inside if kind == "edges" else inside
        few = min(tokens, 64)  # long batches repeat what is drawn
        ids = np.resize(draw(st.lists(elements, min_size=few, max_size=few)), tokens)
    if kind == "padded":
        ids[draw(st.integers(0, tokens)) :] = -1
    if kind == "one rank alone":
        busy, per_rank = draw(st.integers(0, ranks - 1)), tokens // ranks
        ids[np.arange(tokens) // per_rank != busy] = vocab
    return ids.astype(np.int32)


@st.composite
def tables_of_any_bits(draw: st.DrawFn, width: int, vocab: int = VOCAB) -> np.ndarray:
    """A table of any bits at all: NaNs, infinities, subnormals and both zeros among them."""
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    bits = rng.integers(0, 256, vocab * width * dtype.itemsize, np.uint8)
    table = bits.view(dtype).reshape(vocab, width)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(np.float32).smallest_subnormal, 1.0]
    for value in draw(st.lists(st.sampled_from(special), max_size=4)):
        table[draw(st.integers(0, vocab - 1)), draw(st.integers(0, width - 1))] = value
    return table


@st.composite
def exact_trials(
    draw: st.DrawFn,
    layout: Layout,
    *,
    policy: IdPolicy = ZERO,
    dtype: np.dtype = DTYPES[0],
) -> Trial:
    """Two batches on which no sum rounds, so that its order is free."""
    tokens, width = layout.tokens_per_batch, layout.emb_width
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    batches = []
    for _ in range(2):
        ids = draw(id_streams(tokens, layout.group_size))
        rows = resolve(ids, VOCAB, policy).trained
        batches.append((ids, exact_gradients(rng, rows, width)))
    table = rng.integers(-64, 65, (VOCAB, width)).astype(dtype)
    return Trial(table, tuple(batches))


@st.composite
def random_trials(
    draw: st.DrawFn, layout: Layout, *, policy: IdPolicy, dtypes: tuple[np.dtype, np.dtype]
) -> Trial:
    """Two batches of random floats on which rounding stays below one unit of a row's last place.

    Rows are of the order of 1 and steps are smaller, so that a row never cancels; the gradients of
    a row have one sign in each column, so that a sum never does. Some batches carry a value that is
    not finite. The types are the table's and the gradients'.
    """
    tokens, width = layout.tokens_per_batch, layout.emb_width
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    signs = rng.choice([-1.0, 1.0], (VOCAB + 1, width))
    batches = []
    for _ in range(2):
        ids = draw(id_streams(tokens, layout.group_size))
        rows = resolve(ids, VOCAB, policy).trained
        grads = (rng.uniform(0.5, 2.0, (tokens, width)) * signs[rows]).astype(dtypes[1])
        bad = draw(st.sampled_from([None, None, None, np.inf, -np.inf, np.nan]))
        if bad is not None:
            grads[draw(st.integers(0, tokens - 1)), draw(st.integers(0, width - 1))] = bad
        batches.append((ids, grads))
    table = rng.uniform(1.0, 2.0, (VOCAB, width)) * rng.choice([-1.0, 1.0], (VOCAB, width))
    return Trial(table.astype(dtypes[0]), tuple(batches))
