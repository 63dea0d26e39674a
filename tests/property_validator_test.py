"""The validator and the runtime agree: a layout is accepted exactly when it trains correctly."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import xrex
from tests import strategies, suite_report
from tests.expected_rejection import check_rejection, expected_rejection
from tests.judge import (
    Accepted,
    Rejected,
    Works,
    abstract,
    as_code,
    disagreement,
    is_listed_exception,
    make_handle,
    runtime_verdict,
    validator_decision,
)
from tests.suite_report import examples
from xrex.layout import Layout

pytestmark = pytest.mark.property

Tally = Callable[[str], None]


def share_of(num_devices: int) -> float:
    """The share of examples for meshes of a size: as many as it has shapes."""
    shapes = [len(strategies.factorisations(n)) for n in range(1, strategies.MAX_DEVICES + 1)]
    return shapes[num_devices - 1] / sum(shapes)


# One test a size, so that several processes share the work.
@pytest.mark.parametrize("num_devices", range(1, strategies.MAX_DEVICES + 1))
def test_accepted_exactly_when_it_works(num_devices: int, tally: Tally) -> None:
    @settings(max_examples=suite_report.layouts(share_of(num_devices)))
    @given(strategies.layouts(num_devices))
    def check(layout: Layout) -> None:
        note(as_code(layout))
        assert disagreement(layout) is None, disagreement(layout)
        decision, verdict = validator_decision(layout), runtime_verdict(layout)
        said = f"rejected by {decision.rule}" if isinstance(decision, Rejected) else "accepted"
        did = "works" if isinstance(verdict, Works) else "fails"
        if isinstance(decision, Rejected) and isinstance(verdict, Works):
            did = "would work: the listed exception"
        tally(f"layouts {said}, {did}")

    check()


@given(strategies.layouts_of_the_exception())
@settings(max_examples=examples(0.1))
def test_the_one_exception_is_rejected_by_name_and_would_work(tally: Tally, layout: Layout) -> None:
    decision = validator_decision(layout)
    assert is_listed_exception(layout)
    assert isinstance(decision, Rejected)
    assert decision.rule == "tokens_vary"
    assert runtime_verdict(layout) == Works()
    tally("examples of the exception")


@given(strategies.layouts_of_any_sizes())
def test_a_rejection_names_the_first_broken_rule(tally: Tally, layout: Layout) -> None:
    check_rejection(layout, make_handle)
    tally("examples of rejections" if expected_rejection(layout) else "examples of acceptance")


@given(strategies.layouts_of_any_sizes())
def test_an_abstract_mesh_gives_the_same_decision(tally: Tally, layout: Layout) -> None:
    tally("examples of abstract meshes")
    planned, real = validator_decision(abstract(layout)), validator_decision(layout)
    if isinstance(real, Accepted):
        assert planned == real
        return
    assert isinstance(planned, Rejected)
    assert planned.rule == real.rule
    assert planned.message.replace(str(abstract(layout).mesh), str(layout.mesh)) == real.message


@given(strategies.layouts())
def test_single_shard_per_rank_agrees_with_the_rule(tally: Tally, layout: Layout) -> None:
    tally("examples of single_shard_per_rank")
    arguments: Any = (layout.mesh, layout.table_axis, layout.data_axis)
    if not set(layout.table_axis + layout.data_axis) <= set(layout.mesh.axis_names):
        for function in (xrex.single_shard_per_rank, xrex.check_single_shard_per_rank):
            with pytest.raises(ValueError, match="is not a mesh axis of"):
                function(*arguments)
        return
    off = math.prod(
        layout.mesh.shape[axis] for axis in set(layout.data_axis) - set(layout.table_axis)
    )
    assert xrex.single_shard_per_rank(*arguments) == (off == 1)
    if off == 1:
        xrex.check_single_shard_per_rank(*arguments)
    else:
        text = f"{off} token shards outside the communicator; add the extra axes to table_axis"
        with pytest.raises(ValueError, match=text):
            xrex.check_single_shard_per_rank(*arguments)
    decision = validator_decision(layout)
    if isinstance(decision, Rejected) and decision.rule == "one_shard_per_rank":
        assert off != 1
    elif isinstance(decision, Accepted) or decision.rule in ("even_tokens", "even_width"):
        assert off == 1


@given(st.data())
@settings(max_examples=examples(0.1))
def test_a_bare_string_is_one_axis(data: st.DataObject) -> None:
    mesh = data.draw(strategies.meshes())
    axis = data.draw(st.sampled_from(mesh.axis_names))
    sizes = {"tokens_per_batch": 8 * mesh.shape[axis], "emb_width": 8 * mesh.shape[axis]}
    sizes |= {"num_unique": 4, "num_devices_per_node": 8}
    bare = xrex.make_context_handle(mesh, axis, data_axis=axis, **sizes)
    assert bare == xrex.make_context_handle(mesh, (axis,), data_axis=(axis,), **sizes)


def test_the_line_of_code_makes_the_layout_again() -> None:
    scope = {"jax": jax, "np": np, "Layout": Layout, "Mesh": jax.sharding.Mesh}
    scope["AxisType"] = jax.sharding.AxisType

    @settings(max_examples=examples(0.1))
    @given(strategies.layouts_of_any_sizes())
    def check(layout: Layout) -> None:
        assert eval(as_code(layout), scope) == layout

    check()
