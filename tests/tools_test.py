"""Whatever a flag of whatever tool is given, the tool takes it or answers with one message."""

import importlib
import io
import itertools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

from tools.common import command

ROOT = Path(__file__).resolve().parent.parent
# Commands that lie beside what they are made of, for this project's own upkeep.
UPKEEP = ("tools.bazel.results", "tools.layouts.errors_table")
NAMES = (*(f"tools.{file.stem}" for file in sorted((ROOT / "tools").glob("[a-z]*.py"))), *UPKEEP)

LAYOUT = ["--mesh=a=2", "--table_axis=a", "--data_axis=a", "--tokens_per_batch=8", "--emb_width=8"]
# What a tool needs before it looks at the flag in question; several where there are several uses.
NEEDED: dict[str, list[list[str]]] = {
    "tools.check_mesh": [[*LAYOUT, "--num_unique=8", "--num_devices_per_node=2"]],
    "tools.check_suite": [LAYOUT],
    "tools.compile_for_gpu": [["kernels"], ["step"], ["os:getcwd"]],
    "tools.gpu_check": [["--small"]],
    "tools.bazel.results": [["events.json"]],
}

# Run as a whole, not only up to their work.
QUICK = ("tools.check_mesh",)

NOT_FOR_NUMBERS = ("", " ", "abc", "nan", "inf", "-inf", "1e999", "4_5", "8,abc", "[new]")
MORE = (
    "9" * 30,
    "-1",
    "0",
    "1",
    "0.5",
    "9" * 5000,
    str(2**31),
    str(2**62),
    "true",
    "8,16",
    "x" * 300,
)
PATHS = ("/", "/proc/nowhere/x", "/dev/null/x", "absent/x", "a file/x", "nowhere:f", "os:absent")


def is_command(name: str) -> bool:
    return hasattr(importlib.import_module(name), "COMMAND")


TOOLS = [name for name in NAMES if is_command(name)]


def flags_of(module: ModuleType) -> list[str]:
    names: list[str] = module.COMMAND.names
    return names


def every_flag() -> Iterator[tuple[str, str, list[str]]]:
    for name in TOOLS:
        module = importlib.import_module(name)
        for flag, needed in itertools.product(flags_of(module), NEEDED.get(name, [[]])):
            yield name, flag, needed


def takes_any_text(module: ModuleType, flag: str) -> bool:
    try:
        module.COMMAND.flags[flag].parser.parse("abc")
    except ValueError:
        return False
    return True


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where paths of the flags lead; and what tools change of the environment is undone."""
    jax.devices()  # Before a tool simulates fewer.
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    for name in ("XLA_FLAGS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    (tmp_path / "a file").write_text("here")
    (tmp_path / "events.json").write_text("")


def test_every_tool_is_a_command() -> None:
    programs = [name for name in NAMES if "__main__" in source_of(name)]
    assert programs == TOOLS
    assert set(TOOLS) >= {*NEEDED, *MAY_IMPORT}


def source_of(name: str) -> str:
    return (ROOT / f"{name.replace('.', '/')}.py").read_text()


@pytest.mark.parametrize(("name", "flag", "needed"), list(every_flag()), ids=str)
def test_a_value_is_taken_or_answered_with_one_message(
    name: str, flag: str, needed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    settings = getattr(module, "settings", lambda: None)
    main = module.main if name in QUICK else lambda: settings() and None
    for value in (*NOT_FOR_NUMBERS, *MORE, *PATHS):
        arguments = [*needed, f"--{flag}={value}"]
        status = module.COMMAND.status(main, arguments)
        told = capsys.readouterr().err
        if status == command.DONE or (name in QUICK and status == command.NO):
            assert told == ""
            assert takes_any_text(module, flag) or value not in NOT_FOR_NUMBERS or axes(flag, value)
            continue
        assert status == command.UNUSABLE, arguments
        assert told.startswith(f"{module.COMMAND.name}: "), arguments
        assert flag in told, arguments
        assert told.count("\n") == 1, arguments


def axes(flag: str, value: str) -> bool:
    """Whether a flag for axes of a mesh has no axis."""
    return flag in ("table_axis", "data_axis") and value == ""


@pytest.mark.parametrize("name", TOOLS)
def test_what_belongs_to_no_flag_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    (needed, *_) = NEEDED.get(name, [[]])
    for wrong in ("--bogus=1", "--[new]", "stray", "-x"):
        assert module.COMMAND.status(module.main, [*needed, wrong]) == command.UNUSABLE
        told = capsys.readouterr().err
        assert wrong.strip("-").partition("=")[0] in told
        assert told.count("\n") == 1


@pytest.mark.parametrize("name", TOOLS)
def test_help_has_every_flag_and_the_exit_statuses_are_the_same(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    assert module.COMMAND.status(module.main, ["--help"]) == command.DONE
    told = capsys.readouterr().out
    assert all(f"--{flag}\n" in told for flag in flags_of(module))
    assert name in told or name.rpartition(".")[2] in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("check_mesh --reserved_gb=nan", "--reserved_gb=nan: wanted a finite number at least 0"),
        ("bench_pmap --leaves=0,abc", "--leaves=0,abc: '0' cannot be used: wanted an integer"),
        ("compile_for_gpu step --emb_width=500", "emb_width=500 does not shard evenly"),
    ],
)
def test_a_program_ends_with_2_and_one_message(
    line: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `python -m` runs it; command_test.py, train_test.py and paths_test.py start processes."""
    name, *arguments = line.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    # Not pytest's streams, which are without what `run` changes of them.
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name="__main__")
    written = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        written.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    out, err = written
    assert (ended.value.code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


# What only some commands need: it takes long to import, or need not be installed.
HEAVY = ("matplotlib", "pyarrow", "rich", "optax", "hypothesis", "pytest", "tests")
MAY_IMPORT = {
    "tools.bench_pmap": (),
    "tools.bench_step": ("optax",),
    "tools.check_mesh": ("rich",),
    "tools.check_suite": (),
    "tools.compile_for_gpu": (),
    "tools.gpu_check": ("optax",),
    "tools.train": (),
    "tools.bazel.results": (),
    "tools.layouts.errors_table": (),
}


# Each name in a fork of its own, so that they do not see each other's modules; all take JAX.
IMPORT_EACH = """
import importlib, json, os, sys
import jax
for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(name)
        print(json.dumps([name, *sys.modules]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_a_command_imports_only_what_it_needs() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *MAY_IMPORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    loaded = {name: modules for name, *modules in map(json.loads, run.stdout.splitlines())}
    assert list(loaded) == list(MAY_IMPORT)
    # Of rich, what draws tables; its progress bars and the click model are the training's.
    training = {"rich.progress", "tools.recommender.click_model", "tools.recommender.training"}
    for name, modules in loaded.items():
        heavy = [
            module
            for module in modules
            if is_within(module, HEAVY) and not is_within(module, MAY_IMPORT[name])
        ]
        assert heavy == [], name
        assert training.isdisjoint(modules), name


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
