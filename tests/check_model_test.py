"""The command that checks a layout, of a model of many tables: its answers and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import planned_models
from tools import check_mesh
from tools.layouts.layout_flags import parse_mesh
from xrex.embeddings.plan_model import plan_model

ROOT = Path(__file__).parent.parent
BAGS = "16_float32_RowwiseAdagrad"
MODEL = """
from tests.planned_models import click_model
from tools.layouts.layout_flags import parse_mesh
import xrex

def make():
    return click_model(parse_mesh("x=4"), capacity=40)
def bounded():
    return click_model(parse_mesh("x=4"), capacity=35, num_unique=29)
def narrow():
    return click_model(parse_mesh("x=16"))
def no_axis():
    return click_model(parse_mesh("y=4"))
def long():
    return click_model(parse_mesh("x=4"), batch_size=2**29)
def many():
    features = {name: xrex.Feature(name, max_ids=4096, combiner="sum") for name in click_model(
        parse_mesh("x=4")).tables}
    return click_model(parse_mesh("x=4"), features=features, batch_size=2**20)
def no_tables():
    return click_model(parse_mesh("x=4"), tables={})
def direct():
    return xrex.make_context_handle(parse_mesh("x=4"), "x", data_axis="x", tokens_per_batch=4,
        emb_width=3, num_unique=4, num_devices_per_node=8)
def note():
    raise ValueError("async_emb emb_width=8 does not shard evenly")
"""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)


def run(capsys: pytest.CaptureFixture[str], function: str, *argv: str) -> tuple[int, str, str]:
    arguments = [f"--from_python=my_model:{function}", *argv]
    status = check_mesh.COMMAND.status(check_mesh.main, arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "make", "--mean_ids=seen=2,liked=2.5", "--weighted=liked")
    assert (status, err) == (0, "")
    assert out.startswith("ACCEPTED: 4 ranks, 8 examples per rank; 3 tables in 2 stacks\n")
    planned = plan_model(
        planned_models.click_model(parse_mesh("x=4"), capacity=40), weighted=("liked",)
    )
    for stack in planned.stacks:
        assert stack.name in out
        for table in stack.tables:
            row = next(line for line in out.splitlines() if f" {table.name} " in line)
            assert all(f" {n:,} " in row for n in (table.table, table.state, table.wire))
    for number in (planned.wire, *vars(planned.memory).values()):
        assert f" {number:,} " in out
    assert "weights in bags" in out
    assert "WARNING: Stack" in out
    assert "on average, and" not in out
    assert max(map(len, out[: out.index("\nNodes")].splitlines())) <= 120


def test_what_has_no_room_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "bounded", "--mean_ids=seen=2,liked=2.5")
    assert status == 0
    assert "The bags of a rank have 36 ids on average, and a capacity of 35 has room" in out
    assert f"WARNING: Stack {BAGS!r}: A batch may hold 150 distinct ids" in out
    # A flag replaces what the model says.
    status, out, _ = run(capsys, "bounded", "--num_unique=150")
    assert status == 0
    assert "distinct ids, and num_unique" not in out


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "make", "--json", "--reserved_gb=1")
    said = json.loads(out)
    assert (status, said["accepted"], said["mesh"]) == (0, True, {"x": 4})
    plan = said["plan"]
    assert plan["reserved"] == 10**9
    stack = plan["stacks"][0]
    assert [table["name"] for table in stack["tables"]] == ["users", "items"]
    assert stack["memory"]["table"] == 150 * 4 * 4
    assert plan["wire"] == sum(p["bytes_sent"] for s in plan["stacks"] for p in s["wire"])


REFUSED = "async_emb emb_width=8 does not shard evenly over the 16-rank communicator"


@pytest.mark.parametrize(
    ("function", "argv", "message", "table"),
    [
        ("narrow", [], REFUSED, "words"),
        ("make", ["--mesh=x=16"], REFUSED, "words"),
        ("no_axis", [], "async_emb axis 'x' is not a mesh axis", "users"),
    ],
)
def test_a_refused_model_has_the_validators_text_and_the_tables_name(
    function: str, argv: list[str], message: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, function, *argv)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "REJECTED: a requirement is broken"
    assert message in lines[2]
    assert lines[-1].startswith(f"   Of the table {table!r}: ")
    status, out, _ = run(capsys, function, *argv, "--json")
    said = json.loads(out)
    assert (status, said["accepted"], said["plan"]) == (1, False, None)
    assert said["message"] == lines[2]
    assert [f"   {note}" for note in said["notes"]] == lines[3:]


def test_a_refused_stack_names_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Four rows for each example are too many, though one is not."""
    status, out, _ = run(capsys, "long")
    assert status == 1
    assert "tokens_per_batch=2147483648 must be at most 2147483647" in out
    assert out.splitlines()[-1].startswith("   Of the tables ['users', 'items']")


def test_a_layout_that_a_function_has_checked_is_refused_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, "direct")
    assert status == 1
    assert "async_emb emb_width=3 does not shard evenly over the 4-rank communicator" in out


@pytest.mark.parametrize(
    ("function", "argv", "message"),
    [
        ("make", ["--emb_width=8"], "--emb_width: it is not for an xrex.Embeddings"),
        ("make", ["--tokens_per_batch=8"], "--tokens_per_batch: it is not for"),
        ("make", ["--vocab=8"], "--vocab: it is not for an xrex.Embeddings"),
        ("make", ["--dtype=bfloat16"], "--dtype: it is not for an xrex.Embeddings"),
        ("make", ["--lazy_decay"], "--lazy_decay: it is not for an xrex.Embeddings"),
        ("make", ["--png=mesh.png"], "--png: it is not for an xrex.Embeddings"),
        ("make", ["--mean_ids=seen"], "'seen' is not FEATURE=NUMBER"),
        ("make", ["--mean_ids=seen=-1"], "'seen=-1' is not FEATURE=NUMBER"),
        ("make", ["--mean_ids=seen=1,seen=2"], "'seen=2' must name a feature, each once"),
        ("make", ["--mean_ids=user=1"], "mean_ids names 'user', which is no bag"),
        ("make", ["--weighted=sene"], "weighted names 'sene', which is no bag"),
        ("no_tables", [], "calling it raised ValueError: tables must have one entry"),
        (
            "many",
            [],
            "ValueError: the tables ['users', 'items'] are stacked, and their features may",
        ),
        ("note", [], "calling it raised ValueError: async_emb emb_width=8 does not shard"),
    ],
)
def test_what_cannot_be_answered_exits_2(
    function: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, function, *argv)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--mean_ids=seen=2", "--weighted=seen"])
def test_flags_of_models_are_not_for_layouts(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--mesh=x=2", "--table_axis=x", "--data_axis=x", "--tokens_per_batch=2"]
    sizes = ["--emb_width=2", "--num_unique=2", "--num_devices_per_node=2"]
    status = check_mesh.COMMAND.status(check_mesh.main, [*layout, *sizes, flag])
    assert status == 2
    assert "it is for an xrex.Embeddings" in capsys.readouterr().err


def test_it_needs_no_device(tmp_path: Path) -> None:
    environment: dict[str, Any] = {"JAX_PLATFORMS": "no_such_platform"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(
        [sys.executable, "-m", "tools.check_mesh", "--from_python=my_model:make"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ACCEPTED: 4 ranks")
