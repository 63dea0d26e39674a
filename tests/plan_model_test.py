"""The plan of a model of many tables, against the traced step and the pipeline's arrays."""

import itertools
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import xrex
from tests import layouts, planned_models
from tests.planned_models import BATCH_SIZE, MAX_LIKED, MAX_SEEN, click_batch, click_model, started
from tools.layouts.layout_flags import parse_mesh
from xrex.embeddings.plan_model import ModelPlan, plan_model
from xrex.training import step as train_step
from xrex.training.state import detach_bags

pytestmark = pytest.mark.usefixtures("optimized")

ROOT = Path(__file__).parent.parent
BAGS = "16_float32_RowwiseAdagrad"
WORDS = "8_bfloat16_RowwiseAdagrad"
# Pooling may hold more than the update, whose arrays are planned.
WITHIN = 0.2


def weighted_or_not(weighted: bool) -> tuple[str, ...]:
    return ("liked",) if weighted else ()


def stack_of(planned: ModelPlan, name: str) -> Any:
    return next(stack for stack in planned.stacks if stack.name == name)


# Against the traced step


@pytest.mark.parametrize(
    ("axes", "capacity", "weighted"),
    [
        ({"x": 4}, None, False),
        ({"x": 4}, 40, True),
        ({"r": 2, "x": 2}, 64, True),
        ({"x": 1}, 200, True),
    ],
    ids=str,
)
def test_the_wire_is_what_a_step_sends(axes: Any, capacity: int | None, weighted: bool) -> None:
    embeddings = click_model(layouts.mesh(axes), capacity=capacity)
    pipeline, state = started(embeddings, click_batch(weighted=weighted))
    ids = embeddings.by_stack(state.current_batch.token_ids)
    step = jax.make_jaxpr(lambda *arguments: train_step.step_ahead(pipeline.config, *arguments))
    traced = step(*detach_bags(state._replace(current_batch=None)), (), ids).jaxpr
    planned = plan_model(embeddings, weighted=weighted_or_not(weighted))
    ranks = planned.group_size
    collectives = planned_models.traced_collectives(traced) if ranks > 1 else []
    assert sorted(
        (part.operation, part.bytes_sent) for stack in planned.stacks for part in stack.wire
    ) == sorted(
        (operation, planned_models.sent(operation, size, ranks)) for operation, size in collectives
    )
    assert len(collectives) == (10 if ranks > 1 else 0)
    assert planned.wire == sum(
        planned_models.sent(operation, size, ranks) for operation, size in collectives
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_and_tables_add_up(weighted: bool) -> None:
    planned = plan_model(click_model(parse_mesh("x=4")), weighted=weighted_or_not(weighted))
    for stack in planned.stacks:
        for collective in stack.wire:
            parts = [p.bytes_sent for p in stack.wire_parts if p.collective == collective.name]
            assert sum(parts) == collective.bytes_sent
        sent = sum(part.bytes_sent for part in stack.wire)
        assert sent == stack.shared_wire + sum(table.wire for table in stack.tables)
        assert stack.memory.table == sum(table.table for table in stack.tables)
        # Beside what grows with the rows there is a clock of 4 bytes.
        assert stack.memory.state == 4 + sum(table.state for table in stack.tables)
        totals = asdict(stack.memory)
        assert totals.pop("total") == sum(totals.values())
    for name in asdict(planned.memory):
        assert getattr(planned.memory, name) == sum(
            getattr(stack.memory, name) for stack in planned.stacks
        )


def test_a_bag_travels_as_one_row() -> None:
    """4 ranks, 8 examples of each: by hand."""
    planned = plan_model(click_model(parse_mesh("x=4"), capacity=40), weighted=("liked",))
    bags, words = stack_of(planned, BAGS), stack_of(planned, WORDS)
    assert [part.name for part in bags.wire_parts][:4] == [
        "token ids",
        "lengths of bags",
        "scales of bags",
        "weights in bags",
    ]
    sent = {(part.collective, part.name): part.bytes_sent for part in bags.wire_parts}
    # Two single ids for each example, and a capacity of 40.
    assert sent["token ids", "token ids"] == sent["segment ids", "segment ids"] == 3 * 4 * (16 + 40)
    assert sent["token ids", "lengths of bags"] == 3 * 4 * 16
    assert sent["segment ids", "weights in bags"] == 3 * 4 * 40
    # Two single rows and two bags for each example, 4 columns of float32 for each peer.
    assert sent["rows", "rows"] == sent["gradients", "gradients"] == 3 * (16 + 16) * 4 * 4
    assert sent["square sums by row", "square sums by row"] == 2 * 3 * 4 * 150 // 4
    assert bags.shared_wire == 2 * 3 * 4 * (40 + 40) + 2 * 3 * 4 * 150 // 4
    # A sequence of three, 2 columns of bfloat16.
    (table,) = words.tables
    assert table.wire == 2 * 3 * (24 * 4 + 24 * 2 * 2)
    assert (bags.rows_per_rank, bags.ids_per_rank) == (32, 56)


# Against the pipeline's arrays


@pytest.mark.parametrize("weighted", [False, True])
def test_table_state_and_pins_are_the_pipelines(weighted: bool) -> None:
    embeddings = click_model(layouts.mesh({"x": 4}), capacity=40)
    _, state = started(embeddings, click_batch(weighted=weighted))
    planned = plan_model(embeddings, weighted=weighted_or_not(weighted))
    for stack in planned.stacks:
        name = stack.name
        pins = (state.current_lookup[name], state.previous_update[name])
        held = planned_models.per_rank_bytes
        assert stack.memory.table == held(state.table[name])
        assert stack.memory.state == held(state.rule_state[name])
        assert stack.memory.pins == held(pins)
        shapes = [array.shape for array in stack.arrays if array.group == "pins"]
        leaves = [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(pins)]
        assert sorted(shapes) == sorted(leaves)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_sum_of_all_is_about_that_of_the_compiled_step(weighted: bool) -> None:
    rule, size = xrex.RowwiseAdagrad(learning_rate=0.1), 512
    embeddings = click_model(
        layouts.mesh({"x": 4}),
        tables={
            "items": xrex.Table(vocab=2000, width=128, rule=rule),
            "words": xrex.Table(vocab=2000, width=64, rule=rule),
        },
        features={
            "liked": xrex.Feature("items", max_ids=16, combiner="mean"),
            "query": xrex.Feature("words", max_ids=8),
        },
        batch_size=size,
        capacity=8 * size // 4,
    )
    weights = np.ones(8 * size, np.float32) if weighted else None
    liked = xrex.Ragged(np.zeros(8 * size, np.int32), np.full(size, 8), weights)
    ids = {"liked": liked, "query": np.zeros((size, 8), np.int32)}
    pipeline, state = started(embeddings, ids)
    lowered = pipeline.lower_step(state, xrex.Batch(embeddings.place(ids), ()))
    compiled = lowered.compile().memory_analysis()
    planned = plan_model(embeddings, weighted=weighted_or_not(weighted))
    total = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    # The stacks' temporary arrays share no memory, or all that they can.
    most = planned.memory.total
    largest = max(stack.memory.temporary for stack in planned.stacks)
    least = most - planned.memory.temporary + largest
    assert least * (1 - WITHIN) <= total <= most * (1 + WITHIN)


# Without a device


def test_no_device_is_touched() -> None:
    """Making and planning a model, with a schedule that computes."""
    program = """
import jax.numpy as jnp
import xrex
from tools.layouts.layout_flags import parse_mesh
from xrex.embeddings.plan_model import plan_model

rules = [
    xrex.RowwiseAdagrad(learning_rate=0.1),
    lambda step: xrex.RowwiseAdagrad(learning_rate=0.1 * jnp.exp(-step.astype(jnp.float32))),
]
names = ("a", "b")
embeddings = xrex.Embeddings(
    parse_mesh("x=8"),
    {n: xrex.Table(vocab=9, width=8, rule=r) for n, r in zip(names, rules)},
    {n: xrex.Feature(n) for n in names},
    batch_size=8,
    table_axis="x",
    data_axis="x",
)
(stack,) = plan_model(embeddings).stacks
assert stack.memory.table == 18 * 4, stack
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


# Room


def brute_force(vocabs: Any, singles: Any, bags: Any, capacity: int) -> int:
    """The most distinct ids, over all ways to share the capacity."""
    ways = itertools.product(*(range(min(bag, capacity) + 1) for bag in bags))
    return max(
        sum(min(v, s + c) for v, s, c in zip(vocabs, singles, way, strict=True))
        for way in ways
        if sum(way) <= capacity
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_most_distinct_ids(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocabs, singles = rng.integers(1, 12, 3), rng.integers(0, 3, 3)
    bags, capacity = rng.integers(1, 5, 3), int(rng.integers(1, 12))
    rule = xrex.RowwiseAdagrad(learning_rate=0.1)
    names = [f"t{n}" for n in range(3)]
    features: dict[str, xrex.Feature] = {}
    for name, single, most in zip(names, singles, bags, strict=True):
        features[f"bag_{name}"] = xrex.Feature(name, max_ids=int(most), combiner="sum")
        features |= {f"id_{name}_{n}": xrex.Feature(name) for n in range(single)}
    embeddings = click_model(
        parse_mesh("x=2"),
        tables={
            n: xrex.Table(vocab=int(v), width=2, rule=rule)
            for n, v in zip(names, vocabs, strict=True)
        },
        features=features,
        batch_size=4,
        capacity=capacity,
    )
    (stack,) = plan_model(embeddings).stacks
    assert stack.room.most_unique == brute_force(vocabs, 4 * singles, 4 * bags, 2 * capacity)
    assert stack.room.num_unique >= stack.room.most_unique


SEEN_AND_LIKED = {"seen": 2.0, "liked": 2.5}


@pytest.mark.parametrize(
    ("changes", "means", "text"),
    [
        ({"capacity": 35}, SEEN_AND_LIKED, "bags of a rank have 36 ids on average, and a capacity"),
        ({"capacity": 35}, SEEN_AND_LIKED, "of 35 has room for fewer: those beyond it are an err"),
        ({"capacity": 35, "overflow": "cut"}, SEEN_AND_LIKED, "those beyond it are cut"),
        ({}, {"liked": 4.5}, "feature 'liked' have 4.5 ids on average, and max_ids=4 has room"),
        ({"num_unique": 149}, {}, f"Stack {BAGS!r}: A batch may hold 150 distinct ids"),
        ({"num_unique": 29}, {}, f"Stack {WORDS!r}: A batch may hold 30 distinct ids"),
        ({"mesh": "r=2,x=4"}, {}, "axes ('r',) shard neither columns nor tokens"),
        ({}, {}, "(token ids 512 bytes"),
    ],
)
def test_warnings(changes: Any, means: Any, text: str) -> None:
    arguments = {"mesh": "x=4"} | changes
    embeddings = click_model(parse_mesh(arguments.pop("mesh")), **arguments)
    assert text in "\n".join(plan_model(embeddings, mean_ids=means).warnings)


def test_what_fits_is_not_warned_of() -> None:
    embeddings = click_model(parse_mesh("x=4"), capacity=36)
    text = "\n".join(plan_model(embeddings, mean_ids=SEEN_AND_LIKED).warnings)
    assert "capacity" not in text
    assert "max_ids" not in text
    assert "distinct" not in text


def test_the_capacity_of_bags() -> None:
    room = stack_of(plan_model(click_model(parse_mesh("x=4"))), BAGS).room
    most = BATCH_SIZE // 4 * (MAX_SEEN + MAX_LIKED)
    assert (room.capacity, room.most_bag_ids, room.mean_bag_ids) == (most, most, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mean_ids": {"user": 2}}, r"mean_ids names 'user', .* the bags are \['seen', 'liked'\]"),
        ({"mean_ids": {"seen": float("nan")}}, r"mean_ids\['seen'\]=nan must be a number"),
        ({"weighted": ("sene",)}, "weighted names 'sene', which is no bag"),
        ({"reserved_bytes": -1}, "reserved_bytes=-1 must not be negative"),
    ],
)
def test_what_cannot_be_planned(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_model(click_model(parse_mesh("x=4")), **arguments)
