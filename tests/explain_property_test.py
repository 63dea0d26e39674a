"""Reports and the validator cannot disagree, and what a report suggests is accepted."""

from typing import Any

import pytest
from hypothesis import given
from jax.sharding import AbstractMesh

import xrex
from tests import strategies
from tests.judge import Accepted, Rejected, make_handle, validator_decision
from tests.suite_report import Tally
from xrex.layout.layout import Layout

pytestmark = pytest.mark.property


def explain(layout: Layout, **changes: Any) -> xrex.LayoutReport:
    arguments = vars(layout) | changes
    return xrex.explain_layout(**arguments)


@given(strategies.layouts_of_any_sizes())
def test_a_report_decides_as_the_validator_does(tally: Tally, layout: Layout) -> None:
    report, decision = explain(layout), validator_decision(layout)
    if isinstance(decision, Accepted):
        assert report.accepted
        assert report.broken == ()
        assert report.plan is not None
        assert report.plan.group_size == make_handle(layout).group_size
        tally("reports of accepted layouts")
        return
    assert isinstance(decision, Rejected)
    assert not report.accepted
    assert report.plan is None
    first = report.broken[0]
    assert (first.requirement, first.message) == (decision.requirement, decision.message)
    tally("reports of rejected layouts")


@given(strategies.layouts_of_any_sizes())
def test_every_suggested_change_is_accepted_and_none_is_idle(tally: Tally, layout: Layout) -> None:
    report = explain(layout)
    for broken in report.broken:
        assert broken.changes, broken
        for change in broken.changes:
            arguments = dict(change.arguments)
            if "mesh" in arguments:
                names, sizes = zip(*arguments["mesh"], strict=True)
                arguments["mesh"] = AbstractMesh(sizes, names)
            changed = vars(layout) | arguments
            xrex.make_context_handle(changed.pop("mesh"), changed.pop("table_axis"), **changed)
            assert explain(layout, **arguments).accepted
            tally("suggested changes, accepted")
            for name in arguments:
                without = {k: v for k, v in arguments.items() if k != name}
                # One fewer would not do: nothing is changed for nothing.
                assert not without or not explain(layout, **without).accepted, (change, name)


@given(strategies.layouts())
def test_a_broken_rule_stays_broken_whatever_else_is(layout: Layout) -> None:
    """What is wrong with a layout is not hidden by what else is."""
    names = {broken.requirement for broken in explain(layout).broken}
    worse = explain(layout, num_unique=0)
    assert {broken.requirement for broken in worse.broken} == names | {"positive_sizes"}
