"""The table of tools/README.md names every command, and every line in it is one that works."""

import importlib
import os
import re
import shlex
from pathlib import Path

import pytest

from tools.common import command

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "tools" / "README.md").read_text()
LINES = sorted(set(re.findall(r"`((?:python|bash) [^`]+)`", README)))
# What a script hands its arguments on to, and where a script without a module is run.
MODULES = {"tools/quickstart.sh": "tools.train"}
RUN_BY = {
    "tools/setup_env.sh": ("tests/setup_env_test.py", "setup_env.sh"),
    "tools/gpu_check.sh": ("tests/gpu_check_test.py", "gpu_check.sh"),
    "tools/test.sh": (".ci/run", "tools/test.sh"),
    "tools/bazel_test.sh": (".ci/run", "tools/bazel_test.sh"),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some settings make the folders that they name; some simulate devices."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_understood(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "python":
        flag, name, *arguments = arguments
        assert flag == "-m"
    else:
        script = arguments.pop(0)
        assert (ROOT / script).is_file()
        name = MODULES.get(script, "")
        if not name:
            file, text = RUN_BY[script]
            assert text in (ROOT / file).read_text()
            return
    module = importlib.import_module(name)
    module.COMMAND.parse(arguments)
    getattr(module, "settings", lambda: None)()


def test_every_command_and_folder_is_there() -> None:
    commands = {
        file.name if file.suffix == ".sh" else file.stem
        for file in (ROOT / "tools").iterdir()
        if file.suffix in (".py", ".sh") and not file.name.startswith("_")
    } - {"gpu_check.sh"}
    assert set(re.findall(r"^\| `([\w.]+)` \|", README, re.MULTILINE)) == commands
    folders = {file.name for file in (ROOT / "tools").iterdir() if file.is_dir()}
    named = set(re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE))
    assert named == folders - {"__pycache__"}


def test_the_exit_statuses_are_those_of_every_command() -> None:
    told = {int(status) for status in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    statuses = (command.DONE, command.NO, command.UNUSABLE)
    assert told == {*statuses, command.INTERRUPTED, command.READER_LEFT}
