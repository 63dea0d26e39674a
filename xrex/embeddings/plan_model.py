"""What a model of many tables costs before a device is there, table by table and in all.

All figures are of one rank and of the pipeline with `staleness=1`. Units are bytes. The parts are
those of `xrex.layout.plan`, for each stack: what is not of one table alone is the stack's.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from xrex.embeddings.feature import Feature
from xrex.embeddings.stack import Plan
from xrex.embeddings.table import Table
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.plan_memory import ArrayPlan, group_bytes, plan_arrays, state_bytes_per_row
from xrex.layout.plan_warnings import (
    warn_of_devices,
    warn_of_idle_axes,
    warn_of_nodes,
    warn_of_room,
    warn_of_small_messages,
    warn_of_state,
)
from xrex.layout.plan_wire import CollectivePlan, NodePlan, RankIds, plan_nodes, plan_wire
from xrex.rules.base import rule_of_any_step
from xrex.table_set import TableStack


class Model(Protocol):
    """What is asked of `xrex.Embeddings`, whose attributes these are.

    Attributes:
      tables: by name.
      features: by name.
      overflow: "raise" or "cut".
      plans: how each stack's ids and rows are laid out.
      stacks: each with its layout.
    """

    @property
    def tables(self) -> Mapping[str, Table]:
        """See above."""

    @property
    def features(self) -> Mapping[str, Feature]:
        """See above."""

    @property
    def overflow(self) -> str:
        """See above."""

    @property
    def plans(self) -> Mapping[str, Plan]:
        """See above."""

    @property
    def stacks(self) -> Mapping[str, TableStack]:
        """See above."""


@dataclass(frozen=True)
class FeaturePlan:
    """One feature.

    Attributes:
      name: the feature's.
      table: whose ids they are.
      kind: "id", "sequence" or "bag".
      rows_per_rank: that travel; a bag is one row.
      ids_per_rank: the most that `max_ids` allows.
      mean_ids: of an example's bag, as stated, or None.
    """

    name: str
    table: str
    kind: str
    rows_per_rank: int
    ids_per_rank: int
    mean_ids: float | None


@dataclass(frozen=True)
class TablePlan:
    """What is of one table alone.

    Attributes:
      name: the table's.
      stack: the array that it lies in.
      vocab: its rows.
      shard_width: its columns on a rank.
      dtype: its name.
      table: bytes of its rows.
      state: bytes of the rule's state that grow with its rows.
      wire: bytes that a rank sends in a step for its features: their rows and gradients, the ids
        and segment ids of those that have a row each, and the lengths and scales of its bags.
    """

    name: str
    stack: str
    vocab: int
    shard_width: int
    dtype: str
    table: int
    state: int
    wire: int


@dataclass(frozen=True)
class WirePart:
    """A part of what one collective carries.

    Attributes:
      name: what it is.
      collective: the name of the collective.
      bytes_sent: by a rank, a step.
    """

    name: str
    collective: str
    bytes_sent: int


@dataclass(frozen=True)
class RoomPlan:
    """How many ids there is room for.

    Attributes:
      num_unique: distinct ids of a batch that there is room for.
      most_unique: the most distinct ids that a batch can hold.
      capacity: ids of bags per rank that there is room for; 0 without bags.
      most_bag_ids: ids of bags per rank that `max_ids` allows.
      mean_bag_ids: ids per rank in the bags whose mean length is stated; None where none is.
    """

    num_unique: int
    most_unique: int
    capacity: int
    most_bag_ids: int
    mean_bag_ids: float | None


@dataclass(frozen=True)
class MemorySum:
    """Bytes of a rank; see `xrex.layout.plan_memory.MemoryPlan`.

    Attributes:
      table: of all tables.
      state: of their rules.
      pins: what is in flight between two steps.
      temporary: what a step holds beside, at its peak.
      total: all of these.
    """

    table: int
    state: int
    pins: int
    temporary: int
    total: int


@dataclass(frozen=True)
class StackPlan:
    """One stack.

    Attributes:
      name: the stack's.
      rule: the type of its tables' rules.
      tables: those that lie in it, one above the other.
      features: of those tables.
      rows_per_rank: that travel, each way.
      ids_per_rank: that travel, those of bags up to the capacity.
      room: for ids.
      memory: bytes.
      arrays: the same, one by one.
      wire: the collectives of one step; none for a communicator of one rank.
      wire_parts: what they carry.
      shared_wire: bytes sent that are of no table alone: the bags' ids, segment ids and weights,
        which share a capacity, and the row statistics.
    """

    name: str
    rule: str
    tables: tuple[TablePlan, ...]
    features: tuple[FeaturePlan, ...]
    rows_per_rank: int
    ids_per_rank: int
    room: RoomPlan
    memory: MemorySum
    arrays: tuple[ArrayPlan, ...]
    wire: tuple[CollectivePlan, ...]
    wire_parts: tuple[WirePart, ...]
    shared_wire: int


@dataclass(frozen=True)
class ModelPlan:
    """What accepted embeddings cost. Pure data; see the parts for units.

    Attributes:
      group_size: ranks in a communicator.
      communicators: how many there are: each trains a copy of the tables.
      batch_size: examples, over all ranks.
      examples_per_rank: of a batch.
      stacks: by which tables and features are planned.
      memory: bytes of all stacks. Temporary bytes are the sum of the stacks', which is the most: a
        compiler may let one stack's arrays take the place of another's.
      reserved: left to the dense model, by the caller's word.
      wire: bytes that a rank sends in a step, for all stacks.
      wire_across_nodes: the part of them that leaves the node, on average over the ranks.
      nodes: how communicators lie on nodes.
      warnings: what is legal but probably not meant, one sentence each.
    """

    group_size: int
    communicators: int
    batch_size: int
    examples_per_rank: int
    stacks: tuple[StackPlan, ...]
    memory: MemorySum
    reserved: int
    wire: int
    wire_across_nodes: int
    nodes: NodePlan
    warnings: tuple[str, ...]


def plan_model(
    embeddings: Model,
    *,
    mean_ids: Mapping[str, float] | None = None,
    weighted: Collection[str] = (),
    reserved_bytes: int = 0,
) -> ModelPlan:
    """Plans a model: pure arithmetic, no device is touched; the mesh may be an `AbstractMesh`.

    For example, on 8 ranks a bag of up to 50 ids of a table of 64 columns of float32, in batches of
    4,096 examples, sends 512 * 64 * 4 * 7/8 = 114,688 bytes of rows, as one id per example would.

    Args:
      embeddings: the model, an `xrex.Embeddings`.
      mean_ids: how many ids the bags of a feature have on average, by its name.
      weighted: the features whose bags come with weights.
      reserved_bytes: bytes per device that are not for the tables.

    Raises:
      ValueError: a name is not that of a bag, a mean is no number of ids, or `reserved_bytes` is
        negative.
    """
    means = dict(mean_ids or {})
    _check_bags(embeddings, means, weighted)
    if reserved_bytes < 0:
        raise ValueError(f"reserved_bytes={reserved_bytes} must not be negative")
    handle = _handle(embeddings)
    examples = next(iter(embeddings.plans.values())).examples
    nodes = plan_nodes(handle)
    stacks = tuple(
        _plan_stack(embeddings, plan, means, weighted, nodes) for plan in embeddings.plans.values()
    )
    planned = ModelPlan(
        group_size=handle.group_size,
        communicators=handle.mesh.size // handle.group_size,
        batch_size=examples * handle.group_size,
        examples_per_rank=examples,
        stacks=stacks,
        memory=_memory([array for stack in stacks for array in stack.arrays]),
        reserved=reserved_bytes,
        wire=sum(part.bytes_sent for stack in stacks for part in stack.wire),
        wire_across_nodes=sum(part.bytes_across_nodes for stack in stacks for part in stack.wire),
        nodes=nodes,
        warnings=(),
    )
    return replace(planned, warnings=tuple(_warnings(embeddings, planned)))


def _handle(embeddings: Model) -> AsyncEmbContextHandle:
    """A layout with the mesh and the axes that all stacks have."""
    return next(iter(embeddings.stacks.values())).handle


def _check_bags(embeddings: Model, means: Mapping[str, float], weighted: Collection[str]) -> None:
    bags = [name for name, feature in embeddings.features.items() if feature.is_bag]
    for what, names in (("mean_ids", means), ("weighted", weighted)):
        for name in names:
            if name not in bags:
                raise ValueError(f"{what} names {name!r}, which is no bag; the bags are {bags}")
    for name, mean in means.items():
        if not (math.isfinite(mean) and mean >= 0):
            raise ValueError(f"mean_ids[{name!r}]={mean!r} must be a number of at least 0")


def _plan_stack(
    embeddings: Model,
    plan: Plan,
    means: Mapping[str, float],
    weighted: Collection[str],
    nodes: NodePlan,
) -> StackPlan:
    handle = embeddings.stacks[plan.name].handle
    names = (*plan.singles, *plan.bags)
    features = tuple(
        _plan_feature(name, embeddings.features[name], plan, means.get(name)) for name in names
    )
    tables = tuple(_plan_table(embeddings, plan, name, features) for name in plan.first_rows)
    dtype = embeddings.tables[tables[0].name].dtype
    rule = rule_of_any_step(embeddings.tables[tables[0].name].rule)
    has_weights = any(name in weighted for name in plan.bags)
    rank_ids = RankIds(plan.ids_per_rank, plan.num_bags, plan.capacity if has_weights else 0)
    arrays = plan_arrays(handle, plan.vocab, dtype, rule, rank_ids)
    wire = plan_wire(handle, dtype.itemsize, nodes.pairs_across_nodes, rank_ids)
    sent = sum(part.bytes_sent for part in wire)
    return StackPlan(
        name=plan.name,
        rule=type(rule).__name__,
        tables=tables,
        features=features,
        rows_per_rank=plan.rows_per_rank,
        ids_per_rank=plan.ids_per_rank,
        room=_plan_room(handle, plan, tables, features),
        memory=_memory(arrays),
        arrays=arrays,
        wire=wire,
        wire_parts=tuple(_wire_parts(handle, plan, rank_ids, wire)),
        shared_wire=sent - sum(table.wire for table in tables),
    )


def _plan_feature(name: str, feature: Feature, plan: Plan, mean: float | None) -> FeaturePlan:
    kind = "bag" if feature.is_bag else "id" if feature.max_ids is None else "sequence"
    return FeaturePlan(
        name=name,
        table=feature.table,
        kind=kind,
        rows_per_rank=plan.examples * feature.rows_per_example,
        ids_per_rank=plan.examples * int(feature.max_ids or 1),
        mean_ids=mean,
    )


def _plan_table(
    embeddings: Model, plan: Plan, name: str, features: tuple[FeaturePlan, ...]
) -> TablePlan:
    table, handle = embeddings.tables[name], embeddings.stacks[plan.name].handle
    own = [feature for feature in features if feature.table == name]
    rows = sum(feature.rows_per_rank for feature in own)
    bags = sum(feature.rows_per_rank for feature in own if feature.kind == "bag")
    row_bytes = handle.shard_width * table.dtype.itemsize
    # Each way: rows and ids in the lookup, gradients and segment ids in the update.
    each_way = rows * row_bytes + RankIds(rows - bags, bags).bytes
    return TablePlan(
        name=name,
        stack=plan.name,
        vocab=table.vocab,
        shard_width=handle.shard_width,
        dtype=table.dtype.name,
        table=table.vocab * row_bytes,
        state=table.vocab * state_bytes_per_row(handle, rule_of_any_step(table.rule)),
        wire=2 * (handle.group_size - 1) * each_way,
    )


def _plan_room(
    handle: AsyncEmbContextHandle,
    plan: Plan,
    tables: tuple[TablePlan, ...],
    features: tuple[FeaturePlan, ...],
) -> RoomPlan:
    bags = [feature for feature in features if feature.kind == "bag"]
    means = [plan.examples * bag.mean_ids for bag in bags if bag.mean_ids is not None]
    # Of each table as many rows as single ids can name, and the others by the bags' ids, of which
    # there are no more than the capacity.
    by_singles = by_bags = 0
    for table in tables:
        single, pooled = (
            handle.group_size
            * sum(f.ids_per_rank for f in features if f.table == table.name and (f in bags) == bag)
            for bag in (False, True)
        )
        named = min(table.vocab, single)
        by_singles += named
        by_bags += min(table.vocab - named, pooled)
    return RoomPlan(
        num_unique=handle.num_unique,
        most_unique=by_singles + min(by_bags, handle.group_size * plan.capacity),
        capacity=plan.capacity,
        most_bag_ids=sum(bag.ids_per_rank for bag in bags),
        mean_bag_ids=sum(means) if means else None,
    )


def _wire_parts(
    handle: AsyncEmbContextHandle, plan: Plan, ids: RankIds, wire: tuple[CollectivePlan, ...]
) -> Iterator[WirePart]:
    """What each collective carries: bags go along with the ids and with the segment ids."""
    to_peers = 4 * (handle.group_size - 1)
    for collective in wire:
        name, sent = collective.name, collective.bytes_sent
        if collective.operation != "all-gather":
            yield WirePart(name, name, sent)
            continue
        yield WirePart(name, name, to_peers * ids.ids)
        if plan.bags:
            yield WirePart("lengths of bags", name, to_peers * ids.bags)
            yield WirePart("scales of bags", name, to_peers * ids.bags)
        if ids.weights:
            yield WirePart("weights in bags", name, to_peers * ids.weights)


def _memory(arrays: Collection[ArrayPlan]) -> MemorySum:
    table, state, pins, temporary = (
        group_bytes(arrays, group) for group in ("table", "state", "pins", "temporary")
    )
    return MemorySum(table, state, pins, temporary, table + state + pins + temporary)


def _warnings(embeddings: Model, planned: ModelPlan) -> Iterator[str]:
    for stack in planned.stacks:
        for text in _warnings_of_stack(embeddings, stack):
            yield f"Stack {stack.name!r}: {text}"
    handle = _handle(embeddings)
    yield from warn_of_nodes(handle, planned.nodes)
    yield from warn_of_devices(planned.memory.total + planned.reserved)
    yield from warn_of_idle_axes(handle, planned.communicators)


def _warnings_of_stack(embeddings: Model, stack: StackPlan) -> Iterator[str]:
    room = stack.room
    becomes = "are cut" if embeddings.overflow == "cut" else "are an error"
    for feature in stack.features:
        most = embeddings.features[feature.name].max_ids
        if feature.mean_ids is not None and most is not None and feature.mean_ids > most:
            yield (
                f"The bags of feature {feature.name!r} have {feature.mean_ids:g} ids on average, "
                f"and max_ids={most} has room for fewer: those beyond it {becomes}."
            )
    if room.mean_bag_ids is not None and room.mean_bag_ids > room.capacity:
        yield (
            f"The bags of a rank have {room.mean_bag_ids:g} ids on average, and a capacity of "
            f"{room.capacity} has room for fewer: those beyond it {becomes}."
        )
    yield from warn_of_room(room.num_unique, room.most_unique)
    yield from warn_of_small_messages(stack.wire)
    yield from warn_of_state(stack.memory.table, stack.memory.state)
