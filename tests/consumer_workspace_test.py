"""Another workspace depends on xrex, offline: what works, and what Bazel must refuse."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.bazel

WORKSPACE = Path(__file__).parent / "consumer_workspace"
FLAGS = (
    "--symlink_prefix=/",
    "--nosandbox_debug",
    "--noshow_progress",
    "--color=no",
    "--jobs=1",
    "--experimental_repository_disable_download",
)
Bazel = Callable[..., subprocess.CompletedProcess[str]]


def unusable() -> str | None:
    """Why this cannot run here."""
    if "TEST_SRCDIR" in os.environ:
        return "starts Bazel itself, and so is for pytest alone"
    if shutil.which("bazel") is None:
        return "no bazel on PATH: `bash tools/setup_env.sh --bazel` installs it"
    version = subprocess.run(["bazel", "--version"], capture_output=True, text=True).stdout
    if (number := re.search(r"(\d+)\.", version)) and int(number[1]) > 6:
        return f"WORKSPACE mode needs Bazel 4.2 to 6, and this is {version.strip()}"
    return None


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """Runs a Bazel command in the workspace, with this interpreter unless told otherwise."""
    if reason := unusable():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    start = ["bazel", f"--output_user_root={tmp_path_factory.mktemp('bazel')}"]

    def run(
        command: str, *arguments: str, python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*start, command, *FLAGS, f"--repo_env=XREX_PYTHON={python}", *arguments],
            cwd=WORKSPACE,
            capture_output=True,
            text=True,
            timeout=300,
        )

    yield run
    subprocess.run([*start, "shutdown"], cwd=WORKSPACE, check=True, timeout=60)


def test_a_program_builds_and_runs(bazel: Bazel) -> None:
    result = bazel("run", "//:lookup")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[[20.0, 21.0, 22.0, 23.0], [8.0, 9.0, 10.0, 11.0]]"


def test_a_module_is_not_visible(bazel: Bazel) -> None:
    result = bazel("build", "//:depends_on_a_module")
    assert result.returncode != 0
    assert "is not visible from" in result.stderr


def test_a_forbidden_layer_is_found(bazel: Bazel) -> None:
    result = bazel("test", "--test_output=errors", "//:layering_test")
    assert result.returncode != 0
    assert "xrex_py/pallas_kernels/api.py, against the layering" in result.stdout


def test_a_missing_package_is_named(bazel: Bazel, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    result = bazel("build", "//:lookup", python=str(python))
    assert result.returncode != 0
    lacks = f"{python} (Python {sys.version.split()[0]}) lacks: absl-py, jax, jaxlib, numpy."
    assert f"{lacks}\nRun: {python} -m pip install absl-py jax jaxlib numpy\n" in result.stderr


def test_a_missing_interpreter_is_named(bazel: Bazel) -> None:
    result = bazel("build", "//:lookup", python="no_such_python")
    assert result.returncode != 0
    assert "no 'no_such_python' on PATH" in result.stderr
