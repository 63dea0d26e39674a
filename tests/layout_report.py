"""Runs the property suite on one layout and reports in words."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from tests import judge, one_layout
from xrex.layout.layout import Layout

Check = Callable[[Callable[..., Any], Layout], None]

# What is checked once, and what on random batches.
OF_ANY_LAYOUT: dict[str, Check] = {
    "accepted exactly when it trains correctly": one_layout.check_agreement,
    "a rejection names the first broken requirement": one_layout.check_first_broken_rule,
    "single_shard_per_rank agrees": one_layout.check_single_shard_per_rank,
    "a mesh without devices decides the same": one_layout.check_abstract_mesh,
}
OF_ACCEPTED_LAYOUTS: dict[str, Check] = {
    "equal contents make equal handles": one_layout.check_handle,
    "lookups are the table's rows, bit for bit": one_layout.check_lookup,
    "exact updates are the oracle's, bit for bit": one_layout.check_exact_updates,
    "random updates are the oracle's, within an ulp": one_layout.check_random_updates,
    **{
        f"unchanged by {change.__name__}": partial(one_layout.check_invariance, changes=(change,))
        for change in one_layout.CHANGES
    },
}


def report(layout: Layout, examples: int) -> tuple[bool, str]:
    """Whether every property holds of a layout, and what was seen, in words.

    Args:
      layout: of positive sizes.
      examples: how many random batches each property of an accepted layout is tried on.
    """
    decision, verdict = judge.validator_decision(layout), judge.runtime_verdict(layout)
    lines = [f"The validator: {decision}.", f"The runtime, without the validator: {verdict}."]
    agree = judge.disagreement(layout) is None
    if agree and isinstance(decision, judge.Rejected) and isinstance(verdict, judge.Works):
        lines.append("It would work, but is rejected on purpose: see judge.is_listed_exception.")
    checks = [(name, check, 1) for name, check in OF_ANY_LAYOUT.items()]
    if isinstance(decision, judge.Accepted):
        checks += [(name, check, examples) for name, check in OF_ACCEPTED_LAYOUTS.items()]
    troubles = 0
    for name, check, count in checks:
        trouble = _first_trouble(check, layout, count)
        troubles += trouble is not None
        times = f" ({count} random examples)" if count > 1 else ""
        lines.append(f"  {'ok' if trouble is None else 'NO'}: {name}{times}")
        lines += [] if trouble is None else [trouble]
    if troubles:
        lines += ["They DISAGREE, on", judge.IMPORTS, judge.as_code(layout)]
    else:
        lines.append("They agree.")
    return troubles == 0, "\n".join(lines)


def _first_trouble(check: Check, layout: Layout, examples: int) -> str | None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        check(data.draw, layout)

    try:
        run()
    except HypothesisException:
        raise  # A limit of the search: it says nothing of the layout.
    except Exception as error:  # Whatever else it is, it is told.
        return f"{type(error).__name__}: {error}"
    return None
