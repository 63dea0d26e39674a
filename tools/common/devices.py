"""The devices that a tool runs on: the GPUs that are there, or simulated CPU devices."""

import glob
import math
import os
import re
from collections.abc import Sequence

import jax

from tools.common.command import UserError, wrong_value

SIMULATED_DEVICES = 8
# Simulated devices are threads and buffers of this machine's.
MOST_DEVICES = 1024
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def simulate(count: int | None) -> None:
    """Has JAX simulate so many CPU devices; call it before JAX looks for devices.

    Counts for the CPU only: where there are GPUs, JAX takes them.

    Args:
      count: how many; None for those that XLA_FLAGS asks for already, or eight.
    """
    quiet_without_gpu()
    present = os.environ.get("XLA_FLAGS", "")
    if count is None and _DEVICE_COUNT in present:
        return
    # The last of several counts is the one that holds.
    wanted = f"{_DEVICE_COUNT}={SIMULATED_DEVICES if count is None else count}"
    os.environ["XLA_FLAGS"] = f"{present} {wanted}".strip()


def quiet_without_gpu() -> None:
    """Keeps JAX's CUDA plugin quiet where it is installed for compiling and there is no GPU.

    It would complain at length that CUDA's runtime libraries are missing, which nothing needs.
    """
    if not glob.glob("/dev/nvidia[0-9]*"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def choose_devices(wanted: int | None) -> Sequence[jax.Device]:
    """The first devices; simulated ones where there is no GPU.

    Args:
      wanted: how many; None for all.

    Raises:
      UserError: there are fewer, or none of the platform that JAX_PLATFORMS names.
    """
    simulate(wanted)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UserError(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: {error}") from error
    if wanted is not None and wanted > len(devices):
        raise UserError(
            f"{wanted} devices were asked for, and there are {len(devices)} of platform "
            f"{jax.default_backend()} (JAX_PLATFORMS=cpu simulates any number)"
        )
    return devices[:wanted]


def choose_mesh(mesh: str | None, devices: int | None) -> tuple[int, ...]:
    """The sizes of the mesh's axes; see `choose_devices`.

    Args:
      mesh: sizes such as "2x4"; None for one axis.
      devices: how many; None for those of the mesh, or all GPUs, or eight simulated ones.

    Raises:
      UserError: a mesh that is none or contradicts `devices`, or too few devices.
    """
    shape = None if mesh is None else parse_shape(mesh)
    if shape is not None and devices not in (None, math.prod(shape)):
        raise UserError(
            f"--mesh={mesh} has {math.prod(shape)} devices, and --devices is {devices}: "
            "leave one of them out"
        )
    try:
        found = choose_devices(math.prod(shape) if shape else devices)
    except UserError as error:
        name, value = ("mesh", mesh) if shape else ("devices", devices)
        raise wrong_value(name, value, str(error)) from error
    return shape or (len(found),)


def parse_shape(text: str) -> tuple[int, ...]:
    """The sizes of `2x4`.

    Raises:
      UserError: they are no sizes, or of too many devices.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,9}", text):
        raise wrong_value("mesh", text, "wanted sizes such as 8, 2x4 or 2x2x2")
    shape = tuple(map(int, text.split("x")))
    if math.prod(shape) > MOST_DEVICES:
        raise wrong_value("mesh", text, f"wanted at most {MOST_DEVICES} devices")
    return shape


def check_memory(needed: int, what: str) -> None:
    """Refuses what this machine's memory cannot hold; devices that are not simulated say so.

    Raises:
      UserError: simulated devices would need more than there is.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if jax.default_backend() == "cpu" and needed > there:
        raise UserError(f"{what} take {needed:,} bytes, and this machine has {there:,}")
