"""Meshes as plain data, since device objects cannot be pickled, and back."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from xrex.layout.layout import AnyMesh


def mesh_to_plain(mesh: AnyMesh) -> dict[str, Any]:
    """The mesh as names, sizes, axis types and, if it has devices, their platforms and ids."""
    plain: dict[str, Any] = {
        "names": tuple(mesh.shape),
        "sizes": tuple(mesh.shape.values()),
        "types": tuple(axis_type.name for axis_type in mesh.axis_types),
    }
    if isinstance(mesh, Mesh):
        plain["devices"] = [(device.platform, device.id) for device in mesh.devices.flat]
    return plain


def plain_to_mesh(plain: dict[str, Any]) -> AnyMesh:
    """Undoes `mesh_to_plain`.

    Raises:
      ValueError: this process does not see one of the devices.
    """
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
