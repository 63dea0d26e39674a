"""Compares validator and runtime on random layouts."""

from typing import Any

from hypothesis import given, seed, settings

from tests import one_layout, strategies, suite_report
from tests.judge import Rejected, Works, runtime_verdict, validator_decision
from tests.suite_report import Tally
from xrex.layout.layout import Layout

# Legal layouts take the most trouble to get right, and those that owe nothing to the rules are the
# only ones that could show a rule that is missing.
SHARES = {kind: {"legal": 3, "any": 3}.get(kind, 1) for kind in strategies.KINDS}


def compare(kind: str, tally: Tally, profile: str | None = None, **changed: Any) -> None:
    """Compares validator and runtime on as many layouts of a kind as a profile has.

    Args:
      kind: one of `strategies.KINDS`.
      tally: counts what they say.
      profile: that of the session by default.
      changed: other settings for Hypothesis.
    """
    most = suite_report.layouts(SHARES[kind] / sum(SHARES.values()), profile)

    @settings(max_examples=most, **changed)
    @given(layout=strategies.layouts(kind))
    def check(layout: Layout) -> None:
        one_layout.check_agreement(None, layout)
        decision, verdict = validator_decision(layout), runtime_verdict(layout)
        said = (
            f"rejected by {decision.requirement}" if isinstance(decision, Rejected) else "accepted"
        )
        did = "works" if isinstance(verdict, Works) else verdict.kind
        if isinstance(decision, Rejected) and isinstance(verdict, Works):
            did = "would work: the listed exception"
        tally(f"layouts {said}, {did}")

    if changed.get("derandomize", settings().derandomize):
        # The same in every run; without a seed, each kind would also get the meshes of the others.
        check = seed(strategies.KINDS.index(kind))(check)
    check()
