"""Runs Mosaic GPU kernels on CPU devices, on JAX 0.10.2 to 0.12, and records data races."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret import params as interpret_params

_RACE = "RACE DETECTED"


def interpreter(*, detect_races: bool = True) -> Any:
    """What to pass as `interpret`. A race does not stop the kernel: see `recorded_races`."""
    _mend()
    fields = interpret_params.InterpretGPUParams.__dataclass_fields__
    # By default JAX 0.12 raises inside a callback, which leaves the other devices waiting.
    options: dict[str, Any] = {"on_race": "warn"} if "on_race" in fields else {}
    return interpret_params.InterpretGPUParams(
        detect_races=detect_races,
        # How many copies at a time have clocks of their own.
        num_tma_threads_per_device=8,
        **options,
    )


@contextlib.contextmanager
def recorded_races() -> Iterator[list[str]]:
    """Collects reports of races: JAX up to 0.11 prints them, 0.12 logs them.

    The interpreter runs the blocks of a grid one after the other, so what is found are races within
    a block, between threads and asynchronous copies. Complete when the context ends.
    """
    races: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if _RACE in record.getMessage():
                races.append(record.getMessage())

    recorder = Recorder()
    logging.getLogger().addHandler(recorder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            yield races
    finally:
        logging.getLogger().removeHandler(recorder)
    races.extend(_RACE + report for report in printed.getvalue().split(_RACE)[1:])


def reset() -> None:
    """Clears the interpreter's global state, which a kernel that raised leaves behind."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


def _mend() -> None:
    """Lets several devices interpret one kernel, each at its own pace.

    All devices share one `GPUSharedMemory`. Whichever ends first asserts that no barrier is left,
    while others still use theirs; and from JAX 0.11 on, a device that ends a block resets the
    clocks of all, after which the race detector sees races that are none.
    """
    memory = shared_memory.GPUSharedMemory
    if getattr(memory, "_mended", False):
        return
    memory._mended = True
    check_barriers = memory.assert_no_barriers_allocated

    def check_once_all_are_done(self: Any) -> None:
        self.barrier.wait()
        check_barriers(self)

    memory.assert_no_barriers_allocated = check_once_all_are_done

    if hasattr(memory, "reset_per_cluster_state"):
        reset_clocks = memory.reset_per_cluster_state

        def reset_own_clocks(self: Any) -> None:
            is_new = "_has_clocks" not in vars(self)
            if is_new or self.num_devices == 1:
                reset_clocks(self)
            self._has_clocks = True

        memory.reset_per_cluster_state = reset_own_clocks
