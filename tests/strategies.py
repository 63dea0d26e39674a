"""Hypothesis strategies for layouts, ids, tables and gradients.

Simple things come first in every choice, so that a failure shrinks to one device, one axis and the
smallest sizes that still show it.
"""

import functools
import math
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from tests.expected_rejection import SIZES
from tests.oracle import ZERO, IdPolicy, resolve
from tests.trial import Trial, exact_gradients
from xrex.layout import Layout

MAX_DEVICES = 8
MAX_AXES = 4
VOCAB = 8
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
def meshes(
    draw: st.DrawFn,
    num_devices: int | None = None,
    max_axes: int = MAX_AXES,
    plain: bool = False,
) -> Mesh:
    """Meshes of 1 to 8 devices, or of exactly that many.

    Plain ones have their axes' names and devices in order, and axes of type Auto.
    """
    size = draw(st.integers(1, MAX_DEVICES)) if num_devices is None else num_devices
    sizes = draw(st.sampled_from(factorisations(size, max_axes)))
    names = NAMES[: len(sizes)]
    if plain:
        return Mesh(np.array(jax.devices()[:size]).reshape(sizes), names)
    devices = np.array(jax.devices())[list(draw(device_orders(size)))].reshape(sizes)
    types = draw(axis_types(len(sizes)))
    return Mesh(devices, tuple(draw(st.permutations(names))), axis_types=types)


# Layouts


def some_of(names: tuple[str, ...], least: int = 0) -> st.SearchStrategy[tuple[str, ...]]:
    """Any of the names, at least that many, each once, in any order."""
    if not names:
        return st.just(())
    return st.lists(st.sampled_from(names), min_size=least, unique=True).map(tuple)


def _order_of(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.permutations(names).map(tuple)


@st.composite
def legal_axes(draw: st.DrawFn, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A table axis and a data axis that keep the rules."""
    table_axis = draw(some_of(mesh.axis_names))
    ones = tuple(n for n in mesh.axis_names if n not in table_axis and mesh.shape[n] == 1)
    return table_axis, draw(_order_of((*table_axis, *draw(some_of(ones)))))


@st.composite
def any_axes(draw: st.DrawFn, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A table axis and a data axis: equal sets, subsets, supersets, disjoint, repeated, unknown."""
    table_axis = draw(some_of(mesh.axis_names))
    others = tuple(name for name in mesh.axis_names if name not in table_axis)
    kind = draw(st.sampled_from(["superset", "subset", "any", "repeated", "unknown"]))
    if kind == "superset":
        return table_axis, draw(_order_of((*table_axis, *draw(some_of(others, 1)))))
    if kind == "subset":
        return table_axis, draw(some_of(table_axis))
    data_axis = draw(some_of(mesh.axis_names))
    if kind == "any":
        return table_axis, data_axis
    extra = UNKNOWN if kind == "unknown" else draw(st.sampled_from(mesh.axis_names))
    if draw(st.booleans()):
        return table_axis, (*data_axis, extra)
    return (*table_axis, extra), data_axis


def _product(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape.get(name, 1) for name in set(axes))


@st.composite
def layouts(draw: st.DrawFn, num_devices: int | None = None, max_axes: int = MAX_AXES) -> Layout:
    """Layouts with positive sizes, legal and not, in comparable numbers.

    Sizes lie at, one below and one above multiples of the numbers that matter: how many ranks
    the table and the tokens are sharded over.
    """
    mesh = draw(meshes(num_devices, max_axes))
    axes = draw(st.sampled_from([legal_axes, any_axes, any_axes, any_axes, any_axes]))
    table_axis, data_axis = draw(axes(mesh))
    ranks, shards = _product(mesh, table_axis), _product(mesh, data_axis)
    bases = sorted({ranks, shards, math.lcm(ranks, shards)}, reverse=True)
    off_by = st.sampled_from([0, 0, 0, 0, 1, -1])
    tokens = draw(st.sampled_from(bases)) * draw(st.integers(1, 2)) + draw(off_by)
    tokens = max(1, tokens)
    width = max(1, ranks * draw(st.integers(1, 2)) + draw(off_by))
    return Layout(
        mesh=mesh,
        table_axis=table_axis,
        data_axis=data_axis,
        tokens_per_batch=tokens,
        emb_width=width,
        num_unique=max(1, draw(st.sampled_from([tokens, ranks, ranks + 1, ranks - 1, tokens + 1]))),
        num_devices_per_node=draw(st.sampled_from([1, MAX_DEVICES])),
    )


@st.composite
def legal_layouts(draw: st.DrawFn, max_axes: int = 3, plain: bool = False) -> Layout:
    """Layouts that keep the rules; most have room for every id of a batch."""
    mesh = draw(meshes(max_axes=max_axes, plain=plain))
    table_axis, data_axis = draw(legal_axes(mesh))
    ranks = _product(mesh, table_axis)
    tokens = 2 * ranks
    return Layout(
        mesh=mesh,
        table_axis=table_axis,
        data_axis=data_axis,
        tokens_per_batch=tokens,
        emb_width=ranks if ranks > 2 else 4,
        num_unique=draw(st.sampled_from([tokens, tokens, 1])),
        num_devices_per_node=MAX_DEVICES,
    )


@st.composite
def layouts_of_any_sizes(draw: st.DrawFn) -> Layout:
    """Layouts, and those with a size that is not a positive integer."""
    layout = draw(layouts())
    if draw(st.sampled_from([True, True, True, False])):
        return layout
    name = draw(st.sampled_from(SIZES))
    size = draw(st.sampled_from([0, -1, 1.0, 2.5, True, None, "8", np.int64(0), np.int64(8)]))
    return replace(layout, **{name: size})


@st.composite
def layouts_of_the_exception(draw: st.DrawFn) -> Layout:
    """Layouts that break no rule but one: a table axis of size 1 is missing from the data axis."""
    layout = draw(legal_layouts(MAX_AXES))
    names = layout.mesh.axis_names
    ones = tuple(name for name in names if layout.mesh.shape[name] == 1)
    assume(ones)
    missing = draw(some_of(ones, 1))
    table_axis = tuple(axis for axis in layout.table_axis if axis not in missing) + missing
    data_axis = tuple(axis for axis in layout.data_axis if axis not in missing)
    return replace(layout, table_axis=draw(_order_of(table_axis)), data_axis=data_axis)


# Ids, tables and gradients


# "raise" is not among them: it stops a batch before it runs.
POLICIES = (IdPolicy(), IdPolicy("clip"), IdPolicy("zero", 3), IdPolicy("clip", -1))


@st.composite
def id_streams(
    draw: st.DrawFn, tokens: int, ranks: int = 1, vocab: int = VOCAB, wild: bool = True
) -> np.ndarray:
    """A batch's ids, (tokens,) int32: the streams that trouble a sharded table.

    Args:
      draw: by Hypothesis.
      tokens: how many.
      ranks: in how many parts "one rank alone" cuts the batch.
      vocab: rows of the table.
      wild: whether ids may lie outside the table.
    """
    inside = st.integers(0, vocab - 1)
    edges = [-(2**31), -vocab - 1, -vocab, -1, vocab, vocab + 1, 2**31 - 1]
    kinds = ["equal", "distinct", "any", "zipf"] + ["padded", "one rank alone", "edges"] * wild
    kind = draw(st.sampled_from(kinds))
    if kind == "equal":
        ids = [draw(inside)] * tokens
    elif kind == "distinct":
        order = draw(st.permutations(range(vocab)))
        ids = [order[i % vocab] for i in range(tokens)]
    elif kind == "zipf":
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        ids = (rng.zipf(1.5, tokens) - 1).clip(0, vocab - 1).tolist()
    elif kind == "edges":
        ids = draw(st.lists(st.sampled_from(edges) | inside, min_size=tokens, max_size=tokens))
    else:
        ids = draw(st.lists(inside, min_size=tokens, max_size=tokens))
    if kind == "padded":
        ids[draw(st.integers(0, tokens)) :] = [-1] * (tokens - draw(st.integers(0, tokens)))
        ids = (ids + [-1] * tokens)[:tokens]
    if kind == "one rank alone":
        busy, per_rank = draw(st.integers(0, ranks - 1)), tokens // ranks
        ids = [i if n // per_rank == busy else vocab for n, i in enumerate(ids)]
    return np.array(ids, np.int32)


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
) -> Trial:
    """Two batches on which no sum rounds, so that its order is free."""
    tokens, width = layout.tokens_per_batch, layout.emb_width
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    batches = []
    for _ in range(2):
        ids = draw(id_streams(tokens, layout.group_size))
        rows = resolve(ids, VOCAB, policy).trained
        batches.append((ids, exact_gradients(rng, rows, width)))
    table = rng.integers(-64, 65, (VOCAB, width)).astype(draw(st.sampled_from(DTYPES)))
    return Trial(table, tuple(batches))


@st.composite
def random_trials(draw: st.DrawFn, layout: Layout) -> Trial:
    """Two batches of random floats on which rounding stays below one unit of a row's last place.

    Rows are of the order of 1 and steps are smaller, so that a row never cancels; the gradients of
    a column have one sign, so that a sum never does. Some batches carry a value that is not finite.
    """
    tokens, width = layout.tokens_per_batch, layout.emb_width
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    signs = rng.choice([-1.0, 1.0], width)
    batches = []
    for _ in range(2):
        ids = draw(id_streams(tokens, layout.group_size))
        grads = (rng.uniform(0.5, 2.0, (tokens, width)) * signs).astype(
            draw(st.sampled_from(DTYPES))
        )
        bad = draw(st.sampled_from([None, None, None, np.inf, -np.inf, np.nan]))
        if bad is not None:
            grads[draw(st.integers(0, tokens - 1)), draw(st.integers(0, width - 1))] = bad
        batches.append((ids, grads))
    table = rng.uniform(1.0, 2.0, (VOCAB, width)) * rng.choice([-1.0, 1.0], (VOCAB, width))
    return Trial(table.astype(draw(st.sampled_from(DTYPES))), tuple(batches))
