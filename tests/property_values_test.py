"""Every accepted layout computes what the oracle computes, however its mesh is written down."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from tests import one_layout, strategies, trial
from tests.judge import as_code, make_handle
from tests.suite_report import examples
from xrex.layout import Layout

pytestmark = pytest.mark.property

Tally = Callable[[str], None]


@given(st.data())
def test_lookup_is_the_rows_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    one_layout.check_lookup(data.draw, data.draw(strategies.legal_layouts()))
    tally("examples of lookups")


@given(st.data())
def test_two_exact_updates_are_the_oracle_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts())
    eager = data.draw(st.sampled_from([False] * 7 + [True]))
    step = trial.training_step if eager else trial.quick_step
    one_layout.check_exact_updates(data.draw, layout, step)
    tally("examples of exact updates" + ", eager" * eager)


@given(st.data())
@settings(max_examples=examples(0.5))
def test_two_random_updates_are_the_oracle_within_an_ulp(tally: Tally, data: st.DataObject) -> None:
    # Few layouts: they are compiled as for use, which takes longer.
    layout = data.draw(strategies.legal_layouts(max_axes=1, plain=True))
    one_layout.check_random_updates(data.draw, layout)
    tally("examples of random updates")


def permute_devices(draw: Callable[..., Any], layout: Layout, attempt: trial.Trial) -> Any:
    order = draw(strategies.device_orders(layout.mesh.size))
    devices = np.array(jax.devices())[list(order)].reshape(layout.mesh.devices.shape)
    mesh = Mesh(devices, layout.mesh.axis_names, axis_types=layout.mesh.axis_types)
    return replace(layout, mesh=mesh), attempt, slice(None)


def rename_axes(draw: Callable[..., Any], layout: Layout, attempt: trial.Trial) -> Any:
    names = draw(st.permutations(["data", "model", "replica", "x", "a", "b", "c"]))
    new = dict(zip(layout.mesh.axis_names, names, strict=False))
    mesh = Mesh(layout.mesh.devices, tuple(new.values()), axis_types=layout.mesh.axis_types)
    axes = {
        name: tuple(map(new.get, getattr(layout, name))) for name in ("table_axis", "data_axis")
    }
    return replace(layout, mesh=mesh, **axes), attempt, slice(None)


def reorder_tokens(draw: Callable[..., Any], layout: Layout, attempt: trial.Trial) -> Any:
    order = np.array(draw(st.permutations(range(layout.tokens_per_batch))))
    batches = tuple((ids[order], grads[order]) for ids, grads in attempt.batches)
    return layout, attempt._replace(batches=batches), order


def split_an_axis(draw: Callable[..., Any], layout: Layout, attempt: trial.Trial) -> Any:
    """One axis becomes two, one of them of size 1 or not; both take its place in the tuples."""
    mesh = layout.mesh
    split = draw(st.sampled_from(mesh.axis_names))
    pairs = [s for s in strategies.factorisations(mesh.shape[split], 2) if len(s) == 2]
    sizes, names, types = [], [], []
    for name, size, kind in zip(mesh.axis_names, mesh.devices.shape, mesh.axis_types, strict=True):
        parts = draw(st.sampled_from(pairs)) if name == split else (size,)
        sizes += parts
        names += [name, f"{name}_too"][: len(parts)]
        types += [kind] * len(parts)

    def both(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new for axis in axes for new in names if new in (axis, f"{axis}_too"))

    finer = Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=tuple(types))
    axes = {"table_axis": both(layout.table_axis), "data_axis": both(layout.data_axis)}
    return replace(layout, mesh=finer, **axes), attempt, slice(None)


# Each returns a layout, a trial, and where its tokens stood in the batches before.
CHANGES = (permute_devices, rename_axes, reorder_tokens, split_an_axis)


# One test a change, so that several processes share the work.
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_depends_on_how_a_mesh_is_written_down(
    change: Callable[..., Any], tally: Tally
) -> None:
    @settings(max_examples=examples(1 / len(CHANGES)))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        layout = data.draw(strategies.legal_layouts())
        attempt = data.draw(strategies.exact_trials(layout))
        changed, changed_attempt, order = change(data.draw, layout, attempt)
        note(as_code(layout))
        note(as_code(changed))
        first = trial.run(make_handle(layout), one_layout.EXACT_RULES[0], attempt, trial.quick_step)
        second = trial.run(
            make_handle(changed), one_layout.EXACT_RULES[0], changed_attempt, trial.quick_step
        )
        for a, b in zip(first, second, strict=True):
            a = a._replace(embeddings=np.asarray(a.embeddings)[order])
            trial.assert_same_values(b, a)
        tally(f"examples of {change.__name__}")

    check()


@given(st.data())
@settings(max_examples=examples(0.5))
def test_results_do_not_depend_on_the_number_of_ranks(tally: Tally, data: st.DataObject) -> None:
    def layout_of(ranks: int) -> Layout:
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("x",))
        return Layout(mesh, ("x",), ("x",), 8 * multiple, 8, num_unique, 8)

    multiple = data.draw(st.integers(1, 2))
    num_unique = data.draw(st.sampled_from([8, 4]))
    attempt = data.draw(strategies.exact_trials(layout_of(1)))
    rule = data.draw(st.sampled_from(one_layout.EXACT_RULES))
    one, *others = (
        trial.run(make_handle(layout_of(ranks)), rule, attempt, trial.quick_step)
        for ranks in (1, 2, 4, 8)
    )
    for other in others:
        trial.assert_same_values(other, one)
    tally("examples of 1, 2, 4 and 8 ranks")


def test_the_exact_gradients_are_exact() -> None:
    """A sum of them is the same number in any order, and a power of two in every column."""
    rng = np.random.default_rng(0)
    rows = np.array([3, 1, 3, -1, 3, 0, 1, 3])
    grads = trial.exact_gradients(rng, rows, 6)
    assert np.isinf(grads[3]).all()
    for row in (0, 1, 3):
        total = np.abs(grads[rows == row].sum(axis=0))
        assert len(set(total.tolist())) == 1
        assert math.log2(total[0]).is_integer()
