"""Every tool takes its flags in one way, and answers a user's mistake with one message."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.common import command
from tools.common.command import Command, UserError, wrong_value

ROOT = Path(__file__).resolve().parent.parent


def example() -> Command:
    tool = Command("example", "Does nothing.\n\nAt length.")
    tool.integer("rows", 8, "Rows.", at_least=1)
    tool.integer("fold", 0, "Fold.", at_least=0, at_most=3)
    tool.integer("any", None, "Any.")
    tool.number("rate", 0.5, "Rate.", at_least=0)
    tool.number("share", 0.5, "Share.", at_least=0, below=1)
    tool.number("eps", None, "Eps.", above=0)
    tool.choice("kind", "new", ["new", "old"], "Kind.")
    tool.words("out", "out", "the name of a folder", "Folder.")
    tool.switch("fast", False, "Fast.")
    return tool


def run(
    capsys: pytest.CaptureFixture[str], arguments: list[str], main: command.Main = lambda: None
) -> tuple[int, str, str]:
    status = example().status(main, arguments)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("--rows=abc", "wanted an integer of at least 1"),
        ("--rows=", "wanted an integer of at least 1"),
        ("--rows=0", "wanted an integer of at least 1"),
        ("--rows=4_5", "wanted an integer of at least 1"),
        ("--rows=1e3", "wanted an integer of at least 1"),
        ("--rows=9223372036854775808", "64 bits"),
        ("--rows=" + "9" * 5000, "64 bits"),
        ("--fold=4", "wanted an integer from 0 to 3"),
        ("--any=2.0", "wanted an integer"),
        ("--rate=nan", "wanted a finite number at least 0"),
        ("--rate=inf", "wanted a finite number at least 0"),
        ("--rate=1e999", "wanted a finite number at least 0"),
        ("--rate=-1", "wanted a finite number at least 0"),
        ("--rate=1_0", "wanted a finite number at least 0"),
        ("--share=1", "wanted a finite number at least 0 and below 1"),
        ("--eps=0", "wanted a finite number above 0"),
        ("--kind=[new]", "wanted one of new, old"),
        ("--out=", "wanted the name of a folder"),
        ("--fast=maybe", "wanted true or false"),
    ],
)
def test_a_wrong_value_gets_one_message(
    argument: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, [argument])
    assert (status, out) == (2, "")
    assert err.startswith(f"example: {argument}: ")
    assert wanted in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--row=8"], ("--row", "--rows")),
        (["--nothing"], ("--nothing", "--help")),
        (["--notfast"], ("--notfast",)),
        (["--rows"], ("--rows",)),
        (["fast"], ("'fast'",)),
        (["--fast", "[new] out"], ("'[new] out'",)),
        (["--flagfile=no such file"], ("no such file",)),
    ],
)
def test_what_is_no_flag_is_named(
    arguments: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, arguments)
    assert status == 2
    assert err.startswith("example: ")
    assert err.count("\n") == 1
    for name in named:
        assert name in err


def test_values_arrive_and_do_not_stay() -> None:
    tool = example()
    tool.parse(["--rows=3", "--rate", "1e-3", "--fast", "--any=-5", "--kind=old", "--out=a b"])
    values = {name: tool.flags[name].value for name in tool.names}
    assert values == {
        "rows": 3,
        "fold": 0,
        "any": -5,
        "rate": 1e-3,
        "share": 0.5,
        "eps": None,
        "kind": "old",
        "out": "a b",
        "fast": True,
    }
    tool.parse(["--nofast"])
    assert tool.flags["rows"].value == 8
    assert tool.flags["fast"].value is False


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("--help", "-h"):
        status, out, err = run(capsys, [argument])
        assert (status, err) == (0, "")
        assert out.startswith("Does nothing.\n")
        for name in example().names:
            assert f"--{name}\n" in out
        assert "(default: 8)" in out


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (1, 1)])
def test_the_status_is_what_the_tool_says(
    result: int | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, [], lambda: result) == (status, "", "")


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def noted() -> UserError:
    error = wrong_value("mesh", "[2]", "wanted [data=2]")
    error.add_note("Or leave it out.")
    return error


def test_a_users_mistake_is_shown_as_it_is_with_its_notes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, err = run(capsys, [], raising(noted()))
    assert (status, err) == (2, "example: --mesh=[2]: wanted [data=2]\nOr leave it out.\n")


def test_an_extra_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich.console")

    told = "example: needs rich.console: pip install '.[train]' brings it\n"
    assert run(capsys, [], main) == (2, "", told)


@pytest.mark.parametrize("tool", ["check_mesh", "bench_step", "gpu_check", "train"])
def test_a_tool_shows_its_help_without_extras(tool: str) -> None:
    code = f"""if True:
        import runpy, sys
        sys.modules.update(dict.fromkeys({list(command.EXTRAS)}))  # As if not installed.
        sys.argv = ["{tool}", "--help"]
        runpy.run_module("tools.{tool}", run_name="__main__")
    """
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_an_error_of_the_system_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        Path("no/such/file").read_text()

    status, _, err = run(capsys, [], main)
    assert (status, err) == (2, "example: no/such/file: No such file or directory\n")


def test_ctrl_c_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, [], raising(KeyboardInterrupt())) == (130, "", "")


def test_what_the_library_refuses_is_shown_with_its_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import jax
    from jax.sharding import AbstractMesh

    import xrex

    def main() -> None:
        mesh = AbstractMesh((2, 4), ("replica", "batch"))
        sizes = dict.fromkeys(("tokens_per_batch", "emb_width", "num_unique"), 8)
        xrex.make_context_handle(
            mesh, "batch", data_axis=("replica", "batch"), num_devices_per_node=8, **sizes
        )

    status, _, err = run(capsys, [], main)
    assert status == 2
    assert err.startswith("example: async_emb requires exactly one token shard")
    assert err.count("\n") > 1, "the advice"
    # From within a trace, where JAX adds a note of its own to every error.
    status, _, err = run(capsys, [], lambda: jax.jit(lambda: main())())
    assert status == 2
    assert "JAX" not in err


def test_a_lack_of_memory_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    import jax

    for error in (MemoryError("8 TB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 8 TB")):
        status, _, err = run(capsys, [], raising(error))
        assert status == 2
        assert err.startswith("example: out of memory: choose smaller sizes")
    with pytest.raises(jax.errors.JaxRuntimeError):
        example().status(raising(jax.errors.JaxRuntimeError("INTERNAL: a bug")), [])


def test_one_argument_may_stand_without_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    tool = Command("example", None, "FILE")
    tool.integer("rows", 8, "Rows.")
    tool.parse(["events.json", "--rows=3"])
    assert (tool.operand, tool.flags["rows"].value) == ("events.json", 3)
    assert tool.status(lambda: None, []) == 2
    assert "missing FILE" in capsys.readouterr().err
    assert tool.status(lambda: None, ["one", "two"]) == 2
    assert "'two'" in capsys.readouterr().err
    assert tool.status(lambda: None, ["--help"]) == 0


@pytest.mark.parametrize("error", [TypeError("a bug"), ValueError("a bug"), AssertionError()])
def test_a_fault_of_the_tool_shows_where(error: Exception) -> None:
    with pytest.raises(type(error)):
        example().status(raising(error), [])


def test_a_fault_of_the_library_shows_where() -> None:
    """An operation that fails within the library is no refusal."""
    from xrex.layout import layout

    with pytest.raises(TypeError, match="not iterable"):
        example().status(lambda: layout.once(3) and None, [])  # type: ignore


PROGRAM = """
import sys, time
from tools.common.command import Command
COMMAND = Command("example", None)
def main():
    print("ready", flush=True)
    {body}
COMMAND.run(main)
"""


def start(body: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_process_that_is_interrupted() -> None:
    with start("time.sleep(60)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


def test_a_reader_that_leaves() -> None:
    with start("[print('x' * 1000) for _ in range(1000)]") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_text_that_the_terminal_cannot_show_is_escaped() -> None:
    with start("print('caf\\u00e9')") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, b"ready\ncaf\\xe9\n", b"")


def test_no_stream_is_needed_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert example().status(lambda: print("x"), []) == 0
