"""The command that checks a layout: its answers, its exit status, its picture and its README."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import xrex
from tests import layouts
from tools import check_mesh
from tools.common.command import UserError
from tools.layouts import errors_table, layout_flags, mesh_picture
from xrex.layout.requirements import REQUIREMENTS

ROOT = Path(__file__).parent.parent
GOOD = {
    "mesh": "replica=2,batch=8",
    "table_axis": "batch",
    "data_axis": "batch",
    "tokens_per_batch": 65536,
    "emb_width": 512,
    "num_unique": 65536,
    "num_devices_per_node": 8,
}


def command(**changes: Any) -> list[str]:
    arguments = {name: value for name, value in (GOOD | changes).items() if value is not None}
    return [f"--{name}={value}" for name, value in arguments.items()]


def run(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, str, str]:
    status = check_mesh.COMMAND.status(check_mesh.main, argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# Answers


def test_an_accepted_layout_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, command(vocab=10**8))
    assert (status, err) == (0, "")
    assert out.startswith("ACCEPTED: 8 ranks x 64 columns, 8192 tokens per rank\n")
    for text in ("12,800,000,000", "7,340,032", "1,048,576", "Largest vocabulary in 141 GB"):
        assert text in out
    assert "WARNING: The mesh axes ('replica',) shard neither columns nor tokens" in out


def test_a_rejected_layout_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, command(data_axis="batch,replica"))
    assert (status, err) == (1, "")
    requirement = next(part for part in REQUIREMENTS if part.name == "one_shard_per_rank")
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "REJECTED: 1 requirement is broken"
    at = lines.index(
        "1. async_emb requires exactly one token shard per communicator rank: data_axis "
        "('batch', 'replica') shards tokens over 2 positions outside table_axis ('batch',)"
    )
    assert lines[at + 1] == f"Why: {requirement.why}"
    assert lines[at + 3 :] == [
        "--table_axis=batch,replica",
        "--data_axis=batch",
        "--mesh=replica=1,batch=8",
    ]


BROKEN = {
    "data_axis": "batch,replica",
    "tokens_per_batch": 65537,
    "emb_width": 3,
    "num_unique": 0,
}


def test_every_flag_that_is_suggested_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, command(**BROKEN))
    assert status == 1
    assert out.startswith("REJECTED: 4 requirements are broken\n")
    suggested = [line.split() for line in out.splitlines() if line.startswith("     --")]
    assert suggested
    for flags in suggested:
        # Pasted behind the command: the last of two equal flags counts.
        assert run(capsys, command(**BROKEN) + flags)[0] == 0
    assert len({tuple(flags) for flags in suggested}) == len(suggested)


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, [*command(**BROKEN), "--json"])
    said = json.loads(out)
    assert status == 1
    assert not said["accepted"]
    assert [part["requirement"] for part in said["broken"]] == [
        "positive_sizes",
        "one_shard_per_rank",
        "even_tokens",
        "even_width",
    ]
    assert said["broken"][0]["changes"][0]["flags"].startswith("--")
    status, out, _ = run(capsys, [*command(vocab=1000), "--json"])
    said = json.loads(out)
    assert status == 0
    assert said["mesh"] == {"replica": 2, "batch": 8}
    assert said["plan"]["memory"]["table"] == 1000 * 64 * 2


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"mesh": None}, [], "missing --mesh"),
        ({"mesh": None, "emb_width": None}, [], "missing --mesh, --emb_width"),
        ({"mesh": "a"}, [], "--mesh=a: 'a' is not AXIS=SIZE"),
        ({"mesh": "a=two"}, [], "'a=two' is not AXIS=SIZE"),
        ({"mesh": "a=1,a=1"}, [], "axis 'a' is there twice"),
        ({"mesh": "a=1048577"}, [], "wanted at most 1,048,576 devices"),
        ({"mesh": "a=2048,b=2048"}, [], "wanted at most 1,048,576 devices"),
        ({"table_axis": "a,,b"}, [], "--table_axis=a,,b: '' cannot be used"),
        ({"emb_width": "wide"}, [], "--emb_width=wide: wanted an integer"),
        ({"vocab": 0}, [], "--vocab=0: wanted an integer from 1"),
        ({"dtype": "float16"}, [], "--dtype=float16: wanted one of bfloat16, float32"),
        ({"reserved_gb": "nan"}, [], "--reserved_gb=nan: wanted a finite number at least 0"),
        ({"reserved_gb": "-1"}, [], "--reserved_gb=-1: wanted a finite number at least 0"),
        ({}, ["--bogus=1"], "--bogus: there is no such flag"),
        ({}, ["word"], "'word' belongs to no flag"),
        ({}, ["--from_python=nowhere:f"], "--from_python=nowhere:f: there is no module 'nowhere'"),
        ({}, ["--from_python=os:getcwd"], "must return an xrex.Layout, or a mesh and a dictionary"),
        ({}, ["--from_python=os:absent"], "module 'os' has no function 'absent'"),
        ({}, ["--from_python=os"], "wanted MODULE:FUNCTION"),
        ({}, ["--png=/proc/nowhere/mesh.png"], "--png=/proc/nowhere/mesh.png: cannot be written"),
        ({}, ["--png=/"], "--png=/: cannot be written: Is a directory"),
        ({"table_axis": "x"}, ["--png=mesh.png"], "--png=mesh.png: there is no picture"),
    ],
)
def test_what_cannot_be_answered_exits_2(
    changes: Any,
    extra: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, command(**changes) + extra)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """What a terminal library would take for markup or for an emoji is a name here."""
    names = command(mesh="[new]=2,:smile:=8", table_axis=":smile:", data_axis=":smile:")
    status, out, _ = run(capsys, names)
    assert status == 0
    assert "\n[new]=2 x :smile:=8: 2 communicators" in out
    status, out, _ = run(capsys, [*names, "--data_axis=:smile:,[new]"])
    assert status == 1
    assert "--table_axis=:smile:,[new]" in out


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, None),
        ({"vocab": 10}, None),
        ({"num_unique": 100}, 65536),
        ({"num_unique": 100, "vocab": 100}, None),
        ({"num_unique": 100, "vocab": 101}, 101),
    ],
)
def test_tokens_that_can_be_left_out_are_told_first(
    changes: Any, most: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, command(**changes))
    assert status == 0
    second = out.splitlines()[1]
    assert second.startswith("TOKENS CAN BE LEFT OUT") == (most is not None)
    if most is not None:
        told = " ".join(out.splitlines()[1:5])
        assert f"a batch may hold {most:,} distinct ids, and num_unique=100 has room" in told
        assert "The largest ids are left out" in told
        assert "get no gradient" in told
        assert "counted in `dropped`" in told
        assert f"--num_unique={most} " in told
        again = run(capsys, [*command(**changes), f"--num_unique={most}"])[1]
        assert "LEFT OUT" not in again


def test_help_tells_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, ["--help"])
    assert status == 0
    assert "Exit status: 0 accepted, 1 rejected, 2" in out
    assert all(f"--{name}" in out for name in (*GOOD, "vocab", "dtype", "from_python", "png"))


def test_a_program_may_make_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_layout.py").write_text(
        "import jax\n"
        "def make():\n"
        "    mesh = jax.make_mesh((2, 4), ('r', 'x'), axis_types=(jax.sharding.AxisType.Auto,) * 2)"
        "\n"
        "    return mesh, dict(table_axis='x', data_axis=('r', 'x'), tokens_per_batch=64,\n"
        "        emb_width=8, num_unique=64, num_devices_per_node=4, out_of_range='clip')\n"
        "def odd():\n"
        "    return make()[0], {'emb_with': 8}\n"
        "def short():\n"
        "    return make()[0], {'emb_width': 8}\n"
        "def whole():\n"
        "    import xrex\n"
        "    mesh, rest = make()\n"
        "    del rest['out_of_range']\n"
        "    return xrex.Layout(mesh, **rest)\n"
        "def no_mesh():\n"
        "    return 3, make()[1]\n"
        "def broken():\n"
        "    raise SystemExit('[new] out')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["--from_python=my_layout:make"]
    status, rejected, _ = run(capsys, argv)
    assert status == 1
    assert "--table_axis=x,r" in rejected
    assert run(capsys, [*argv, "--table_axis=x,r"])[0] == 0
    assert run(capsys, [*argv, "--mesh=r=1,x=4"])[0] == 0
    status, _, err = run(capsys, ["--from_python=my_layout:odd"])
    assert status == 2
    assert "unknown arguments emb_with" in err
    assert run(capsys, ["--from_python=my_layout:whole"])[1] == rejected
    assert run(capsys, ["--from_python=my_layout:whole", "--table_axis=x,r"])[0] == 0
    for name, told in {
        "short": "its dictionary lacks table_axis, data_axis, tokens_per_batch",
        "no_mesh": "must be a jax.sharding.Mesh or AbstractMesh, not int",
        "broken": f"raised SystemExit: [new] out ({tmp_path}/my_layout.py, line 18)",
    }.items():
        status, _, err = run(capsys, [f"--from_python=my_layout:{name}"])
        assert status == 2
        assert err.startswith(f"check_mesh: --from_python=my_layout:{name}: ")
        assert told in err


def test_it_needs_no_device_for_any_number_of_them() -> None:
    argv = command(
        mesh="pod=1024,chip=128",
        table_axis="chip,pod",
        data_axis="pod,chip",
        tokens_per_batch=2**24,
        emb_width=2**17,
        vocab=10**6,
    )
    result = subprocess.run(
        [sys.executable, "-m", "tools.check_mesh", *argv],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ACCEPTED: 131072 ranks x 1 columns")
    assert "\x1b" not in result.stdout


# The picture


def layout_of(mesh: Any, table_axis: Any, data_axis: Any, **sizes: Any) -> xrex.Layout:
    defaults = {"tokens_per_batch": 16, "emb_width": 8, "num_devices_per_node": 2}
    return xrex.Layout(mesh, table_axis, data_axis=data_axis, num_unique=16, **(defaults | sizes))


def drawn_of(layout: xrex.Layout) -> mesh_picture.Picture:
    drawn = mesh_picture.picture(layout)
    assert drawn is not None
    return drawn


def bounds(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first) + 1


@pytest.mark.parametrize("case", layouts.LAYOUTS, ids=str)
def test_the_picture_is_how_arrays_are_sharded(case: layouts.LayoutCase) -> None:
    handle = case.handle()
    drawn = drawn_of(handle.layout)

    def held(shape: tuple[int, ...], spec: P) -> dict[int, tuple[int, int]]:
        """What each device holds of the last axis, by its id."""
        indices = NamedSharding(case.mesh, spec).devices_indices_map(shape)
        return {device.id: index[-1].indices(shape[-1])[:2] for device, index in indices.items()}

    columns = held((1, handle.emb_width), P(None, case.table_axis))
    tokens = held((handle.tokens_per_batch,), P(case.data_axis))
    seen = []
    for row in drawn.rows:
        for cell in row.cells:
            device = int(cell.split()[1])
            assert columns[device] == bounds(row.columns)
            assert tokens[device] == bounds(row.tokens)
            seen.append(device)
    # Rank after rank, communicator after communicator: as the handle has it.
    by_communicator = np.array(seen).reshape(handle.group_size, -1).T
    assert tuple(by_communicator.ravel().tolist()) == handle.flatten_replicas


def test_a_rejected_layout_shows_which_copy_sees_other_tokens() -> None:
    mesh = layouts.mesh({"r": 2, "x": 2})
    drawn = drawn_of(layout_of(mesh, ("x",), ("x", "r")))
    assert [row.tokens for row in drawn.rows] == ["", ""]
    assert drawn.rows[0].cells == (
        "device 0 (node 0)\ntokens 0-3",
        "device 2 (node 1)\ntokens 4-7",
    )


@pytest.mark.parametrize(
    ("table_axis", "changes"),
    [(("z",), {}), (("x", "x"), {}), (("x",), {"emb_width": 0}), (("x",), {"emb_width": "8"})],
)
def test_what_has_no_meaning_has_no_picture(table_axis: tuple[str, ...], changes: Any) -> None:
    layout = layout_of(layouts.mesh({"x": 2}), table_axis, ("x",), **changes)
    assert mesh_picture.picture(layout) is None


@pytest.mark.parametrize("axes", ["a=512", "a=4,b=16,c=8", "a=128,b=4", "a=2,b=2"])
def test_any_number_of_devices_fits_a_screen(axes: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = axes.translate({ord(c): None for c in "=0123456789"})
    argv = command(mesh=axes, table_axis=names[-1], data_axis=names[-1], emb_width=1024)
    status, out, _ = run(capsys, argv)
    assert status == 0
    drawn = [line for line in out[: out.index("Bytes per rank")].splitlines() if line]
    assert len(drawn) <= 70
    assert max(map(len, drawn)) <= 120
    size = math.prod(int(part.split("=")[1]) for part in axes.split(","))
    assert str(size - 1) in "\n".join(drawn), "the last device is drawn"


def test_groups_of_ranks_say_what_they_hold() -> None:
    mesh = layout_flags.parse_mesh("a=4,b=16,c=8")
    sizes = {"tokens_per_batch": 65536, "emb_width": 1024, "num_devices_per_node": 8}
    drawn = drawn_of(layout_of(mesh, ("c", "b"), ("b", "c"), **sizes))
    assert len(drawn.rows) == mesh_picture.MOST_RANKS
    row = drawn.rows[1]
    assert (row.ranks, row.columns) == ("ranks 8-15", "64-127")
    assert row.tokens == "shards 64, 72, ... 120 of 128"
    assert row.cells[1] == "devices 192, 200, ... 248\nnodes 24-31"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([3, 4, 5], "3-5"),
        ([1, 4], "1, 4"),
        ([0, 8, 16, 24], "0, 8, ... 24"),
        ([0, 1, 5, 6], "0 ... 6 (4)"),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert mesh_picture.ranges(np.array(numbers)) == text


@pytest.mark.parametrize("colour", [True, False])
def test_colours_are_for_terminals(colour: bool) -> None:
    out = io.StringIO()
    system: Any = "standard" if colour else "auto"
    console = Console(file=out, force_terminal=colour, color_system=system, width=100)
    console.print(mesh_picture.as_table(drawn_of(layouts.LAYOUTS[3].handle().layout)))
    assert ("\x1b[" in out.getvalue()) == colour


@pytest.mark.parametrize("changes", [{}, {"data_axis": "batch,replica"}, {"mesh": "batch=512"}])
def test_the_picture_as_an_image(
    changes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mesh.png"
    status, _, err = run(capsys, command(**changes, png=path))
    assert status == ("data_axis" in changes)
    assert err == ""
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


# The README's section


def test_the_section_of_the_readme_is_current() -> None:
    readme = errors_table.README.read_text()
    assert readme == errors_table.updated(readme), "run `python -m tools.layouts.errors_table`"


def test_every_requirement_has_an_entry_with_its_text_and_fixes() -> None:
    assert list(errors_table.EXAMPLES) == [requirement.name for requirement in REQUIREMENTS]
    section = errors_table.section()
    for requirement in REQUIREMENTS:
        assert section.count(requirement.why) == 1
    assert section.count("Fix: `--") == len(REQUIREMENTS)


@pytest.mark.parametrize("readme", ["", errors_table.BEGIN, "x".join(["<!-- errors: end -->"] * 2)])
def test_a_readme_without_markers_is_refused(readme: str) -> None:
    with pytest.raises(UserError, match="errors: begin"):
        errors_table.updated(readme)


def test_an_old_section_is_replaced() -> None:
    old = f"before\n{errors_table.BEGIN}\nold\n{errors_table.END}\nafter\n"
    new = errors_table.updated(old)
    assert new.startswith(f"before\n{errors_table.BEGIN}\n## Errors and their fixes\n")
    assert new.endswith(f"{errors_table.END}\nafter\n")
    assert "\nold\n" not in new
    assert errors_table.updated(new) == new


def test_the_tool_writes_and_checks_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(*argv: str) -> int:
        return errors_table.COMMAND.status(errors_table.main, argv)

    readme = tmp_path / "README.md"
    monkeypatch.setattr(errors_table, "README", readme)
    assert status() == 2
    assert f"{readme}: No such file" in capsys.readouterr().err
    readme.write_text("no markers")
    assert status() == 2
    readme.write_text(f"{errors_table.BEGIN}\nold\n{errors_table.END}\n")
    assert status("--check") == 1
    assert status() == 0
    assert status("--check") == 0
