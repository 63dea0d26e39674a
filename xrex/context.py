"""The handle: one checked layout of a sharded table, which every call of xrex takes first."""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from pallas_kernels import api as kernels
from xrex.layout import (
    AnyMesh,
    AxisNames,
    Layout,
    axis_size,
    axis_tuple,
    communicators,
    first_violation,
    make_layout,
)

OutOfRange = Literal["zero", "clip", "raise"]


@dataclass(frozen=True)
class AsyncEmbContextHandle:
    """A layout and the policies that go with it. Made by `make_context_handle`, which checks it.

    Frozen, hashable, compared by content, and picklable: it may be a static argument of `jax.jit`.

    Attributes:
      mesh: the devices.
      table_axis: mesh axes over which the table's columns are sharded, in rank order.
      data_axis: mesh axes over which tokens are sharded.
      tokens_per_batch: tokens in a batch, over all ranks.
      emb_width: width of a whole row.
      num_unique: how many distinct ids of a batch there is room for.
      num_devices_per_node: recorded for planning; decides nothing about correctness.
      out_of_range: what becomes of ids outside the table; see `make_context_handle`.
      padding_id: the id that means "no token", or None.
      implementation: the kernels that serve the layout.
      implementation_reason: why those, for people.
    """

    mesh: AnyMesh
    table_axis: tuple[str, ...]
    data_axis: tuple[str, ...]
    tokens_per_batch: int
    emb_width: int
    num_unique: int
    num_devices_per_node: int
    out_of_range: OutOfRange = "zero"
    padding_id: int | None = None
    implementation: kernels.Implementation = "reference"
    implementation_reason: str = field(default="the default", compare=False)

    @property
    def group_size(self) -> int:
        """Ranks in the communicator."""
        return axis_size(self.mesh, self.table_axis)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that one rank holds."""
        return self.tokens_per_batch // self.group_size

    @property
    def shard_width(self) -> int:
        """Columns of the table that one rank holds."""
        return self.emb_width // self.group_size

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

        For logs. Nothing is looked up by it, so equal digests cannot mix two layouts up.
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
                f"room for {self.num_unique} distinct ids; out of range: {self.out_of_range}"
                + ("" if self.padding_id is None else f"; padding id {self.padding_id}"),
                f"kernels: {self.implementation} ({self.implementation_reason})",
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles devices by platform and id: device objects themselves cannot be pickled."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "mesh"}
        return _unpickle, (_mesh_to_plain(self.mesh), fields)


def make_context_handle(
    mesh: AnyMesh,
    table_axis: AxisNames,
    *,
    data_axis: AxisNames,
    tokens_per_batch: int,
    emb_width: int,
    num_unique: int,
    num_devices_per_node: int,
    out_of_range: OutOfRange = "zero",
    padding_id: int | None = None,
    implementation: str = "auto",
) -> AsyncEmbContextHandle:
    """Checks a layout and returns the handle for it. Touches no device.

    A layout is accepted exactly when it trains correctly. For example, on a mesh of 2 x 4 devices
    with axes ("replica", "batch"), table_axis="batch" and data_axis="batch" give communicators of
    4 ranks, each of which trains one of two equal copies of the table, while data_axis=("replica",
    "batch") is rejected: the copies would see different tokens and drift apart.

    Args:
      mesh: `Mesh` (Auto or Explicit axes), or `AbstractMesh` when only planning. Where a tuple has
        axes of both types, name the Explicit ones first, as JAX's types do: with another order JAX
        moves the arrays, the table too, into its own and back in every call.
      table_axis: mesh axes over which the table's columns are sharded; a bare string is one axis.
        Devices that differ only along these form one communicator.
      data_axis: mesh axes over which tokens are sharded: those of `table_axis` in any order, and
        any of size 1.
      tokens_per_batch: tokens in a batch, over all ranks; a multiple of the communicator's size.
      emb_width: width of a whole row; a multiple of the communicator's size.
      num_unique: how many distinct ids of a batch are given room. Tokens beyond get no gradient
        and are counted; `tokens_per_batch` is always enough.
      num_devices_per_node: devices in one machine; recorded and used for planning only.
      out_of_range: what an id outside [0, vocab) means, in lookup and update alike.
        "zero": its row is zeros and it gets no gradient. "clip": -vocab to -1 count from the end;
        any other id reads the nearest row and gets no gradient. "raise": an error that names the
        first one (under `jax.jit`, wrap the function with `jax.experimental.checkify.checkify`).
      padding_id: an id that behaves as out of range wherever it lies. Under "raise" it is not an
        error but a row of zeros.
      implementation: "auto" picks the kernels by the platform of the mesh's devices; "mosaic_gpu"
        and "reference" are taken or refused, never replaced.

    Raises:
      ValueError: the layout breaks a rule (see `xrex.layout.RULES`; the notes of the exception say
        what to change), or a policy is not one of those above.
      TypeError: `mesh` is no mesh, or an axis is not named by a string.
      NotImplementedError: the implementation asked for cannot run on the mesh's devices.
    """
    layout = make_layout(
        mesh,
        table_axis,
        data_axis=data_axis,
        tokens_per_batch=tokens_per_batch,
        emb_width=emb_width,
        num_unique=num_unique,
        num_devices_per_node=num_devices_per_node,
    )
    check_layout(layout)
    _check_policy(out_of_range, padding_id)
    choice = kernels.choose(
        implementation,
        platform=_platform(mesh),
        compute_capability=_compute_capability(mesh),
        shard_width=int(emb_width) // axis_size(mesh, layout.table_axis),
    )
    return AsyncEmbContextHandle(
        mesh=mesh,
        table_axis=layout.table_axis,
        data_axis=layout.data_axis,
        tokens_per_batch=int(tokens_per_batch),
        emb_width=int(emb_width),
        num_unique=int(num_unique),
        num_devices_per_node=int(num_devices_per_node),
        out_of_range=out_of_range,
        padding_id=None if padding_id is None else int(padding_id),
        implementation=choice.implementation,
        implementation_reason=choice.reason,
    )


def check_layout(layout: Layout) -> None:
    """Raises the first rule that the layout breaks as a ValueError, with advice in its notes."""
    broken = first_violation(layout)
    if broken is None:
        return
    rule, message = broken
    error = ValueError(message)
    for line in (rule.why, *rule.advice(layout)):
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


def _mesh_to_plain(mesh: AnyMesh) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "names": tuple(mesh.shape),
        "sizes": tuple(mesh.shape.values()),
        "types": tuple(axis_type.name for axis_type in mesh.axis_types),
    }
    if isinstance(mesh, Mesh):
        plain["devices"] = [(device.platform, device.id) for device in mesh.devices.flat]
    return plain


def _plain_to_mesh(plain: dict[str, Any]) -> AnyMesh:
    types = tuple(AxisType[name] for name in plain["types"])
    if "devices" not in plain:
        return AbstractMesh(plain["sizes"], plain["names"], axis_types=types)
    devices = np.empty(len(plain["devices"]), object)
    known: dict[str, dict[int, Any]] = {}
    for position, (platform, device_id) in enumerate(plain["devices"]):
        if platform not in known:
            known[platform] = {device.id: device for device in jax.devices(platform)}
        if device_id not in known[platform]:
            raise ValueError(
                f"the pickled handle names {platform} device {device_id}, which is not here: "
                "unpickle it in a process that sees the same devices"
            )
        devices[position] = known[platform][device_id]
    return Mesh(devices.reshape(plain["sizes"]), plain["names"], axis_types=types)


def _unpickle(mesh: dict[str, Any], fields: dict[str, Any]) -> AsyncEmbContextHandle:
    return AsyncEmbContextHandle(mesh=_plain_to_mesh(mesh), **fields)
