"""The validator and the runtime agree: a layout is accepted exactly when it trains correctly."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xrex
from tests import judge, one_layout, strategies
from tests.agreement import compare
from tests.expected_rejection import expected_rejection
from tests.judge import Rejected, Works, runtime_verdict, validator_decision
from tests.suite_report import Tally, examples
from xrex.layout import requirements
from xrex.layout.layout import Layout

pytestmark = pytest.mark.property


# One test a kind, so that several processes share the work.
@pytest.mark.parametrize("kind", strategies.KINDS)
def test_accepted_exactly_when_it_works(kind: str, tally: Tally) -> None:
    compare(kind, tally)


@given(strategies.layouts_of_the_exception())
@settings(max_examples=examples(0.1))
def test_the_one_exception_is_rejected_by_name_and_would_work(tally: Tally, layout: Layout) -> None:
    decision = validator_decision(layout)
    assert judge.is_listed_exception(layout)
    assert isinstance(decision, Rejected)
    assert decision.requirement == "tokens_vary"
    assert runtime_verdict(layout) == Works()
    tally("examples of the exception")


@given(strategies.layouts_of_any_sizes())
def test_a_rejection_names_the_first_broken_rule(tally: Tally, layout: Layout) -> None:
    one_layout.check_first_broken_rule(None, layout)
    tally("examples of rejections" if expected_rejection(layout) else "examples of acceptance")


@given(strategies.layouts_of_any_sizes())
def test_an_abstract_mesh_gives_the_same_decision(tally: Tally, layout: Layout) -> None:
    one_layout.check_abstract_mesh(None, layout)
    tally("examples of abstract meshes")


@given(strategies.layouts())
def test_single_shard_per_rank_agrees_with_the_rule(tally: Tally, layout: Layout) -> None:
    one_layout.check_single_shard_per_rank(None, layout)
    tally("examples of single_shard_per_rank")


@given(st.data())
@settings(max_examples=examples(0.1))
def test_a_bare_string_is_one_axis(data: st.DataObject) -> None:
    mesh = data.draw(strategies.meshes())
    axis = data.draw(st.sampled_from(mesh.axis_names))
    sizes = {"tokens_per_batch": 8 * mesh.shape[axis], "emb_width": 8 * mesh.shape[axis]}
    sizes |= {"num_unique": 4, "num_devices_per_node": 8}
    bare = xrex.make_context_handle(mesh, axis, data_axis=axis, **sizes)
    assert bare == xrex.make_context_handle(mesh, (axis,), data_axis=(axis,), **sizes)


def scope_of_a_failure() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(judge.IMPORTS, scope)
    return scope


@given(strategies.layouts_of_any_sizes(), st.booleans())
@settings(max_examples=examples(0.1))
def test_the_line_of_code_makes_the_layout_again(layout: Layout, abstract: bool) -> None:
    layout = judge.abstract(layout) if abstract else layout
    assert eval(judge.as_code(layout), scope_of_a_failure()) == layout


def test_a_failure_prints_the_smallest_layout_as_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the rule on widths gone, that is two devices, one token each, and three columns."""
    kept = tuple(rule for rule in requirements.REQUIREMENTS if rule.name != "even_width")
    monkeypatch.setattr(requirements, "REQUIREMENTS", kept)
    with pytest.raises(AssertionError) as error:
        compare("odd width", lambda _: None, derandomize=True, database=None)
    printed = "\n".join([str(error.value), *error.value.__notes__])
    line = re.findall(r"^Layout\(.*$", printed, re.MULTILINE)[-1]
    smallest = eval(line, scope_of_a_failure())
    assert smallest.mesh.shape == {"a": 2}
    assert (smallest.tokens_per_batch, smallest.emb_width) == (2, 3)
