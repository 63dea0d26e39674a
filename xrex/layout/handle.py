"""The handle: one checked layout of a sharded table, which every call of xrex takes first."""

import functools
import hashlib
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np
from jax.sharding import AbstractMesh

from pallas_kernels import api as kernels
from xrex.layout.layout import (
    SIZES,
    AnyMesh,
    AxisNames,
    Layout,
    as_layout,
    axis_size,
    axis_tuple,
    communicators,
)
from xrex.layout.mesh_pickle import mesh_to_plain, plain_to_mesh
from xrex.layout.requirements import first_violation

OutOfRange = Literal["zero", "clip", "raise"]


@dataclass(frozen=True)
class AsyncEmbContextHandle(Layout):
    """A layout that was checked, and its policies. Made by `make_context_handle`.

    Frozen, hashable, compared by content, and picklable: it may be a static argument of `jax.jit`.
    Beside the attributes of `Layout` it has:

    Attributes:
      out_of_range: what becomes of ids outside the table; see `make_context_handle`.
      padding_id: the id that means "no token", or None.
      implementation: the kernels that serve the layout.
      implementation_reason: why those, for people.
    """

    _: KW_ONLY
    out_of_range: OutOfRange = "zero"
    padding_id: int | None = None
    implementation: kernels.Implementation = "reference"
    implementation_reason: str = field(default="the default", compare=False)

    @property
    def layout(self) -> Layout:
        """The layout alone."""
        return Layout(**{f.name: getattr(self, f.name) for f in fields(Layout)})

    @functools.cached_property
    def flatten_replicas(self) -> tuple[int, ...]:
        """Device ids, communicator after communicator, each in rank order.

        For an `AbstractMesh`, which has no devices, their positions in the mesh.
        """
        groups = communicators(self.mesh, self.table_axis)
        if isinstance(self.mesh, AbstractMesh):
            return tuple(groups.ravel().tolist())
        devices = self.mesh.devices.ravel()
        return tuple(devices[position].id for position in groups.ravel())

    @functools.cached_property
    def context_id(self) -> int:
        """A 63-bit digest of the layout, the same in every process.

        For logs, as in `logging.info("table %016x", handle.context_id)`. Nothing is looked up by
        it, so equal digests cannot mix two layouts up.
        """
        content = (
            self.table_axis,
            self.data_axis,
            tuple(self.mesh.shape.items()),
            self.tokens_per_batch,
            self.emb_width,
            self.num_unique,
            self.num_devices_per_node,
            self.out_of_range,
            self.padding_id,
        )
        digest = hashlib.sha256(repr(content).encode())
        digest.update(np.asarray(self.flatten_replicas, np.int64).tobytes())
        return int.from_bytes(digest.digest()[:8], "little") >> 1

    def describe(self) -> str:
        """The layout and the kernels chosen for it, in a few lines for people."""
        return "\n".join(
            (
                f"{self.emb_width} columns over {self.table_axis}: "
                f"{self.group_size} ranks x {self.shard_width}",
                f"{self.tokens_per_batch} tokens over {self.data_axis}: "
                f"{self.group_size} ranks x {self.tokens_per_rank}",
                f"room for {self.num_unique} distinct ids"
                + (
                    ""
                    if self.num_unique >= self.tokens_per_batch
                    else f" of up to {self.tokens_per_batch} (of more, the largest are left out: "
                    "no gradient, counted in `dropped`)"
                )
                + f"; out of range: {self.out_of_range}"
                + ("" if self.padding_id is None else f"; padding id {self.padding_id}"),
                f"kernels: {self.implementation} ({self.implementation_reason})",
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles devices by platform and id: device objects themselves cannot be pickled."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "mesh"}
        return _unpickle, (mesh_to_plain(self.mesh), fields)


def make_context_handle(
    *layout: Any,
    out_of_range: OutOfRange = "zero",
    padding_id: int | None = None,
    implementation: str = "auto",
    **layout_arguments: Any,
) -> AsyncEmbContextHandle:
    """Checks a layout and returns the handle for it. Touches no device.

    Called with a `Layout`, or with the arguments of one: `make_context_handle(mesh, table_axis,
    data_axis=..., tokens_per_batch=..., emb_width=..., num_unique=..., num_devices_per_node=...)`.

    A layout is accepted exactly when it trains correctly. For example, on a mesh of 2 x 4 devices
    with axes ("replica", "batch"), table_axis="batch" and data_axis="batch" give communicators of
    4 ranks, each of which trains one of two equal copies of the table, while data_axis=("replica",
    "batch") is rejected: the copies would see different tokens and drift apart.

    Args:
      layout: a `Layout`, or the mesh and the table axis; see `Layout` for all arguments.
      out_of_range: what an id outside [0, vocab) means, in lookup and update alike.
        "zero": its row is zeros and it gets no gradient. "clip": -vocab to -1 count from the end;
        any other id reads the nearest row and gets no gradient. "raise": an error that names the
        first one (under `jax.jit`, wrap the function with `jax.experimental.checkify.checkify`).
      padding_id: the id that means "no token", wherever it lies, under every policy: its row is
        zeros, and it gets no gradient and is no error.
      implementation: "auto" picks the kernels by the platform of the mesh's devices; "mosaic_gpu"
        and "reference" are taken or refused, never replaced.
      **layout_arguments: the other arguments of `Layout`.

    Raises:
      ValueError: the layout breaks a requirement (see `xrex.layout.requirements`; the notes of the
        exception say what to change), or a policy is not one of those above.
      TypeError: an argument of the layout is missing, unknown or of a wrong type.
      NotImplementedError: the implementation asked for cannot run on the mesh's devices.
    """
    wanted = as_layout(*layout, **layout_arguments)
    check_layout(wanted)
    _check_policy(out_of_range, padding_id)
    choice = kernels.choose(
        implementation,
        platform=_platform(wanted.mesh),
        compute_capability=_compute_capability(wanted.mesh),
        shard_width=int(wanted.shard_width),
    )
    plain = {f.name: getattr(wanted, f.name) for f in fields(Layout)}
    return AsyncEmbContextHandle(
        **plain | {name: int(plain[name]) for name in SIZES},
        out_of_range=out_of_range,
        padding_id=None if padding_id is None else int(padding_id),
        implementation=choice.implementation,
        implementation_reason=choice.reason,
    )


def check_layout(layout: Layout) -> None:
    """Raises ValueError for the first requirement that the layout breaks, with advice in notes."""
    broken = first_violation(layout)
    if broken is None:
        return
    requirement, message = broken
    error = ValueError(message)
    for line in (requirement.why, *requirement.advice(layout)):
        error.add_note(line)
    raise error


def single_shard_per_rank(mesh: AnyMesh, table_axis: AxisNames, data_axis: AxisNames) -> bool:
    """Whether each rank of a communicator holds exactly one token shard.

    True when the data axes outside of `table_axis` have only one position.

    Raises:
      ValueError: an axis is not one of the mesh's.
    """
    return _off_communicator_shards(mesh, table_axis, data_axis) == 1


def check_single_shard_per_rank(mesh: AnyMesh, table_axis: AxisNames, data_axis: AxisNames) -> None:
    """Raises unless each rank of a communicator holds exactly one token shard.

    Raises:
      ValueError: the data axes outside of `table_axis` have more than one position, or an axis is
        not one of the mesh's.
    """
    off = _off_communicator_shards(mesh, table_axis, data_axis)
    if off != 1:
        raise ValueError(
            f"{off} token shards outside the communicator; "
            "add the extra axes to table_axis or drop them from data_axis"
        )


def _off_communicator_shards(mesh: AnyMesh, table_axis: AxisNames, data_axis: AxisNames) -> int:
    table_axes = axis_tuple(table_axis, "table_axis")
    data_axes = axis_tuple(data_axis, "data_axis")
    for axis in (*table_axes, *data_axes):
        if axis not in mesh.shape:
            raise ValueError(f"async_emb axis {axis!r} is not a mesh axis of {mesh}")
    outside = dict.fromkeys(axis for axis in data_axes if axis not in table_axes)
    return axis_size(mesh, tuple(outside))


def _check_policy(out_of_range: str, padding_id: object) -> None:
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(
            f"async_emb out_of_range={out_of_range!r} is not one of {get_args(OutOfRange)}"
        )
    if padding_id is None:
        return
    if isinstance(padding_id, bool) or not isinstance(padding_id, int | np.integer):
        raise ValueError(f"async_emb padding_id={padding_id!r} must be an integer or None")
    if not -(2**31) <= int(padding_id) < 2**31:
        raise ValueError(
            f"async_emb padding_id={padding_id} does not fit in int32, as ids do on device"
        )


def _platform(mesh: AnyMesh) -> str:
    """The platform of the mesh's devices, without starting a backend."""
    if isinstance(mesh, AbstractMesh):
        return "abstract"
    return mesh.devices.flat[0].platform


def _compute_capability(mesh: AnyMesh) -> str | None:
    """That of the mesh's GPUs; None where there are none."""
    if isinstance(mesh, AbstractMesh):
        return None
    return getattr(mesh.devices.flat[0], "compute_capability", None)


def _unpickle(mesh: dict[str, Any], fields: dict[str, Any]) -> AsyncEmbContextHandle:
    return AsyncEmbContextHandle(mesh=plain_to_mesh(mesh), **fields)
