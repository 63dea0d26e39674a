"""One trial: a table and a few batches, through the runtime and through the oracle.

The runtime is called with whatever handle it is given: nothing here knows what a legal layout is.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

import xrex
from tests import oracle
from tests.assertions import assert_same_bits_on_every_device, assert_ulps
from tests.quick_compiles import OPTIMIZED, QUICK
from xrex import placement
from xrex.layout.layout import Layout


class Trial(NamedTuple):
    """What is trained: host arrays."""

    table: np.ndarray  # (vocab, emb_width) bfloat16 or float32
    batches: tuple[tuple[np.ndarray, np.ndarray], ...]  # ids (tokens,), grads (tokens, emb_width)


class Step(NamedTuple):
    """What one batch leads to; of the runtime or of the oracle."""

    embeddings: Any  # (tokens, emb_width)
    table: Any  # (vocab, emb_width), after the update
    state: Any  # of the update rule, after the update
    result: Any  # norm, valid, dropped


def unchecked_handle(layout: Layout) -> xrex.AsyncEmbContextHandle:
    """The handle of a layout, legal or not: without a single check."""
    return xrex.AsyncEmbContextHandle(**vars(layout))


def exact_gradients(rng: np.random.Generator, rows: np.ndarray, width: int) -> np.ndarray:
    """Gradients that no operation of two updates rounds, except correctly: (tokens, width) float32.

    Within a column all have one sign and none is zero, so that a token that is missed or counted
    twice always shows. The tokens of a row sum to the same power of two in every column: then the
    mean of squares is a power of four, and no product rounds, whether or not it is fused with the
    addition behind it. A token without a row (-1) gets an infinity, which must not reach anything.
    """
    grads = rng.integers(1, 5, (len(rows), width)).astype(np.float32)
    tokens_of = [np.flatnonzero(rows == row) for row in set(rows.tolist()) - {-1}]
    others = [grads[tokens[:-1]].sum(axis=0) for tokens in tokens_of]
    exponent = int(max((part.max() for part in others), default=0)).bit_length()
    for tokens, part in zip(tokens_of, others, strict=True):
        grads[tokens[-1]] = 2.0 ** (exponent + rng.integers(0, 2)) - part
    grads *= rng.choice([-1.0, 1.0], width).astype(np.float32)
    grads[rows == -1] = np.inf
    return grads


def training_step(
    handle: xrex.AsyncEmbContextHandle,
    rule: xrex.UpdateRule,
    ids: jax.Array,
    grads: jax.Array,
    table: jax.Array,
    state: Any,
) -> Step:
    """Looks a batch up and updates the table with its gradients."""
    embeddings = xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table))
    unique_tokens, segment_ids, _ = xrex.compress_token_ids(handle, ids, table.shape[0])
    update = xrex.GradientUpdate(unique_tokens, grads, segment_ids)
    table, state, pin = xrex.update_start(handle, rule, update, table, state)
    return Step(embeddings, table, state, xrex.update_done(handle, pin))


def jit_by_handle(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit(function, static_argnums=0)` that forgets handles which were not used lately.

    Programs are memory maps, of which Linux grants a process 65,530: some thousands of layouts
    that are all remembered end in a crash of the compiler.
    """

    @functools.lru_cache(maxsize=64)
    def jitted(handle: xrex.AsyncEmbContextHandle) -> Callable[..., Any]:
        return jax.jit(functools.partial(function, handle), **options)

    return lambda handle, *arguments: jitted(handle)(*arguments)


jitted_step = jit_by_handle(training_step, compiler_options=OPTIMIZED)
# For results that are the same however they are compiled.
quick_step = jit_by_handle(training_step, compiler_options=QUICK)


def run(
    handle: xrex.AsyncEmbContextHandle,
    rule: xrex.RowwiseAdagrad,
    trial: Trial,
    step: Any = jitted_step,
) -> list[Step]:
    """Trains on each batch in turn."""

    def put(array: Any, spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(handle.mesh, spec))

    table = put(trial.table, placement.table_spec(handle))
    state = jax.tree.map(lambda leaf: put(leaf, placement.REPLICATED), rule.init(table.shape[0]))
    steps = []
    for ids, grads in trial.batches:
        arrays = (
            put(ids, placement.token_spec(handle)),
            put(grads, placement.token_rows_spec(handle)),
        )
        steps.append(step(handle, rule, *arrays, table, state))
        table, state = steps[-1].table, steps[-1].state
    return steps


def expect(
    handle: xrex.AsyncEmbContextHandle, rule: xrex.RowwiseAdagrad, trial: Trial, steps: list[Step]
) -> list[Step]:
    """What the oracle makes of each batch, from the table and state that the runtime had then."""
    policy = oracle.IdPolicy(handle.out_of_range, handle.padding_id)
    vocab = trial.table.shape[0]
    adagrad = oracle.Adagrad(**vars(rule))
    table, state = trial.table, oracle.init(adagrad, vocab)
    expected = []
    for (ids, grads), actual in zip(trial.batches, steps, strict=True):
        embeddings = oracle.lookup(table, ids, policy)
        unique_tokens, segment_ids, _ = oracle.compress(ids, vocab, handle.num_unique, policy)
        outcome = oracle.update(adagrad, table, state, unique_tokens, grads, segment_ids)
        expected.append(Step(embeddings, *outcome))
        table = np.asarray(actual.table)
        state = oracle.State(*jax.tree.map(np.asarray, actual.state))
    return expected


def check_steps(actual: list[Step], expected: list[Step], *, exact: bool) -> None:
    """Raises AssertionError unless every device's copy of everything is right.

    Args:
      actual: of the runtime.
      expected: of the oracle.
      exact: whether bit for bit. Otherwise embeddings, untouched rows and counts still are, and
        copies equal each other bit for bit; the table is within one bfloat16 or two float32 units
        in the last place, and so are accumulator and norm of tables that are not wide.
    """
    for number, (step, right) in enumerate(zip(actual, expected, strict=True)):
        leaves = jax.tree.leaves_with_path(step._asdict())
        rights = jax.tree.leaves(Step(*right)._asdict())
        for (path, leaf), wanted in zip(leaves, rights, strict=True):
            what = f"step {number} {jax.tree_util.keystr(path)}"
            wanted = np.asarray(wanted, leaf.dtype) if np.ndim(wanted) == 0 else wanted
            copies = leaf.sharding.device_set
            assert len(leaf.addressable_shards) == len(copies), what
            may_round = "embeddings" not in what and leaf.dtype not in (np.int32, np.bool_)
            if exact or not may_round:
                assert_same_bits_on_every_device(leaf, wanted, what)
                continue
            assert_same_bits_on_every_device(leaf, np.asarray(leaf), f"{what}: copies differ")
            _assert_near(leaf, wanted, step.table, what)


def _assert_near(leaf: jax.Array, wanted: Any, table: jax.Array, what: str) -> None:
    """Within one unit in the last place of bfloat16, or two of float32.

    With a bfloat16 table, the accumulator and the norm come from sums rounded to bfloat16. With a
    float32 one, they add the squares of a row's columns in another order than the oracle does, and
    each of those additions rounds by half a unit at most, in either order: from 12 columns on,
    a quarter of that bound is more than two units.
    """
    if table.dtype == np.float32:
        columns = table.shape[1]
        ulps = 2 if leaf.ndim == 2 else max(2, columns // 4)
        assert_ulps(leaf, wanted, np.float32, ulps, what)
    else:
        actual = np.asarray(leaf).astype(table.dtype)
        assert_ulps(actual, np.asarray(wanted).astype(table.dtype), table.dtype, 1, what)


def assert_same_values(actual: Any, expected: Any) -> None:
    """Every device's copy of one pytree equals another, bit for bit, wherever that one lies."""
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, leaf), wanted in pairs:
        assert_same_bits_on_every_device(leaf, wanted, jax.tree_util.keystr(path))
