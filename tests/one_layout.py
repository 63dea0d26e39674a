"""What must hold of a layout, whichever it is; of accepted ones, what they compute.

Each check takes Hypothesis' `draw` for what is random beside the layout, and raises AssertionError.
The property tests call them on random layouts, `tools/check_suite.py` on one of the user's.
"""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

import xrex
from tests import judge, oracle, strategies, trial
from tests.assertions import assert_same_bits_on_every_device
from tests.expected_rejection import check_rejection
from tests.judge import Accepted, Rejected
from xrex.layout.layout import Layout

Draw = Callable[..., Any]

EXACT_RULES = (
    xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30),
    xrex.RowwiseAdagrad(learning_rate=0.25, eps=1e-30, lazy=True),
)
DECAYING_RULES = (
    xrex.RowwiseAdagrad(learning_rate=0.0625, half_life_steps=3.0, weight_decay=0.125),
    xrex.RowwiseAdagrad(learning_rate=0.0625, half_life_steps=3.0, weight_decay=0.125, lazy=True),
)

look_up = trial.jit_by_handle(
    lambda handle, ids, table: xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table))
)


# Of any layout


def check_agreement(draw: Draw, layout: Layout) -> None:
    """It is accepted exactly when it trains correctly, apart from the listed exception."""
    del draw
    disagreement = judge.disagreement(layout)
    assert disagreement is None, disagreement


def check_first_broken_rule(draw: Draw, layout: Layout) -> None:
    """A rejection names the first broken rule, in the design's text, and gives advice."""
    del draw
    check_rejection(layout, judge.make_handle)


def check_abstract_mesh(draw: Draw, layout: Layout) -> None:
    """A mesh without devices leads to the same decision, in the same words."""
    del draw
    planned_layout = judge.abstract(layout)
    planned, real = judge.validator_decision(planned_layout), judge.validator_decision(layout)
    if isinstance(real, Accepted):
        assert planned == real
        return
    assert isinstance(planned, Rejected)
    assert planned.requirement == real.requirement
    assert planned.message.replace(str(planned_layout.mesh), str(layout.mesh)) == real.message


def check_single_shard_per_rank(draw: Draw, layout: Layout) -> None:
    """The two public functions about rule 3 say what the validator says of it."""
    del draw
    arguments: Any = (layout.mesh, layout.table_axis, layout.data_axis)
    if not set(layout.table_axis + layout.data_axis) <= set(layout.mesh.axis_names):
        for function in (xrex.single_shard_per_rank, xrex.check_single_shard_per_rank):
            with pytest.raises(ValueError, match="is not a mesh axis of"):
                function(*arguments)
        return
    off = math.prod(
        layout.mesh.shape[axis] for axis in set(layout.data_axis) - set(layout.table_axis)
    )
    assert xrex.single_shard_per_rank(*arguments) == (off == 1)
    if off == 1:
        xrex.check_single_shard_per_rank(*arguments)
    else:
        text = f"{off} token shards outside the communicator; add the extra axes to table_axis"
        with pytest.raises(ValueError, match=text):
            xrex.check_single_shard_per_rank(*arguments)
    decision = judge.validator_decision(layout)
    if isinstance(decision, Rejected) and decision.requirement == "one_shard_per_rank":
        assert off != 1
    elif isinstance(decision, Accepted) or decision.requirement in ("even_tokens", "even_width"):
        assert off == 1


# Of accepted layouts


def check_handle(draw: Draw, layout: Layout) -> None:
    """The handle is a value: equal to one of equal contents, in dicts and out of pickles."""
    policy = {"out_of_range": draw(st.sampled_from(["zero", "clip", "raise"]))}
    policy["padding_id"] = draw(st.sampled_from([None, 0]))
    one, two = (judge.make_handle(made, **policy) for made in (layout, rebuilt(layout)))
    copies = [pickle.loads(pickle.dumps(one, n)) for n in (2, pickle.HIGHEST_PROTOCOL)]
    for other in (two, *copies):
        assert one == other
        assert hash(one) == hash(other)
        assert one.context_id == other.context_id
        assert one.flatten_replicas == other.flatten_replicas
        assert one.implementation_reason == other.implementation_reason
        assert {one: "found"}[other] == "found"


def rebuilt(layout: Layout) -> Layout:
    """The same layout, of new objects."""
    mesh = layout.mesh
    if isinstance(mesh, AbstractMesh):
        return judge.abstract(layout)
    devices = np.array(mesh.devices.tolist(), object).reshape(mesh.devices.shape)
    return replace(layout, mesh=Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))


def check_lookup(draw: Draw, layout: Layout, trials: int = 1) -> None:
    """Lookups are the table's rows bit for bit, on every device."""
    policy = draw(st.sampled_from(strategies.POLICIES))
    for _ in range(trials):
        ids = draw(strategies.id_streams(layout.tokens_per_batch, layout.group_size))
        table = draw(strategies.tables_of_any_bits(layout.emb_width))
        rows = look_up(_handle(layout, policy), ids, table)
        right = oracle.lookup(table, ids, policy)
        if _is_moved_by_jax(layout):
            right, rows = (jax.tree.map(_quiet, array) for array in (right, rows))
        assert_same_bits_on_every_device(rows, right, "embeddings")


def _is_moved_by_jax(layout: Layout) -> bool:
    """Whether JAX's types put the axes of a tuple in another order than the layout does.

    They put Explicit axes before Auto ones, so arrays are moved between xrex's programs and JAX's
    types; on CPU bfloat16 arrays travel as float32, in which no NaN is signalling.
    """
    types = dict(zip(layout.mesh.axis_names, layout.mesh.axis_types, strict=True))
    for axes in (layout.table_axis, layout.data_axis):
        kinds = [types[axis] == AxisType.Auto for axis in axes if layout.mesh.shape[axis] > 1]
        if kinds != sorted(kinds):
            return True
    return False


def _quiet(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), x)


def check_exact_updates(
    draw: Draw, layout: Layout, step: Any = trial.quick_step, trials: int = 1
) -> None:
    """Two updates are the oracle's bit for bit, on every device, where no sum rounds.

    Args:
      draw: Hypothesis'.
      layout: to check.
      step: how a step is run.
      trials: on how many pairs of batches; another one costs no compilation.
    """
    policy = draw(st.sampled_from(strategies.POLICIES))
    rule = draw(st.sampled_from(EXACT_RULES))
    dtype = draw(st.sampled_from(strategies.DTYPES))
    handle = _handle(layout, policy)
    for _ in range(trials):
        attempt = draw(strategies.exact_trials(layout, policy=policy, dtype=dtype))
        steps = trial.run(handle, rule, attempt, step)
        trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=True)


def check_random_updates(
    draw: Draw, layout: Layout, step: Any = trial.jitted_step, trials: int = 1
) -> None:
    """Two updates on random floats are the oracle's up to their last bits; copies are equal."""
    policy = draw(st.sampled_from(strategies.POLICIES))
    rule = draw(st.sampled_from(DECAYING_RULES))
    dtypes = draw(st.tuples(*[st.sampled_from(strategies.DTYPES)] * 2))
    handle = _handle(layout, policy)
    for _ in range(trials):
        attempt = draw(strategies.random_trials(layout, policy=policy, dtypes=dtypes))
        steps = trial.run(handle, rule, attempt, step)
        trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=False)


def _handle(layout: Layout, policy: oracle.IdPolicy) -> xrex.AsyncEmbContextHandle:
    return judge.make_handle(layout, out_of_range=policy.out_of_range, padding_id=policy.padding_id)


# Ways to write a layout down differently: each returns a layout, a trial, and where its tokens
# stood in the batches before.


def permute_devices(draw: Draw, layout: Layout, attempt: trial.Trial) -> Any:
    """Other devices, in another order."""
    size, shape = layout.mesh.size, layout.mesh.devices.shape
    order = draw(st.permutations(range(len(jax.devices()))))[:size]
    mesh = Mesh(
        np.array(jax.devices())[list(order)].reshape(shape),
        layout.mesh.axis_names,
        axis_types=layout.mesh.axis_types,
    )
    return replace(layout, mesh=mesh), attempt, slice(None)


def rename_axes(draw: Draw, layout: Layout, attempt: trial.Trial) -> Any:
    """Other names, in another alphabetical order."""
    names = [f"axis{i}" for i in range(len(layout.mesh.axis_names))]
    new = dict(zip(layout.mesh.axis_names, draw(st.permutations(names)), strict=True))
    mesh = Mesh(layout.mesh.devices, tuple(new.values()), axis_types=layout.mesh.axis_types)
    axes = {
        name: tuple(map(new.get, getattr(layout, name))) for name in ("table_axis", "data_axis")
    }
    return replace(layout, mesh=mesh, **axes), attempt, slice(None)


def reorder_tokens(draw: Draw, layout: Layout, attempt: trial.Trial) -> Any:
    """The batch's tokens in another order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    order = rng.permutation(layout.tokens_per_batch)
    batches = tuple((ids[order], grads[order]) for ids, grads in attempt.batches)
    return layout, attempt._replace(batches=batches), order


def split_an_axis(draw: Draw, layout: Layout, attempt: trial.Trial) -> Any:
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


CHANGES = (permute_devices, rename_axes, reorder_tokens, split_an_axis)


def check_invariance(
    draw: Draw, layout: Layout, changes: tuple[Callable[..., Any], ...] = CHANGES
) -> None:
    """The layout, written down differently, computes the same bits everywhere."""
    dtype = draw(st.sampled_from(strategies.DTYPES))
    attempt = draw(strategies.exact_trials(layout, dtype=dtype))
    rule = EXACT_RULES[0]
    first = trial.run(judge.make_handle(layout), rule, attempt, trial.quick_step)
    for change in changes:
        changed, changed_attempt, order = change(draw, layout, attempt)
        strategies.told(changed)
        second = trial.run(judge.make_handle(changed), rule, changed_attempt, trial.quick_step)
        for a, b in zip(first, second, strict=True):
            a = a._replace(embeddings=np.asarray(a.embeddings)[order])
            trial.assert_same_values(b, a)
