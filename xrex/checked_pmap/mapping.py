"""The arguments of one `xrex.pmap`, checked before any argument of a call is seen."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from xrex.checked_pmap import checks

# The axis's name when the caller gives none.
_DEFAULT_AXIS_NAME = "_pmap_axis"


@dataclass(frozen=True)
class Mapping:
    """The arguments of one `pmap`, checked."""

    fun: Callable[..., Any]
    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    devices: tuple[jax.Device, ...] | None
    axis_size: int | None

    def dynamic_argnums(self, num_args: int) -> list[int]:
        """The positions of the arguments that are not static, of a call with that many."""
        return [i for i in range(num_args) if i not in self.static_argnums]

    def processes(self) -> tuple[int, ...]:
        """The processes that own the devices, in order."""
        devices = jax.devices() if self.devices is None else self.devices
        return tuple(sorted({device.process_index for device in devices}))


def make_mapping(
    fun: Callable[..., Any],
    axis_name: Hashable,
    *,
    in_axes: Any,
    out_axes: Any,
    static_argnums: int | Iterable[int],
    donate_argnums: int | Iterable[int],
    devices: Sequence[jax.Device] | None,
    axis_size: int | None,
) -> Mapping:
    """Checks what can be checked before any argument is seen, without touching a device.

    Args: as for `xrex.pmap`.

    Raises:
      TypeError, ValueError: as `xrex.pmap` does.
    """
    if not callable(fun):
        raise TypeError(f"pmap expects a callable, but got {fun!r}.")
    hash(axis_name)  # raises TypeError
    if isinstance(axis_name, tuple):
        raise TypeError(f"pmap maps over one axis, but axis_name is the tuple {axis_name!r}.")
    checks.check_axes("in_axes", in_axes)
    checks.check_axes("out_axes", out_axes)
    static = checks.check_argnums("static_broadcasted_argnums", static_argnums)
    donated = checks.check_argnums("donate_argnums", donate_argnums)
    checks.check_static_and_donated(static, donated)
    if devices is not None:
        devices = tuple(devices)
        if not devices:
            raise ValueError("'devices' argument to pmap must be non-empty, or None.")
        if len(set(devices)) != len(devices):
            raise ValueError(f"pmap devices must differ, but got one twice: {list(devices)}.")
    return Mapping(
        fun=fun,
        axis_name=_DEFAULT_AXIS_NAME if axis_name is None else axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=static,
        donate_argnums=donated,
        devices=devices,
        axis_size=checks.check_axis_size_type(axis_size),
    )
