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

import xrex
from tests import oracle, strategies, trial
from tests.assertions import assert_same_bits_on_every_device
from tests.judge import as_code, make_handle
from tests.suite_report import examples
from xrex.layout import Layout

pytestmark = pytest.mark.property

Tally = Callable[[str], None]

EXACT_RULES = (
    xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30),
    xrex.RowwiseAdagrad(learning_rate=0.25, eps=1e-30, lazy=True),
)
DECAYING_RULES = (
    xrex.RowwiseAdagrad(learning_rate=0.0625, half_life_steps=3.0, weight_decay=0.125),
    xrex.RowwiseAdagrad(learning_rate=0.0625, half_life_steps=3.0, weight_decay=0.125, lazy=True),
)

look_up = jax.jit(
    lambda handle, ids, table: xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table)),
    static_argnums=0,
)


def policy_arguments(policy: oracle.IdPolicy) -> dict[str, Any]:
    return {"out_of_range": policy.out_of_range, "padding_id": policy.padding_id}


@given(st.data())
def test_lookup_is_the_rows_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts())
    policy = data.draw(st.sampled_from(strategies.POLICIES))
    ids = data.draw(strategies.id_streams(layout.tokens_per_batch, layout.group_size))
    table = data.draw(strategies.tables_of_any_bits(layout.emb_width))
    note(as_code(layout))
    rows = look_up(make_handle(layout, **policy_arguments(policy)), ids, table)
    assert_same_bits_on_every_device(rows, oracle.lookup(table, ids, policy))
    tally("examples of lookups")


@given(st.data())
def test_two_exact_updates_are_the_oracle_bit_for_bit(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts())
    policy = data.draw(st.sampled_from(strategies.POLICIES))
    rule = data.draw(st.sampled_from(EXACT_RULES))
    attempt = data.draw(strategies.exact_trials(layout, policy=policy))
    note(as_code(layout))
    handle = make_handle(layout, **policy_arguments(policy))
    step = data.draw(st.sampled_from([trial.quick_step] * 15 + [trial.training_step]))
    steps = trial.run(handle, rule, attempt, step)
    trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=True)
    tally("examples of exact updates" + ", eager" * (step is trial.training_step))


@given(st.data())
@settings(max_examples=examples(0.5))
def test_two_random_updates_are_the_oracle_within_an_ulp(tally: Tally, data: st.DataObject) -> None:
    layout = data.draw(strategies.legal_layouts(max_axes=1, plain=True))
    rule = data.draw(st.sampled_from(DECAYING_RULES))
    attempt = data.draw(strategies.random_trials(layout))
    note(as_code(layout))
    handle = make_handle(layout)
    steps = trial.run(handle, rule, attempt)
    trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=False)
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
        first = trial.run(make_handle(layout), EXACT_RULES[0], attempt, trial.quick_step)
        second = trial.run(make_handle(changed), EXACT_RULES[0], changed_attempt, trial.quick_step)
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
    rule = data.draw(st.sampled_from(EXACT_RULES))
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
