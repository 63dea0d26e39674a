"""Explanations of layouts: every broken rule, why it matters, and changes that are accepted."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import xrex
from tests import layouts
from xrex.layout.requirements import REQUIREMENTS

ROOT = Path(__file__).parent.parent
LAYOUT = {"tokens_per_batch": 16, "emb_width": 16, "num_unique": 16, "num_devices_per_node": 8}


def abstract(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


GRID = abstract(r=2, x=4)


def explain(
    mesh: Any = GRID, table: Any = "x", data: Any = "x", **changes: Any
) -> xrex.LayoutReport:
    return xrex.explain_layout(mesh, table, data_axis=data, **(LAYOUT | changes))


def flags(report: xrex.LayoutReport) -> list[str]:
    return [change.flags for change in report.changes]


def test_an_accepted_layout_has_a_plan_and_nothing_broken() -> None:
    report = explain()
    assert report.accepted
    assert report.broken == report.changes == ()
    assert report.layout.mesh_sizes == {"r": 2, "x": 4}
    assert {name: getattr(report.layout, name) for name in LAYOUT} == LAYOUT
    assert report.plan is not None
    assert (report.plan.group_size, report.plan.communicators) == (4, 2)


@pytest.mark.parametrize(
    ("arguments", "changes", "rule", "wanted"),
    [
        ((GRID, ("x", "x"), "x"), {}, "repeated_axis", ["--table_axis=x"]),
        ((GRID,), {"num_unique": 0}, "positive_sizes", ["--num_unique=16"]),
        ((GRID,), {"emb_width": 16.0}, "positive_sizes", ["--emb_width=16"]),
        ((GRID,), {"num_unique": 2**63}, "positive_sizes", ["--num_unique=16"]),
        ((GRID,), {"num_devices_per_node": None}, "positive_sizes", ["--num_devices_per_node=1"]),
        (
            (abstract(r=0, x=4),),
            {},
            "positive_sizes",
            ["--mesh=r=1,x=4"],
        ),
        (
            (abstract(replica=2, batch=4), "bach", "bach"),
            {},
            "known_axes",
            ["--table_axis=batch --data_axis=batch", "--table_axis=replica --data_axis=replica"],
        ),
        ((GRID, ("x", "r"), "x"), {}, "tokens_vary", ["--data_axis=x,r", "--table_axis=x"]),
        (
            (GRID, "x", ("r", "x")),
            {},
            "one_shard_per_rank",
            ["--table_axis=x,r", "--data_axis=x", "--mesh=r=1,x=4"],
        ),
        (
            (GRID,),
            {"tokens_per_batch": 19},
            "even_tokens",
            ["--tokens_per_batch=20", "--tokens_per_batch=16"],
        ),
        ((GRID,), {"emb_width": 3}, "even_width", ["--emb_width=4"]),
    ],
)
def test_one_broken_rule(arguments: Any, changes: Any, rule: str, wanted: list[str]) -> None:
    report = explain(*arguments, **changes)
    assert [broken.requirement for broken in report.broken] == [rule]
    assert flags(report) == wanted
    assert report.plan is None
    why = {rule.name: rule.why for rule in REQUIREMENTS}
    assert report.broken[0].why == why[rule]


def test_every_broken_rule_is_listed_with_its_text() -> None:
    report = explain(
        GRID, ("x", "x", "z"), ("r", "r"), tokens_per_batch=19, emb_width=19, num_unique=0
    )
    assert [broken.requirement for broken in report.broken] == [rule.name for rule in REQUIREMENTS]
    assert [broken.message for broken in report.broken] == [
        "async_emb table_axis ('x', 'x', 'z') names axis 'x' more than once",
        "async_emb num_unique=0 must be a positive integer",
        f"async_emb axis 'z' is not a mesh axis of {GRID}",
        "async_emb requires token shards to vary across the communicator: "
        "table_axis ['x', 'x', 'z'] missing from data_axis ('r', 'r')",
        "async_emb requires exactly one token shard per communicator rank: data_axis ('r', 'r') "
        "shards tokens over 2 positions outside table_axis ('x', 'x', 'z')",
        "async_emb tokens_per_batch=19 does not shard evenly over the 4-rank communicator",
        "async_emb emb_width=19 does not shard evenly over the 4-rank communicator",
    ]
    assert all(broken.changes for broken in report.broken)


def test_a_change_of_several_arguments_mends_all_of_it() -> None:
    report = explain(GRID, "x", ("x", "r"), tokens_per_batch=15, emb_width=9)
    assert [broken.requirement for broken in report.broken] == [
        "one_shard_per_rank",
        "even_tokens",
        "even_width",
    ]
    change = report.changes[0]
    assert change.flags == "--table_axis=x,r --tokens_per_batch=16 --emb_width=8"
    arguments = dict(change.arguments)
    changed = explain(
        GRID, arguments.pop("table_axis"), ("x", "r"), **{"num_unique": 16, **arguments}
    )
    assert changed.accepted


def test_nothing_is_changed_for_nothing() -> None:
    """A width that a remedy rounds for two ranks is whole again where another leaves one rank."""
    report = explain(abstract(a=1, b=2), ("b", "a"), "a", tokens_per_batch=0, emb_width=3)
    assert "--table_axis=a --tokens_per_batch=1" in flags(report)
    assert not any("table_axis" in text and "emb_width" in text for text in flags(report))


def test_a_mesh_of_no_devices_is_refused_by_name() -> None:
    mesh = abstract(r=0, x=4)
    report = explain(mesh, ("r", "x"), ("x", "r"))
    assert [broken.requirement for broken in report.broken] == ["positive_sizes"]
    assert flags(report) == ["--mesh=r=1,x=4"]
    with pytest.raises(ValueError, match="mesh axis 'r' of size 0 must have a positive size"):
        xrex.make_context_handle(mesh, ("r", "x"), data_axis=("x", "r"), **LAYOUT)


def test_flags_are_quoted_for_a_shell() -> None:
    mesh = abstract(**{"my axis": 2, "x": 2})
    assert flags(explain(mesh, "x", ("x", "my axis")))[0] == "'--table_axis=x,my axis'"


def test_an_unsharded_table_is_suggested_only_where_nothing_else_helps() -> None:
    assert flags(explain(abstract(x=4), "y", "y")) == ["--table_axis=x --data_axis=x"]
    assert flags(explain(AbstractMesh((), ()), "y", "y")) == ["--table_axis= --data_axis="]


def test_a_mesh_of_devices_is_explained_like_an_abstract_one() -> None:
    real = explain(layouts.mesh({"r": 2, "x": 4}), "x", ("r", "x"))
    planned = explain(GRID, "x", ("r", "x"))
    assert flags(real) == flags(planned)
    assert real.broken[0].message == planned.broken[0].message


@pytest.mark.parametrize(
    ("arguments", "changes", "error", "message"),
    [
        (("mesh",), {}, TypeError, "must be a jax.sharding.Mesh or AbstractMesh, not str"),
        ((GRID, 3), {}, TypeError, "table_axis=3 must be an axis name"),
        ((GRID,), {"vocab": 2**31}, ValueError, "vocab=2147483648 must be a positive integer"),
        ((GRID,), {"dtype": np.int32}, TypeError, "must be bfloat16 or float32, not int32"),
        ((GRID,), {"reserved_bytes": -1}, ValueError, "reserved_bytes=-1 must not be negative"),
    ],
)
def test_what_is_no_layout_raises(
    arguments: Any, changes: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        explain(*arguments, **changes)


def test_a_report_is_plain_data() -> None:
    for report in (explain(vocab=100), explain(GRID, "x", ("x", "r"))):
        parts = [part for part in (*report.broken, report.plan) if part is not None]
        assert json.dumps([dataclasses.asdict(part) for part in parts])
        assert hash(report)


def test_no_device_is_touched_however_large_the_mesh() -> None:
    program = """
import xrex
from jax.sharding import AbstractMesh

sizes = dict(tokens_per_batch=2**20, emb_width=2**17, num_unique=2**20, num_devices_per_node=8)
mesh = AbstractMesh((2**14, 8), ("a", "b"))
for data_axis in (("a", "b"), "a"):
    report = xrex.explain_layout(mesh, ("b", "a"), data_axis=data_axis, vocab=100, **sizes)
    print(report.accepted, len(report.changes) > 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.splitlines() == ["True False", "False True"], result.stderr
