"""Overhead of a call on a cached signature: `xrex.pmap` next to `jax.pmap`.

    python -m tools.bench_pmap
    python -m tools.bench_pmap --devices=8 --leaves=1,16

The mapped function adds one to small arrays, so that all of the time is overhead. The calls of the
two alternate in rounds, and the median round counts, so that both see the same machine. Two times
are taken: until the call returns (the host's own work) and until the result is there. The bound
for the ratio is 1.5.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from tools.common.command import Command
from tools.common.devices import MOST_DEVICES, choose_devices
from tools.common.flag_values import integer, several
from xrex.checked_pmap.pmap import pmap

COMMAND = Command("bench_pmap", __doc__)
_DEVICES = COMMAND.integer(
    "devices",
    None,
    "Devices. Default: all GPUs, or 8 simulated CPU devices.",
    at_least=1,
    at_most=MOST_DEVICES,
)
_LEAVES = COMMAND.flag(
    "leaves",
    (1, 16),
    "Numbers of arrays in the argument, one row each.",
    several(integer(at_least=1, at_most=10_000)),
)
_CALLS = COMMAND.integer("calls", 100, "Calls per round.", at_least=1, at_most=1_000_000)
_ROUNDS = COMMAND.integer("rounds", 20, "Rounds of each function.", at_least=1, at_most=1_000_000)

RATIO_BOUND = 1.5


@dataclass(frozen=True)
class BenchConfig:
    """What one row of the benchmark measures; all local devices if `devices` is None."""

    leaves: int = 1
    calls: int = 100
    rounds: int = 20
    devices: tuple[jax.Device, ...] | None = None


class Overhead(NamedTuple):
    """Microseconds per call, median over the rounds."""

    returned: float  # until the call returns
    ready: float  # until the result is there, as a share of a round of calls


def measure(config: BenchConfig) -> tuple[Overhead, Overhead]:
    """Returns the overheads of `xrex.pmap` and of `jax.pmap`."""
    devices = config.devices or tuple(jax.local_devices())
    size = len(devices)
    arrays = {f"x{i}": np.zeros((size, 8), np.float32) for i in range(config.leaves)}

    def add_one(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, tree)

    functions = [pmap(add_one, devices=devices), jax.pmap(add_one, devices=devices)]
    # The first call compiles and lays the arrays out over the devices.
    inputs = [jax.block_until_ready(function(arrays)) for function in functions]
    rounds: list[list[Overhead]] = [[], []]
    for _ in range(config.rounds):
        for function, tree, seen in zip(functions, inputs, rounds, strict=True):
            seen.append(_time_round(function, tree, config.calls))
    ours, theirs = (
        Overhead(*(statistics.median(column) for column in zip(*seen, strict=True)))
        for seen in rounds
    )
    return ours, theirs


def _time_round(function: Callable[[Any], Any], tree: Any, calls: int) -> Overhead:
    """Times one round of calls; between calls nothing is waited for, as in a training loop."""
    start = time.perf_counter()
    for _ in range(calls):
        result = function(tree)
    returned = time.perf_counter()
    jax.block_until_ready(result)
    ready = time.perf_counter()
    return Overhead(1e6 * (returned - start) / calls, 1e6 * (ready - start) / calls)


def format_row(config: BenchConfig, ours: Overhead, theirs: Overhead) -> str:
    """One row of the table that `main` prints."""
    return (
        f"{config.leaves:>6}"
        f"{ours.returned:>12.1f}{theirs.returned:>12.1f}{ours.returned / theirs.returned:>8.2f}"
        f"{ours.ready:>12.1f}{theirs.ready:>12.1f}{ours.ready / theirs.ready:>8.2f}"
    )


def settings() -> tuple[BenchConfig, ...]:
    """The flags as settings: one for each row.

    Raises:
      UserError: there are not so many devices.
    """
    devices = tuple(choose_devices(_DEVICES.value))
    return tuple(
        BenchConfig(leaves, _CALLS.value, _ROUNDS.value, devices) for leaves in _LEAVES.value
    )


def main() -> None:
    """Prints one row for each number of leaves."""
    configs = settings()
    print(
        f"jax {jax.__version__}, {len(configs[0].devices or ())} {jax.default_backend()} devices, "
        f"microseconds per call; the bound for the ratio is {RATIO_BOUND}"
    )
    print(f"{'':>6}{'until the call returns':^32}{'until the result is there':^32}")
    print(f"{'leaves':>6}" + f"{'xrex.pmap':>12}{'jax.pmap':>12}{'ratio':>8}" * 2)
    for config in configs:
        print(format_row(config, *measure(config)), flush=True)


if __name__ == "__main__":
    COMMAND.run(main)
