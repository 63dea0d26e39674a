"""What a step sends between ranks, and which part of it leaves a node."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xrex.layout.handle import AsyncEmbContextHandle


class RankIds(NamedTuple):
    """What a rank has of ids and bags. Numbers of 32 bits, which travel together.

    Attributes:
      ids: single ones, and the capacity of its bags.
      bags: each with a length and a scale.
      weights: of the ids in bags; 0 where a batch has none.
    """

    ids: int
    bags: int = 0
    weights: int = 0

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return 4 * (self.ids + 2 * self.bags + self.weights)


@dataclass(frozen=True)
class CollectivePlan:
    """One collective of a step.

    Bytes are those of a direct exchange, each message straight from its rank to its peer; a ring
    sends as many, over other links.

    Attributes:
      name: what travels.
      operation: which collective carries it.
      bytes_sent: by a rank, a step.
      messages_per_peer: a step.
      message_bytes: of one of them; the largest, where they differ.
      bytes_across_nodes: the part of `bytes_sent` that leaves the node, on average over the ranks.
    """

    name: str
    operation: str
    bytes_sent: int
    messages_per_peer: int
    message_bytes: int
    bytes_across_nodes: int


@dataclass(frozen=True)
class NodePlan:
    """How communicators lie on nodes, devices being numbered node after node.

    Attributes:
      num_nodes: of the whole mesh.
      devices_per_node: as given to the layout.
      nodes_per_communicator: the fewest and the most.
      ranks_per_node: of one communicator on one node it touches; the fewest and the most.
      even: whether every communicator has equally many ranks on each node it touches.
      pairs_across_nodes: the part of all pairs of peers that are on different nodes.
    """

    num_nodes: int
    devices_per_node: int
    nodes_per_communicator: tuple[int, int]
    ranks_per_node: tuple[int, int]
    even: bool
    pairs_across_nodes: float


def plan_wire(
    handle: AsyncEmbContextHandle,
    itemsize: int,
    pairs_across_nodes: float,
    rank_ids: RankIds | None = None,
) -> tuple[CollectivePlan, ...]:
    """The collectives of one step, in the order of their use; none where there is one rank.

    Args:
      handle: the layout.
      itemsize: bytes of one element of the table.
      pairs_across_nodes: as in `NodePlan`.
      rank_ids: where they are more than a rank's rows; None means an id for each row.
    """
    if handle.group_size == 1:
        return ()
    peers = handle.group_size - 1
    ids = (rank_ids or RankIds(handle.tokens_per_rank)).bytes
    rows = handle.tokens_per_rank * handle.shard_width * itemsize
    statistics = 4 * handle.num_unique
    # An all-reduce scatters the sums and gathers them again, a part per rank each time.
    part = -(-statistics // handle.group_size)
    all_reduced = 2 * peers * statistics // handle.group_size
    return tuple(
        CollectivePlan(name, operation, sent, messages, size, round(sent * pairs_across_nodes))
        for name, operation, sent, messages, size in (
            ("token ids", "all-gather", peers * ids, 1, ids),
            ("rows", "all-to-all", peers * rows, 1, rows),
            ("segment ids", "all-gather", peers * ids, 1, ids),
            ("gradients", "all-to-all", peers * rows, 1, rows),
            ("square sums by row", "all-reduce", all_reduced, 2, part),
        )
    )


def plan_nodes(handle: AsyncEmbContextHandle) -> NodePlan:
    """Where the ranks of each communicator lie."""
    per_node, group_size = handle.num_devices_per_node, handle.group_size
    nodes = np.asarray(handle.flatten_replicas).reshape(-1, group_size) // per_node
    num_nodes = int(nodes.max()) + 1
    # One number for each communicator on each node that it touches, and how many ranks that has.
    communicator = np.arange(len(nodes))[:, None]
    places, ranks = np.unique(communicator * num_nodes + nodes, return_counts=True)
    _, first, touched = np.unique(places // num_nodes, return_index=True, return_counts=True)
    even = np.minimum.reduceat(ranks, first) == np.maximum.reduceat(ranks, first)
    pairs = len(nodes) * group_size * (group_size - 1)
    across = pairs - int((ranks * (ranks - 1)).sum())
    return NodePlan(
        num_nodes=len(np.unique(nodes)),
        devices_per_node=per_node,
        nodes_per_communicator=(int(touched.min()), int(touched.max())),
        ranks_per_node=(int(ranks.min()), int(ranks.max())),
        even=bool(even.all()),
        pairs_across_nodes=across / pairs if pairs else 0.0,
    )
