"""Times a training step of xrex against plain sharded JAX, a larger vocabulary, and equal ids.

    python -m tools.bench_step [--devices=8] [--tokens_per_batch=65536] [--emb_width=64]

Plain JAX is what one would write without xrex: the same table in the same sharding, autodiff
through `table[ids]` under `jax.jit`, and dense Adagrad. All steps train the same small dense model
on the same Zipf-distributed tokens, but for one of xrex's whose tokens all have the same id. A
step's time is the median over `--repeats`, taken in turn so that a busy machine slows them alike.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xrex
from tools.common.command import Command, wrong_value
from tools.common.devices import MOST_DEVICES, check_memory, choose_devices
from tools.common.zipf import zipf_ids
from tools.layouts.layout_flags import LayoutFlags

# Ids are int32.
MOST_ROWS = 2**31 - 1
# What drawing ids takes per row: odds, their sum, and a permutation.
ODDS_BYTES = 32

COMMAND = Command("bench_step", __doc__)
_DEVICES = COMMAND.integer(
    "devices", 8, "Devices; simulated where there is no GPU.", at_least=1, at_most=MOST_DEVICES
)
_LAYOUT = LayoutFlags(COMMAND, "tokens_per_batch", "emb_width")
_VOCAB = COMMAND.integer("vocab", 1_000_000, "Rows of the table.", at_least=1, at_most=MOST_ROWS)
_FACTOR = COMMAND.integer(
    "factor", 4, "How many times larger the larger vocabulary is.", at_least=1, at_most=MOST_ROWS
)
_ZIPF = COMMAND.number("zipf", 1.2, "Exponent of the ids' distribution.", at_least=0, below=10)
_STALENESS = COMMAND.integer("staleness", 0, "Of xrex's step.", at_least=0, at_most=1)
_DTYPE = COMMAND.choice("dtype", "float32", ("float32", "bfloat16"), "Type of the table.")
_REPEATS = COMMAND.integer("repeats", 9, "Steps timed of each kind.", at_least=1, at_most=1_000_000)

Step = Callable[[], Any]


def loss(params: jax.Array, rows: jax.Array, targets: jax.Array) -> jax.Array:
    """A linear model's mean squared error: next to no dense work."""
    predictions = rows.astype(jnp.float32) @ params
    return jnp.mean((predictions - targets) ** 2)


class Settings(NamedTuple):
    """What is measured."""

    layout: xrex.Layout
    mesh: Mesh
    vocab: int
    larger_vocab: int


def settings() -> Settings:
    """The flags as settings.

    Raises:
      UserError: they make no layout that works, or one that does not fit.
    """
    larger = _VOCAB.value * _FACTOR.value
    if larger > MOST_ROWS:
        raise wrong_value(
            "factor",
            _FACTOR.value,
            f"{larger:,} rows are too many: wanted at most {MOST_ROWS:,} with "
            f"--vocab={_VOCAB.value}",
        )
    devices = choose_devices(_DEVICES.value)
    mesh = Mesh(np.array(devices), ("shard",))
    layout = _layout(mesh)
    # Plain JAX's table and accumulator, and three tables of xrex's.
    row = layout.emb_width * jnp.dtype(_DTYPE.value).itemsize
    check_memory(
        row * (4 * _VOCAB.value + larger) + ODDS_BYTES * larger,
        f"tables with --vocab={_VOCAB.value} --factor={_FACTOR.value} "
        f"--emb_width={layout.emb_width}",
    )
    check_memory(
        row * 4 * layout.tokens_per_batch,
        f"batches with --tokens_per_batch={layout.tokens_per_batch} --emb_width={layout.emb_width}",
    )
    return Settings(layout, mesh, _VOCAB.value, larger)


def _layout(mesh: Mesh) -> xrex.Layout:
    given = {"tokens_per_batch": 65_536, "emb_width": 64} | _LAYOUT.given()
    layout = xrex.Layout(
        mesh,
        mesh.axis_names,
        data_axis=mesh.axis_names,
        num_unique=max(1, given["tokens_per_batch"]),
        num_devices_per_node=mesh.size,
        **given,
    )
    _LAYOUT.check_works(layout)
    return layout


def xrex_step(asked: Settings, vocab: int, ids: np.ndarray) -> Step:
    """A step of the pipeline on one batch, over and over."""
    import optax  # Late: an extra.

    mesh, width, tokens = asked.mesh, asked.layout.emb_width, len(ids)
    handle = xrex.make_context_handle(asked.layout)
    pipeline = xrex.make_pipeline(
        handle,
        xrex.RowwiseAdagrad(learning_rate=0.01),
        loss,
        optax.sgd(0.01),
        vocab=vocab,
        staleness=_STALENESS.value,
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


def plain_step(asked: Settings, vocab: int, ids: np.ndarray) -> Step:
    """The same with autodiff through the table and dense Adagrad."""
    import optax  # Late: an extra.

    mesh, width = asked.mesh, asked.layout.emb_width
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
        table = jnp.zeros((vocab, width), _DTYPE.value)
        table = jax.lax.with_sharding_constraint(table, table_sharding)
        trained = (table, jnp.ones(width))
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


def main() -> None:
    """Prints the four times and the three ratios."""
    asked = settings()
    layout, small, large = asked.layout, asked.vocab, asked.larger_vocab
    ids, large_ids = (
        zipf_ids(np.random.default_rng(0), layout.tokens_per_batch, vocab, _ZIPF.value).astype(
            np.int32
        )
        for vocab in (small, large)
    )
    plain, ours = f"plain JAX, {small:,} rows", f"xrex, {small:,} rows"
    larger, equal = f"xrex, {large:,} rows", "xrex, all ids equal"
    print(
        f"{asked.mesh.size} x {asked.mesh.devices.flat[0].device_kind}, width {layout.emb_width} "
        f"{_DTYPE.value}, {layout.tokens_per_batch:,} tokens, {len(np.unique(ids)):,} and "
        f"{len(np.unique(large_ids)):,} distinct, staleness {_STALENESS.value}"
    )
    times = median_seconds(
        {
            plain: plain_step(asked, small, ids),
            ours: xrex_step(asked, small, ids),
            larger: xrex_step(asked, large, large_ids),
            equal: xrex_step(asked, small, np.zeros_like(ids)),
        },
        _REPEATS.value,
    )
    for name, seconds in times.items():
        print(f"{name:<28} {seconds * 1e3:9.1f} ms")
    print(f"xrex / plain JAX             {times[ours] / times[plain]:9.3f}")
    print(f"{_FACTOR.value} x the rows / once        {times[larger] / times[ours]:9.3f}")
    print(f"all ids equal / Zipf         {times[equal] / times[ours]:9.3f}")


if __name__ == "__main__":
    COMMAND.run(main)
