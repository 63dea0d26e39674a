"""What about a plan is legal but probably not meant, one sentence each."""

from collections.abc import Iterable, Iterator

from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.plan_memory import DEVICE_BYTES
from xrex.layout.plan_wire import CollectivePlan, NodePlan

# Below it, a message costs its latency more than its bytes.
SMALL_MESSAGE_BYTES = 4096


def warn_of_small_messages(wire: Iterable[CollectivePlan]) -> Iterator[str]:
    """Collectives whose messages are short."""
    small = [part for part in wire if part.message_bytes < SMALL_MESSAGE_BYTES]
    if small:
        sizes = ", ".join(f"{part.name} {part.message_bytes} bytes" for part in small)
        yield (
            f"Messages under {SMALL_MESSAGE_BYTES // 1024} KB per peer cost their latency more "
            f"than their bytes ({sizes}): use more tokens per batch, or fewer ranks."
        )


def warn_of_nodes(handle: AsyncEmbContextHandle, nodes: NodePlan) -> Iterator[str]:
    """Communicators that lie unevenly, and a last node that is not full."""
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


def warn_of_room(num_unique: int, most: int) -> Iterator[str]:
    """Room for fewer distinct ids than the most that a batch may hold."""
    if num_unique < most:
        yield (
            f"A batch may hold {most} distinct ids, and num_unique={num_unique} has room "
            "for fewer: tokens of the largest ids get no gradient, and are counted in `dropped`."
        )


def warn_of_state(table: int, state: int) -> Iterator[str]:
    """More bytes of state than of the table, on a rank."""
    if state > table:
        yield (
            "The update rule's state is larger than the table on each rank, because it is not "
            "sharded: fewer ranks per communicator would hold wider rows."
        )


def warn_of_devices(total: int) -> Iterator[str]:
    """More bytes on a rank than devices have."""
    for device_bytes in DEVICE_BYTES:
        if total > device_bytes:
            yield f"Table, state, pins and temporary do not fit into {device_bytes // 10**9} GB."


def warn_of_idle_axes(handle: AsyncEmbContextHandle, communicators: int) -> Iterator[str]:
    """Axes along which devices do the same work."""
    idle = [axis for axis, size in handle.mesh.shape.items() if size > 1]
    idle = [axis for axis in idle if axis not in handle.table_axis]
    if idle:
        yield (
            f"The mesh axes {tuple(idle)} shard neither columns nor tokens: "
            f"{communicators} communicators do the same work on equal copies of the table."
        )
