"""One of several processes of `pmap_multiprocess_test`: runs the named cases, prints what it saw.

Usage: python pmap_worker.py CASES PORT PROCESSES PROCESS, with CASES separated by commas and
LOCAL_DEVICES devices set in XLA_FLAGS. The last line of the output is a JSON object: for each
case its value, or the error, its notes and the seconds until it came.
"""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from xrex.checked_pmap.pmap import pmap

LOCAL_DEVICES = 2


def _local(rank: int, entries: int = LOCAL_DEVICES) -> np.ndarray:
    """This process's part of 0, 1, 2, ..., two per process."""
    return np.arange(rank * LOCAL_DEVICES, rank * LOCAL_DEVICES + entries, dtype=np.float32)


def _share(x: jax.Array) -> jax.Array:
    return x / jax.lax.psum(x, "i")


def _same_share(x: jax.Array) -> jax.Array:
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
    """One entry per process: the first device of each."""
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
    """A gradient through psum sees all devices, as in jax.pmap: 2 x, once per device."""
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


# Calls after a good first one, on which the processes do not agree. Each case calls one pmap with
# good arguments, then does what differs, and ends with a good call.


def _after_a_good_call(mapped: Callable[..., Any], rank: int, *good: Any, differ: Any) -> Any:
    """Calls with `good`; then with what `differ` returns, which raises; then with `good` again."""
    first = _values(mapped(_local(rank), *good))
    seen = _run(lambda rank: _values(mapped(*differ(rank))), rank)
    return [first, seen, _values(mapped(_local(rank), *good))]


def later_contradiction_and_new_size(rank: int) -> Any:
    """Process 0 passes sizes that contradict, the others a new legal size."""
    return _after_a_good_call(
        pmap(lambda x, y: _share(x + y), "i"),
        rank,
        _local(rank),
        differ=lambda rank: (_local(rank, 1), _local(rank, 1 if rank else 2)),
    )


def later_cached_and_bad(rank: int) -> Any:
    """Process 0 repeats its call, the others pass a scalar."""
    return _after_a_good_call(
        pmap(_share, "i"), rank, differ=lambda rank: (np.float32(0) if rank else _local(rank),)
    )


def later_cached_and_new(rank: int) -> Any:
    """Process 0 repeats its call, the others pass matrices: each would launch, but not the same."""
    return _after_a_good_call(
        pmap(_share, "i"),
        rank,
        differ=lambda rank: (_local(rank)[:, None] if rank else _local(rank),),
    )


def later_dtypes(rank: int) -> Any:
    """The same shapes in two types."""
    return _after_a_good_call(
        pmap(_share, "i"),
        rank,
        differ=lambda rank: (_local(rank).astype(np.float16 if rank else np.float32),),
    )


def later_static(rank: int) -> Any:
    """Static arguments that differ; their reprs hold a set and an address."""
    mapped = pmap(lambda x, static: _share(x) * static[0], "i", static_broadcasted_argnums=1)
    unstable = (frozenset({"a", "b", "c"}), functools.partial(_share), object)
    return _after_a_good_call(
        mapped, rank, (1.0, *unstable), differ=lambda rank: (_local(rank), (1.0 + rank, *unstable))
    )


def later_number(rank: int) -> Any:
    """A Python number that fits in one process only, of a signature that was compiled."""
    mapped = pmap(lambda x, n: _share(x) + jax.numpy.float32(n), "i", in_axes=(0, None))
    return _after_a_good_call(
        mapped, rank, 0, differ=lambda rank: (_local(rank), 2**40 if rank else 0)
    )


def later_deleted(rank: int) -> Any:
    """An array that only process 1 has donated elsewhere, of a signature that was compiled."""
    mapped = pmap(_share, "i")
    x = mapped(_local(rank))
    if rank:
        x.delete()
    return _after_a_good_call(mapped, rank, differ=lambda rank: (x,))


def later_raises_while_traced(rank: int) -> Any:
    """The function raises for what process 1 passes."""

    def fun(x: jax.Array) -> jax.Array:
        if x.ndim:
            raise KeyError("not this shape")
        return _share(x)

    mapped = pmap(fun, "i")
    return _after_a_good_call(
        mapped, rank, differ=lambda rank: (_local(rank)[:, None] if rank else _local(rank),)
    )


def later_mesh_set(rank: int) -> Any:
    """Process 1 calls under jax.set_mesh."""
    mapped = pmap(_share, "i")

    def call(rank: int) -> Any:
        if not rank:
            return mapped(_local(rank))
        with jax.set_mesh(jax.make_mesh((len(jax.devices()),), ("data",))):
            return mapped(_local(rank))

    return [_values(mapped(_local(rank))), _run(call, rank), _values(mapped(_local(rank)))]


def other_order(rank: int) -> Any:
    """Two functions in two orders; both are lambdas of this file, alike but for their bodies."""
    sums = pmap(lambda x: jax.lax.psum(x, "i"), "i")
    means = pmap(lambda x: jax.lax.pmean(x, "i"), "i")
    both = (sums, means) if rank == 0 else (means, sums)
    return [_run(lambda rank, f=f: _values(f(_local(rank))), rank) for f in both]


def other_names(rank: int) -> Any:
    """Two functions that compute the same."""
    return _values(pmap(_share if rank else _same_share, "i")(_local(rank)))


def depends_on_process(rank: int) -> Any:
    """One function that traces to another program in each process."""
    return _values(pmap(lambda x: jax.lax.psum(x + np.float32(rank), "i"), "i")(_local(rank)))


def made_again_on_one(rank: int) -> Any:
    """A pmap made anew in process 1: not compiled there, and the same program."""
    mapped = pmap(_share, "i")
    mapped(_local(rank))
    return _values((pmap(_share, "i") if rank else mapped)(_local(rank)))


def lowered_on_one(rank: int) -> Any:
    """Lowering is nobody else's business."""
    return list(pmap(_share, "i").lower(_local(rank)).out_info.shape) if rank else None


def traced_once(rank: int) -> Any:
    """Each signature is traced once."""
    traces = []
    mapped = pmap(lambda x: traces.append(x.shape) or _share(x), "i")
    for _ in range(3):
        mapped(_local(rank))
    return len(traces)


def many_calls(rank: int) -> Any:
    """More calls than texts are kept together."""
    mapped = pmap(_share, "i")
    return [_values(mapped(_local(rank))) for _ in range(600)][-1]


def call_left_out(rank: int) -> Any:
    """Process 1 leaves the second call out. The third is the others' third and its second."""
    mapped = pmap(_share, "i")
    mapped(_local(rank))
    with _deadline("2"):
        if rank == 1:
            time.sleep(3)
        seen = [_run(lambda rank: _values(mapped(_local(rank))), rank)]
    return [*seen, _values(mapped(_local(rank)))]


def last_call_left_out(rank: int) -> Any:
    """Process 1 goes on to its end without the second call."""
    mapped = pmap(_share, "i")
    mapped(_local(rank))
    with _deadline("2"):
        return _values(mapped(_local(rank))) if rank != 1 else None


def wrong_deadline(rank: int) -> Any:
    """A deadline that process 1 cannot read."""
    with _deadline("soon" if rank else None):
        return _values(pmap(_share, "i")(_local(rank)))


@contextlib.contextmanager
def _deadline(seconds: str | None) -> Iterator[None]:
    """How long calls inside wait for the others; None leaves that as it is."""
    kept = os.environ.get("XREX_PMAP_SECONDS")
    if seconds is not None:
        os.environ["XREX_PMAP_SECONDS"] = seconds
    try:
        yield
    finally:
        os.environ.pop("XREX_PMAP_SECONDS", None)
        if kept is not None:
            os.environ["XREX_PMAP_SECONDS"] = kept


def _run(case: Callable[[int], Any], rank: int) -> Any:
    started = time.perf_counter()
    try:
        return {"value": case(rank)}
    except Exception as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            "seconds": time.perf_counter() - started,
        }


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
