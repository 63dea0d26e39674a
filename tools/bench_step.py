"""Times a training step of xrex against plain sharded JAX, a larger vocabulary, and equal ids.

    python -m tools.bench_step

Plain JAX is what one would write without xrex: the same table in the same sharding, autodiff
through `table[ids]` under `jax.jit`, and dense Adagrad. All steps train the same small dense model
on the same Zipf-distributed tokens, but for one of xrex's whose tokens all have the same id. A
step's time is the median over `--repeats`, taken in turn so that a busy machine slows them alike.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xrex
from tools.common.devices import choose_mesh
from tools.recommender.synthetic import zipf_ids

_DEVICES = flags.DEFINE_integer("devices", 8, "Devices; simulated where there is no GPU.")
_VOCAB = flags.DEFINE_integer("vocab", 1_000_000, "Rows of the table.")
_FACTOR = flags.DEFINE_integer("factor", 4, "How many times larger the larger vocabulary is.")
_WIDTH = flags.DEFINE_integer("width", 64, "Width of a row.")
_TOKENS = flags.DEFINE_integer("tokens", 65_536, "Tokens in a batch.")
_ZIPF = flags.DEFINE_float("zipf", 1.2, "Exponent of the ids' distribution.")
_STALENESS = flags.DEFINE_enum("staleness", "0", ["0", "1"], "Of xrex's step.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the table.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Steps timed of each kind.", lower_bound=1)

Step = Callable[[], Any]


def loss(params: jax.Array, rows: jax.Array, targets: jax.Array) -> jax.Array:
    """A linear model's mean squared error: next to no dense work."""
    predictions = rows.astype(jnp.float32) @ params
    return jnp.mean((predictions - targets) ** 2)


def xrex_step(mesh: Mesh, vocab: int, ids: np.ndarray) -> Step:
    """A step of the pipeline on one batch, over and over."""
    width, tokens = _WIDTH.value, len(ids)
    handle = xrex.make_context_handle(
        mesh,
        mesh.axis_names,
        data_axis=mesh.axis_names,
        tokens_per_batch=tokens,
        emb_width=width,
        num_unique=tokens,
        num_devices_per_node=mesh.size,
    )
    pipeline = xrex.make_pipeline(
        handle,
        xrex.RowwiseAdagrad(learning_rate=0.01),
        loss,
        optax.sgd(0.01),
        vocab=vocab,
        staleness=int(_STALENESS.value),
    )
    table = jax.jit(
        lambda: jnp.zeros((vocab, width), _DTYPE.value),
        out_shardings=NamedSharding(mesh, P(None, mesh.axis_names)),
    )()
    batch = xrex.Batch(
        jax.device_put(ids, NamedSharding(mesh, P(mesh.axis_names))),
        jax.device_put(np.ones(tokens, np.float32), NamedSharding(mesh, P(mesh.axis_names))),
    )
    state = pipeline.start(pipeline.init(table, jnp.ones(width)), batch)

    def step() -> Any:
        nonlocal state
        state, metrics = pipeline.step(state, batch)
        return state.table, metrics

    return step


def plain_step(mesh: Mesh, vocab: int, ids: np.ndarray) -> Step:
    """The same with autodiff through the table and dense Adagrad."""
    table_sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    token_sharding = NamedSharding(mesh, P(mesh.axis_names))
    optimizer = optax.adagrad(0.01)

    @partial(jax.jit, donate_argnums=0)
    def train(state: Any, ids: jax.Array, targets: jax.Array) -> Any:
        (table, params), optimizer_state = state

        def total(trained: Any) -> jax.Array:
            table, params = trained
            rows = jax.lax.with_sharding_constraint(
                table[ids], NamedSharding(mesh, P(mesh.axis_names, None))
            )
            return loss(params, rows, targets)

        gradients = jax.grad(total)((table, params))
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        table, params = optax.apply_updates((table, params), updates)
        table = jax.lax.with_sharding_constraint(table, table_sharding)
        return (table, params), optimizer_state

    @jax.jit
    def init() -> Any:
        table = jnp.zeros((vocab, _WIDTH.value), _DTYPE.value)
        table = jax.lax.with_sharding_constraint(table, table_sharding)
        trained = (table, jnp.ones(_WIDTH.value))
        state = (trained, optimizer.init(trained))
        # The accumulator too: what has the table's shape gets its sharding.
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, table_sharding) if x.ndim == 2 else x,
            state,
        )

    state = init()
    ids = jax.device_put(ids, token_sharding)
    targets = jax.device_put(np.ones(len(ids), np.float32), token_sharding)

    def step() -> Any:
        nonlocal state
        state = train(state, ids, targets)
        return state

    return step


def median_seconds(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """The median time of each step, taken in turn after two that compile and warm up."""
    for step in steps.values():
        for _ in range(2):
            jax.block_until_ready(step())
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: list[str]) -> None:
    """Prints the four times and the three ratios."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    # At level INFO, which app.run sets, JAX tells which platforms it did not find.
    logging.set_verbosity(logging.WARNING)
    (count,) = choose_mesh(None, _DEVICES.value)
    mesh = Mesh(np.array(jax.devices()[:count]), ("shard",))
    small, large = _VOCAB.value, _VOCAB.value * _FACTOR.value
    ids, large_ids = (
        zipf_ids(np.random.default_rng(0), _TOKENS.value, vocab, _ZIPF.value).astype(np.int32)
        for vocab in (small, large)
    )
    plain, ours = f"plain JAX, {small:,} rows", f"xrex, {small:,} rows"
    larger, equal = f"xrex, {large:,} rows", "xrex, all ids equal"
    print(
        f"{count} x {mesh.devices.flat[0].device_kind}, width {_WIDTH.value} "
        f"{_DTYPE.value}, {_TOKENS.value:,} tokens, {len(np.unique(ids)):,} and "
        f"{len(np.unique(large_ids)):,} distinct, staleness {_STALENESS.value}"
    )
    times = median_seconds(
        {
            plain: plain_step(mesh, small, ids),
            ours: xrex_step(mesh, small, ids),
            larger: xrex_step(mesh, large, large_ids),
            equal: xrex_step(mesh, small, np.zeros_like(ids)),
        },
        _REPEATS.value,
    )
    for name, seconds in times.items():
        print(f"{name:<28} {seconds * 1e3:9.1f} ms")
    print(f"xrex / plain JAX             {times[ours] / times[plain]:9.3f}")
    print(f"{_FACTOR.value} x the rows / once        {times[larger] / times[ours]:9.3f}")
    print(f"all ids equal / Zipf         {times[equal] / times[ours]:9.3f}")


if __name__ == "__main__":
    app.run(main)
