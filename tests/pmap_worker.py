"""One of several processes of `pmap_multiprocess_test`: runs the named cases, prints what it saw.

Usage: python pmap_worker.py CASES PORT PROCESSES PROCESS, with CASES separated by commas and
LOCAL_DEVICES devices set in XLA_FLAGS. The last line of the output is a JSON object: for each
case its value, or the error and its notes.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xrex.checked_pmap.pmap import pmap

LOCAL_DEVICES = 2


def _local(rank: int, entries: int = LOCAL_DEVICES) -> np.ndarray:
    """This process's part of 0, 1, 2, ..., two a process."""
    return np.arange(rank * LOCAL_DEVICES, rank * LOCAL_DEVICES + entries, dtype=np.float32)


def _share(x: jax.Array) -> jax.Array:
    return x / jax.lax.psum(x, "i")


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)


def right_axis_size(rank: int) -> Any:
    """The global size is accepted; the second call takes the compiled program."""
    mapped = pmap(_share, "i", axis_size=2 * LOCAL_DEVICES)
    mapped(_local(rank))
    return _values(mapped(_local(rank)))


def no_axis_size(rank: int) -> Any:
    """Everything else at once: trees, static, keyword and whole arguments, both kinds of output."""

    def fun(name: str, tree: Any, scale: Any, *, shift: Any) -> Any:
        total = jax.lax.psum(tree["x"], "i")
        each = scale * tree["x"] + shift + jax.lax.axis_index("i").astype(np.float32)
        return {name: each, "total": total}

    mapped = pmap(
        fun,
        "i",
        in_axes=(None, {"x": 0}, None),
        out_axes={"each": 0, "total": None},
        static_broadcasted_argnums=0,
    )
    return _values(mapped("each", {"x": _local(rank)}, 10.0, shift=np.ones(2, np.float32)))


def jax_pmap(rank: int) -> Any:
    """The judge: jax.pmap on the same data."""
    return _values(jax.pmap(_share, "i", axis_size=2 * LOCAL_DEVICES)(_local(rank)))


def wrong_on_one(rank: int) -> Any:
    """Process 1 alone gives its local size where the global one is meant."""
    axis_size = LOCAL_DEVICES if rank == 1 else 2 * LOCAL_DEVICES
    return _values(pmap(_share, "i", axis_size=axis_size)(_local(rank)))


def wrong_on_both(rank: int) -> Any:
    """Both give the local size."""
    return _values(pmap(_share, "i", axis_size=LOCAL_DEVICES)(_local(rank)))


def absurd_on_one(rank: int) -> Any:
    """Process 1 alone gives a size beyond 32 bits, in which the processes speak."""
    axis_size = 2**40 if rank == 1 else 2 * LOCAL_DEVICES
    return _values(pmap(_share, "i", axis_size=axis_size)(_local(rank)))


def bad_argument_on_one(rank: int) -> Any:
    """Process 1 alone passes a scalar."""
    return _values(pmap(_share, "i")(_local(rank) if rank == 0 else np.float32(0)))


def uneven_sizes(rank: int) -> Any:
    """Process 1 has one entry less, and no axis_size says what is meant."""
    return _values(pmap(_share, "i")(_local(rank, LOCAL_DEVICES - rank)))


def fewer_entries(rank: int) -> Any:
    """One entry a process: the first device of each."""
    mapped = pmap(lambda x: jax.lax.psum(x, "i"), "i", axis_size=2)
    result = mapped(_local(rank, 1))
    return [_values(result), [device.process_index for device in result.sharding.device_set]]


def all_devices_backwards(rank: int) -> Any:
    """Given devices decide the order: process 1 comes first."""
    devices = jax.devices()[::-1]
    mapped = pmap(
        lambda x: 10 * x + jax.lax.axis_index("i").astype(x.dtype),
        "i",
        devices=devices,
        axis_size=len(devices),
    )
    return _values(mapped(_local(rank)))


def interleaved_devices(rank: int) -> Any:
    """Devices of a process must be neighbours."""
    devices = sorted(jax.devices(), key=lambda device: (device.id % 2, device.process_index))
    return _values(pmap(_share, "i", devices=devices)(_local(rank)))


def own_devices(rank: int) -> Any:
    """Devices of one process only: nothing is said to the other, which does not even call."""
    if rank == 1:
        return None
    mapped = pmap(_share, "i", devices=jax.local_devices(), axis_size=LOCAL_DEVICES)
    return _values(mapped(_local(rank) + 1))


def own_devices_traced(rank: int) -> Any:
    """On devices of one process only, jit works as it does in one process."""
    if rank == 1:
        return None
    mapped = jax.jit(pmap(_share, "i", devices=jax.local_devices()))
    return _values(mapped(_local(rank) + 1))


def gradient_inside(rank: int) -> Any:
    """A gradient through psum sees all devices, as in jax.pmap: 2 x, once a device."""
    mapped = pmap(jax.grad(lambda x: jax.lax.psum(x**2, "i")), "i")
    return _values(mapped(_local(rank)))


def traced(rank: int) -> Any:
    """Under jit there are no local arrays."""
    return _values(jax.jit(pmap(_share, "i"))(_local(rank)))


def global_array(rank: int) -> Any:
    """An array over all processes is no process's own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_process_local_data(sharding, _local(0), (LOCAL_DEVICES,))
    return _values(pmap(_share, "i")(array))


def donated(rank: int) -> Any:
    """An argument that lies on the right devices gives its buffers up."""
    x = pmap(lambda x: x)(_local(rank))
    result = pmap(lambda x: x + 1, donate_argnums=0)(x)
    return [_values(result), x.is_deleted()]


def lowered(rank: int) -> Any:
    """Lowering shows the global shapes."""
    info = pmap(_share, "i").lower(_local(rank)).out_info
    return list(info.shape)


def _run(case: Callable[[int], Any], rank: int) -> Any:
    try:
        return {"value": case(rank)}
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return {"error": type(error).__name__, "text": str(error), "notes": notes}


def main() -> None:
    """Joins the other processes, runs the cases in order, prints the results."""
    cases, port, processes, rank = sys.argv[1].split(","), *map(int, sys.argv[2:])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    print(json.dumps({case: _run(globals()[case], rank) for case in cases}), flush=True)


if __name__ == "__main__":
    main()
