"""Measures kernels and a training step on one GPU; `tools/gpu_check.sh` runs it after the tests.

    python -m tools.gpu_check [--out=gpu_check.json] [--small]

Every speed stands next to two bounds, measured in the same run on the same bytes: a pass over
memory that reads and writes as much (`copy`), and XLA's own gather and scatter (`xla`; its
scatter-add is unordered, so its sums differ from run to run). Times are of programs that repeat the
kernel on the GPU, so that no launch from the host is in them: the best of several. `--small`
shrinks all sizes and leaves the kernels out, to see on a CPU that the program works.

Exit status: 0 all checks passed, whatever the speeds; 1 one failed; 2 there is no GPU.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import xrex
from pallas_kernels import api
from tools.common.command import DONE, NO, Command, UserError
from tools.common.devices import quiet_without_gpu
from tools.common.paths import output_file

COMMAND = Command("gpu_check", __doc__)
_OUT = COMMAND.words("out", "out/gpu_check.json", "the name of a file", "The JSON file to write.")
_TESTS = COMMAND.words("tests", "not run", "a few words", "How the tests went, for the file.")
_SECONDS = COMMAND.number("seconds", 240.0, "Start no measurement after so long.", at_least=0)
_SMALL = COMMAND.switch("small", False, "Small sizes, and the reference on a CPU.")

WIDTHS = (8, 16, 32, 64, 128)
ZIPF = 1.2
# One H100 looks 1,048,570 rows up in 10 tables of 1.68M x 128 float32 in 0.345 ms with FBGEMM.
PUBLISHED_MS = 0.345


# What is measured, and which implementation it is. XLA's gather and scatter are the reference's.
IMPLEMENTATIONS: dict[str, api.Implementation] = {"mosaic_gpu": "mosaic_gpu", "xla": "reference"}


class Sizes(NamedTuple):
    """Of the measurements."""

    vocab: int = 10_000_000
    ids: int = 1_048_576
    table_batched_vocab: int = 16_800_000
    repeats: int = 20
    tries: int = 3
    step_tokens: int = 65_536
    step_vocab: int = 10_000_000


SMALL = Sizes(1000, 512, 1000, 2, 1, 64, 1000)


def milliseconds(body: Callable[..., Any], carry: Any, fixed: Any, sizes: Sizes) -> float:
    """Time of one `body(carry, fixed) -> carry`, run back to back on the device."""

    def repeat(carry: Any, fixed: Any) -> Any:
        # The barrier keeps XLA from moving out of the loop what does not change in it.
        def once(_: jax.Array, carry: Any) -> Any:
            return jax.lax.optimization_barrier(body(*jax.lax.optimization_barrier((carry, fixed))))

        return jax.lax.fori_loop(0, sizes.repeats, once, carry)

    program = jax.jit(repeat, donate_argnums=0)
    carry = jax.block_until_ready(program(carry, fixed))
    best = float("inf")
    for _ in range(sizes.tries):
        started = time.perf_counter()
        carry = jax.block_until_ready(program(carry, fixed))
        best = min(best, time.perf_counter() - started)
    return 1e3 * best / sizes.repeats


def ids_of(distribution: str, sizes: Sizes) -> np.ndarray:
    """Ids of a batch: uniform, or Zipf-distributed and scattered over the table."""
    rng = np.random.default_rng(0)
    if distribution == "uniform":
        return rng.integers(0, sizes.vocab, sizes.ids).astype(np.int32)
    ranks = rng.zipf(ZIPF, sizes.ids) % sizes.vocab
    return (ranks * 2_654_435_761 % sizes.vocab).astype(np.int32)


def measure_width(
    width: int, distribution: str, sizes: Sizes, kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Gather, segment sum and row update at one shard width, bfloat16."""
    ids_host = ids_of(distribution, sizes)
    distinct, segments_host = np.unique(ids_host, return_inverse=True)
    ids = jnp.asarray(ids_host)
    unique = jnp.asarray(distinct.astype(np.int32))
    segments = jnp.asarray(segments_host.astype(np.int32).reshape(-1))
    u, row = len(distinct), 2 * width
    rows = jnp.zeros((sizes.ids, width), jnp.bfloat16)
    sums = jnp.ones((u, width), jnp.float32)
    steps = jnp.full((u,), 0.5, jnp.float32)

    def entry(kernel: str, moved: int, times: dict[str, float], copied: float) -> dict[str, Any]:
        gbps = {name: moved / ms / 1e6 for name, ms in times.items()}
        return {
            "kernel": kernel,
            "width": width,
            "ids": distribution,
            "distinct": u,
            "bytes": moved,
            "ms": {**times, "copy": copied},
            "GB/s": {**gbps, "copy": moved / copied / 1e6},
            "share of copy": {name: copied / ms for name, ms in times.items()},
        }

    def table() -> jax.Array:
        return jnp.zeros((sizes.vocab, width), jnp.bfloat16)

    def times(body: Callable[[Any], Any], carry: Callable[[], Any], fixed: Any) -> dict[str, float]:
        return {name: milliseconds(body(name), carry(), fixed, sizes) for name in kernels}

    moved = sizes.ids * (4 + 2 * row)
    taken = times(
        lambda name: lambda _, fixed: api.gather_rows(*fixed, implementation=IMPLEMENTATIONS[name]),
        lambda: jnp.copy(rows),
        (table(), ids),
    )
    yield entry("gather_rows", moved, taken, copy_milliseconds(moved, sizes))

    def sum_body(name: str) -> Callable[..., Any]:
        def body(_: Any, fixed: Any) -> Any:
            rows, segments = fixed
            if name == "xla":
                return jnp.zeros_like(sums).at[segments].add(rows.astype(jnp.float32)), steps
            return api.segment_sum(
                rows, segments, u, dtype=jnp.bfloat16, implementation="mosaic_gpu"
            )

        return body

    moved = sizes.ids * (row + 8) + u * 4 * width
    taken = times(sum_body, lambda: (jnp.copy(sums), jnp.copy(steps)), (rows, segments))
    yield entry("segment_sum (with its sort)", moved, taken, copy_milliseconds(moved, sizes))

    def descend(rows: Any, operands: Any, scalars: Any) -> tuple[jax.Array]:
        return (rows[0] - scalars[0] * operands[0],)

    def update_body(name: str) -> Callable[..., Any]:
        def body(table: jax.Array, fixed: Any) -> jax.Array:
            unique, sums, steps = fixed
            (table,) = api.update_rows(
                (table,), unique, (sums,), (steps,), descend, implementation=IMPLEMENTATIONS[name]
            )
            return table

        return body

    moved = u * (8 + 4 * width + 2 * row)
    taken = times(update_body, table, (unique, sums, steps))
    yield entry("update_rows", moved, taken, copy_milliseconds(moved, sizes))


def copy_milliseconds(moved: int, sizes: Sizes) -> float:
    """A pass that reads and writes `moved` bytes in all."""
    return milliseconds(lambda x, _: -x, jnp.ones((max(1, moved // 8),), jnp.float32), (), sizes)


def table_batched(sizes: Sizes, kernels: Sequence[str]) -> dict[str, Any]:
    """Ten tables as one: 1,048,570 rows of 128 float32."""
    n = sizes.ids // 10 * 10
    ids = jnp.asarray(
        np.random.default_rng(0).integers(0, sizes.table_batched_vocab, n).astype(np.int32)
    )
    table = jnp.zeros((sizes.table_batched_vocab, 128), jnp.float32)
    times = {
        name: milliseconds(
            lambda _, fixed, name=name: api.gather_rows(
                *fixed, implementation=IMPLEMENTATIONS[name]
            ),
            jnp.zeros((n, 128), jnp.float32),
            (table, ids),
            sizes,
        )
        for name in kernels
    }
    return {"rows": n, "ms": times, "published ms, H100, FBGEMM": PUBLISHED_MS}


def training_step(sizes: Sizes, implementation: str) -> dict[str, Any]:
    """Milliseconds of a whole step on one GPU, and whether a second run has the same bits."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    rng = np.random.default_rng(0)
    width, steps = 128, 10
    batches = [
        xrex.Batch(rng.integers(0, sizes.step_vocab, sizes.step_tokens).astype(np.int32), ())
        for _ in range(steps + 2)
    ]

    def loss_fn(params: Any, rows: jax.Array, inputs: Any) -> jax.Array:
        del inputs
        return jnp.mean(jnp.square(jax.nn.relu(rows @ params).astype(jnp.float32)))

    def train() -> tuple[float, np.ndarray]:
        handle = xrex.make_context_handle(
            mesh,
            "x",
            data_axis="x",
            tokens_per_batch=sizes.step_tokens,
            emb_width=width,
            num_unique=sizes.step_tokens,
            num_devices_per_node=1,
            implementation=implementation,
        )
        pipeline = xrex.make_pipeline(
            handle,
            xrex.RowwiseAdagrad(learning_rate=0.1),
            loss_fn,
            optax.sgd(0.1),
            vocab=sizes.step_vocab,
            staleness=1,
        )
        table = jax.random.normal(jax.random.key(0), (sizes.step_vocab, width), jnp.bfloat16)
        state = pipeline.init(table, jnp.eye(width, dtype=jnp.bfloat16))
        state, _ = pipeline.step(pipeline.start(state, batches[0]), batches[1])
        jax.block_until_ready(state)
        started = time.perf_counter()
        for batch in batches[2:]:
            state, _ = pipeline.step(state, batch)
        jax.block_until_ready(state)
        ms = 1e3 * (time.perf_counter() - started) / steps
        state, _ = pipeline.finish(state)
        return ms, np.asarray(jax.lax.bitcast_convert_type(state.table[:4096], jnp.uint16))

    ms, bits = train()
    return {
        "tokens": sizes.step_tokens,
        "emb_width": width,
        "implementation": implementation,
        "ms": ms,
        "same bits in two runs": bool(np.array_equal(bits, train()[1])),
    }


class Settings(NamedTuple):
    """What the command line asks for."""

    out: Path
    sizes: Sizes
    kernels: tuple[str, ...]


def settings() -> Settings:
    """The flags as settings.

    Raises:
      UserError: the file cannot be written, or there is no GPU and sizes are not small.
    """
    quiet_without_gpu()
    if _SMALL.value:
        return Settings(output_file("out", _OUT.value), SMALL, ("xla",))
    if jax.default_backend() != "gpu":
        raise UserError(
            f"there is no GPU, but platform {jax.default_backend()}: --small tries the program "
            "on a CPU"
        )
    return Settings(output_file("out", _OUT.value), Sizes(), ("mosaic_gpu", "xla"))


def main() -> int:
    """Writes the JSON file after each part, so that a run cut short leaves what it had."""
    started = time.perf_counter()
    out, sizes, kernels = settings()
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "tests": _TESTS.value,
    }

    def save() -> None:
        report["seconds"] = time.perf_counter() - started
        out.write_text(json.dumps(report, indent=1) + "\n")

    report["training step"] = training_step(sizes, "auto")
    save()
    report["table batched"] = table_batched(sizes, kernels)
    save()
    report["kernels"] = []
    for width in WIDTHS:
        for distribution in ("uniform", "zipf"):
            if time.perf_counter() - started > _SECONDS.value:
                report.setdefault("left out for lack of time", []).append([width, distribution])
                continue
            report["kernels"].extend(measure_width(width, distribution, sizes, kernels))
            save()
    save()
    print(json.dumps(report, indent=1))
    is_right = _TESTS.value in ("passed", "not run")
    return DONE if is_right and report["training step"]["same bits in two runs"] else NO


if __name__ == "__main__":
    COMMAND.run(main)
