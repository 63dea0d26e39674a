"""Measures the kernels on one GPU, next to what bounds them."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api

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


class Case(NamedTuple):
    """The arrays of one shard width and one distribution of ids, bfloat16."""

    width: int
    distribution: str
    sizes: Sizes
    ids: jax.Array  # (ids,)
    unique: jax.Array  # (distinct,)
    segments: jax.Array  # (ids,), positions in `unique`
    sums: jax.Array  # (distinct, width), float32
    steps: jax.Array  # (distinct,), float32

    def rows(self) -> jax.Array:
        """Rows of the batch, (ids, width)."""
        return jnp.zeros((self.sizes.ids, self.width), jnp.bfloat16)

    def table(self) -> jax.Array:
        """A table, (vocab, width)."""
        return jnp.zeros((self.sizes.vocab, self.width), jnp.bfloat16)


def make_case(width: int, distribution: str, sizes: Sizes) -> Case:
    """The arrays to measure on."""
    ids = ids_of(distribution, sizes)
    distinct, segments = np.unique(ids, return_inverse=True)
    return Case(
        width=width,
        distribution=distribution,
        sizes=sizes,
        ids=jnp.asarray(ids),
        unique=jnp.asarray(distinct.astype(np.int32)),
        segments=jnp.asarray(segments.astype(np.int32).reshape(-1)),
        sums=jnp.ones((len(distinct), width), jnp.float32),
        steps=jnp.full((len(distinct),), 0.5, jnp.float32),
    )


def measure_width(
    width: int, distribution: str, sizes: Sizes, kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Gather, segment sum and row update at one shard width, bfloat16."""
    case = make_case(width, distribution, sizes)
    for kernel, measure in (
        ("gather_rows", measure_gather),
        ("segment_sum (with its sort)", measure_segment_sum),
        ("update_rows", measure_update),
    ):
        moved, times = measure(case, kernels)
        copied = copy_milliseconds(moved, sizes)
        gbps = {name: moved / ms / 1e6 for name, ms in times.items()}
        yield {
            "kernel": kernel,
            "width": width,
            "ids": distribution,
            "distinct": len(case.unique),
            "bytes": moved,
            "ms": {**times, "copy": copied},
            "GB/s": {**gbps, "copy": moved / copied / 1e6},
            "share of copy": {name: copied / ms for name, ms in times.items()},
        }


def measure_gather(case: Case, kernels: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Bytes moved, and milliseconds of each implementation."""

    def body(name: str) -> Callable[..., jax.Array]:
        return lambda _, fixed: api.gather_rows(*fixed, implementation=IMPLEMENTATIONS[name])

    fixed = (case.table(), case.ids)
    times = {name: milliseconds(body(name), case.rows(), fixed, case.sizes) for name in kernels}
    return case.sizes.ids * (4 + 2 * _row_bytes(case)), times


def measure_segment_sum(case: Case, kernels: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Bytes moved, and milliseconds of each implementation."""
    count = len(case.unique)

    def kernel(_: Any, fixed: Any) -> Any:
        rows, segments = fixed
        return api.segment_sum(
            rows, segments, count, dtype=jnp.bfloat16, implementation="mosaic_gpu"
        )

    def scatter_add(carry: Any, fixed: Any) -> Any:
        rows, segments = fixed
        zeros = jnp.zeros((count, case.width), jnp.float32)
        return zeros.at[segments].add(rows.astype(jnp.float32)), carry[1]

    bodies = {"mosaic_gpu": kernel, "xla": scatter_add}
    fixed = (case.rows(), case.segments)

    def carry() -> tuple[jax.Array, jax.Array]:
        return jnp.copy(case.sums), jnp.copy(case.steps)

    times = {name: milliseconds(bodies[name], carry(), fixed, case.sizes) for name in kernels}
    return case.sizes.ids * (_row_bytes(case) + 8) + count * 4 * case.width, times


def measure_update(case: Case, kernels: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Bytes moved, and milliseconds of each implementation."""

    def descend(rows: Any, operands: Any, scalars: Any) -> tuple[jax.Array]:
        return (rows[0] - scalars[0] * operands[0],)

    def body(name: str) -> Callable[..., jax.Array]:
        def update(table: jax.Array, fixed: Any) -> jax.Array:
            unique, sums, steps = fixed
            (table,) = api.update_rows(
                (table,), unique, (sums,), (steps,), descend, implementation=IMPLEMENTATIONS[name]
            )
            return table

        return update

    fixed = (case.unique, case.sums, case.steps)
    times = {name: milliseconds(body(name), case.table(), fixed, case.sizes) for name in kernels}
    return len(case.unique) * (8 + 4 * case.width + 2 * _row_bytes(case)), times


def _row_bytes(case: Case) -> int:
    return 2 * case.width


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
