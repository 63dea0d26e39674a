"""What must hold of one accepted layout, whichever it is, and a report on it in words."""

from collections.abc import Callable
from typing import Any

import jax
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

import xrex
from tests import judge, oracle, strategies, trial
from tests.assertions import assert_same_bits_on_every_device
from xrex.layout import Layout

Draw = Callable[..., Any]

EXACT_RULES = (
    xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30),
    xrex.RowwiseAdagrad(learning_rate=0.25, eps=1e-30, lazy=True),
)
DECAYING_RULES = (
    xrex.RowwiseAdagrad(learning_rate=0.0625, half_life_steps=3.0, weight_decay=0.125),
    xrex.RowwiseAdagrad(learning_rate=0.0625, half_life_steps=3.0, weight_decay=0.125, lazy=True),
)

look_up = jax.jit(
    lambda handle, ids, table: xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table)),
    static_argnums=0,
)


def check_lookup(draw: Draw, layout: Layout) -> None:
    """A lookup is the table's rows bit for bit, on every device."""
    policy = draw(st.sampled_from(strategies.POLICIES))
    ids = draw(strategies.id_streams(layout.tokens_per_batch, layout.group_size))
    table = draw(strategies.tables_of_any_bits(layout.emb_width))
    note(judge.as_code(layout))
    rows = look_up(_handle(layout, policy), ids, table)
    assert_same_bits_on_every_device(rows, oracle.lookup(table, ids, policy), "embeddings")


def check_exact_updates(draw: Draw, layout: Layout, step: Any = trial.quick_step) -> None:
    """Two updates are the oracle's bit for bit, on every device, where no sum rounds."""
    policy = draw(st.sampled_from(strategies.POLICIES))
    rule = draw(st.sampled_from(EXACT_RULES))
    attempt = draw(strategies.exact_trials(layout, policy=policy))
    note(judge.as_code(layout))
    handle = _handle(layout, policy)
    steps = trial.run(handle, rule, attempt, step)
    trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=True)


def check_random_updates(draw: Draw, layout: Layout) -> None:
    """Two updates on random floats are the oracle's up to their last bits; copies are equal."""
    rule = draw(st.sampled_from(DECAYING_RULES))
    attempt = draw(strategies.random_trials(layout))
    note(judge.as_code(layout))
    handle = judge.make_handle(layout)
    steps = trial.run(handle, rule, attempt)
    trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=False)


def report(layout: Layout, examples: int) -> tuple[bool, str]:
    """Whether validator and runtime agree on a layout, and what they say, in words.

    Args:
      layout: of positive sizes.
      examples: how many random lookups, and how many pairs of updates, an accepted layout gets.
    """
    decision, verdict = judge.validator_decision(layout), judge.runtime_verdict(layout)
    lines = [f"The validator: {decision}.", f"The runtime, without the validator: {verdict}."]
    agree = judge.disagreement(layout) is None
    if isinstance(decision, judge.Accepted) and isinstance(verdict, judge.Works):
        trouble = _first_trouble(layout, examples)
        agree = trouble is None
        lines.append(
            f"{examples} random lookups and {examples} random pairs of updates: "
            + (trouble or "every device's copy equals the oracle bit for bit.")
        )
    elif agree and isinstance(verdict, judge.Works):
        lines.append("It would work, but is rejected on purpose: see judge.is_listed_exception.")
    lines.append("They agree." if agree else f"They DISAGREE, on\n{judge.as_code(layout)}")
    return agree, "\n".join(lines)


def _first_trouble(layout: Layout, examples: int) -> str | None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=list(Phase)[:3],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        check_lookup(data.draw, layout)
        check_exact_updates(data.draw, layout)

    try:
        check()
    except Exception as error:  # Whatever it is, it is told.
        return str(error)
    return None


def _handle(layout: Layout, policy: oracle.IdPolicy) -> xrex.AsyncEmbContextHandle:
    return judge.make_handle(layout, out_of_range=policy.out_of_range, padding_id=policy.padding_id)
