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
from xrex.layout.plan_warnings import (
    warn_of_devices,
    warn_of_idle_axes,
    warn_of_nodes,
    warn_of_room,
    warn_of_small_messages,
    warn_of_state,
)
from xrex.layout.plan_wire import CollectivePlan, NodePlan, plan_nodes, plan_wire
from xrex.rules import RowwiseAdagrad
from xrex.rules.base import UpdateRule


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
    tokens, memory = handle.tokens_per_batch, plan.memory
    yield from warn_of_small_messages(plan.wire)
    yield from warn_of_nodes(handle, plan.nodes)
    yield from warn_of_room(
        handle.num_unique, tokens if plan.vocab is None else min(tokens, plan.vocab)
    )
    if memory.table is not None and memory.state is not None:
        yield from warn_of_state(memory.table, memory.state)
    if memory.total is not None:
        yield from warn_of_devices(memory.total + memory.reserved)
    yield from warn_of_idle_axes(handle, plan.communicators)
