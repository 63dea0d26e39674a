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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import xrex
from tools.common.command import DONE, NO, Command, UserError
from tools.common.devices import quiet_without_gpu
from tools.common.paths import output_file
from tools.gpu.measurements import SMALL, Sizes, measure_width, table_batched

COMMAND = Command("gpu_check", __doc__)
_OUT = COMMAND.words("out", "out/gpu_check.json", "the name of a file", "The JSON file to write.")
_TESTS = COMMAND.words("tests", "not run", "a few words", "How the tests went, for the file.")
_SECONDS = COMMAND.number("seconds", 240.0, "Start no measurement after so long.", at_least=0)
_SMALL = COMMAND.switch("small", False, "Small sizes, and the reference on a CPU.")

WIDTHS = (8, 16, 32, 64, 128)


def training_step(sizes: Sizes, implementation: str) -> dict[str, Any]:
    """Milliseconds of a whole step on one GPU, and whether a second run has the same bits."""
    import optax  # Late: an extra.

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
