"""What a layout costs before a device is there, and what about it is probably not meant.

All figures are of one rank and of the pipeline with `staleness=1`. Units are bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from xrex.checks import TABLE_DTYPES, check_vocab
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.plan_memory import MemoryPlan, plan_memory
from xrex.layout.plan_wire import CollectivePlan, NodePlan, plan_nodes, plan_wire
from xrex.rules import RowwiseAdagrad
from xrex.rules.base import UpdateRule

# Below it, a message costs its latency more than its bytes.
SMALL_MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Plan:
    """What an accepted layout costs. Pure data; see the parts for units.

    Attributes:
      group_size: ranks in a communicator.
      communicators: how many there are: each trains a copy of the table.
      tokens_per_rank: tokens of a batch on a rank.
      shard_width: columns of the table on a rank.
      vocab: rows of the table, or None.
      dtype: the table's.
      memory: bytes per rank.
      wire: the collectives of one step; none for a communicator of one rank.
      nodes: how communicators lie on nodes.
      warnings: what is legal but probably not meant, one sentence each.
    """

    group_size: int
    communicators: int
    tokens_per_rank: int
    shard_width: int
    vocab: int | None
    dtype: str
    memory: MemoryPlan
    wire: tuple[CollectivePlan, ...]
    nodes: NodePlan
    warnings: tuple[str, ...]


def plan_layout(
    handle: AsyncEmbContextHandle,
    vocab: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    rule: UpdateRule | None = None,
    *,
    reserved_bytes: int = 0,
) -> Plan:
    """Plans a layout: pure arithmetic, no device is touched.

    For example, 16 ranks, 4,096 tokens per rank and rows of 512 bfloat16: each rank sends
    4,096 * 512 * 2 * 15/16 = 3,932,160 bytes for the lookup, a message of 262,144 to each peer.

    Args:
      handle: the layout.
      vocab: rows of the table; None plans without the bytes of table and state.
      dtype: the table's, bfloat16 or float32.
      rule: the update rule; None means `RowwiseAdagrad`.
      reserved_bytes: bytes per device that are not for the table.

    Raises:
      ValueError: `vocab` is not a size that tables may have, or `reserved_bytes` is negative.
      TypeError: tables have no such dtype.
    """
    if vocab is not None:
        check_vocab(vocab)
    if reserved_bytes < 0:
        raise ValueError(f"reserved_bytes={reserved_bytes} must not be negative")
    table_dtype = jnp.dtype(dtype)
    if table_dtype not in TABLE_DTYPES:
        raise TypeError(f"async_emb table must be bfloat16 or float32, not {table_dtype}")
    rule = RowwiseAdagrad(learning_rate=0.0) if rule is None else rule
    nodes = plan_nodes(handle)
    memory = plan_memory(handle, vocab, table_dtype, rule, reserved_bytes)
    wire = plan_wire(handle, table_dtype.itemsize, nodes.pairs_across_nodes)
    plan = Plan(
        group_size=handle.group_size,
        communicators=handle.mesh.size // handle.group_size,
        tokens_per_rank=handle.tokens_per_rank,
        shard_width=handle.shard_width,
        vocab=vocab,
        dtype=table_dtype.name,
        memory=memory,
        wire=wire,
        nodes=nodes,
        warnings=(),
    )
    return replace(plan, warnings=tuple(_warnings(handle, plan)))


def _warnings(handle: AsyncEmbContextHandle, plan: Plan) -> Iterator[str]:
    yield from _warn_of_small_messages(plan)
    yield from _warn_of_nodes(handle, plan.nodes)
    yield from _warn_of_capacity(handle, plan)
    yield from _warn_of_memory(plan.memory)
    idle = [axis for axis, size in handle.mesh.shape.items() if size > 1]
    idle = [axis for axis in idle if axis not in handle.table_axis]
    if idle:
        yield (
            f"The mesh axes {tuple(idle)} shard neither columns nor tokens: "
            f"{plan.communicators} communicators do the same work on equal copies of the table."
        )


def _warn_of_small_messages(plan: Plan) -> Iterator[str]:
    small = [part for part in plan.wire if part.message_bytes < SMALL_MESSAGE_BYTES]
    if small:
        sizes = ", ".join(f"{part.name} {part.message_bytes} bytes" for part in small)
        yield (
            f"Messages under {SMALL_MESSAGE_BYTES // 1024} KB per peer cost their latency more "
            f"than their bytes ({sizes}): use more tokens per batch, or fewer ranks."
        )


def _warn_of_nodes(handle: AsyncEmbContextHandle, nodes: NodePlan) -> Iterator[str]:
    if not nodes.even:
        fewest, most = nodes.ranks_per_node
        yield (
            f"A communicator spans nodes unevenly, with {fewest} to {most} ranks per node: "
            "the fullest node's links decide its pace."
        )
    if handle.mesh.size > nodes.devices_per_node and handle.mesh.size % nodes.devices_per_node:
        yield (
            f"{handle.mesh.size} devices do not fill nodes of {nodes.devices_per_node}: "
            "the last node is not full."
        )


def _warn_of_capacity(handle: AsyncEmbContextHandle, plan: Plan) -> Iterator[str]:
    most = (
        handle.tokens_per_batch if plan.vocab is None else min(handle.tokens_per_batch, plan.vocab)
    )
    if handle.num_unique < most:
        yield (
            f"A batch may hold {most} distinct ids, and num_unique={handle.num_unique} has room "
            "for fewer: tokens of the largest ids get no gradient, and are counted in `dropped`."
        )


def _warn_of_memory(memory: MemoryPlan) -> Iterator[str]:
    if memory.table is None or memory.state is None or memory.total is None:
        return
    if memory.state > memory.table:
        yield (
            "The update rule's state is larger than the table on each rank, because it is not "
            "sharded: fewer ranks per communicator would hold wider rows."
        )
    for capacity in memory.largest_vocab:
        if memory.total + memory.reserved > capacity.device_bytes:
            yield (
                f"Table, state, pins and temporary do not fit into "
                f"{capacity.device_bytes // 10**9} GB."
            )
