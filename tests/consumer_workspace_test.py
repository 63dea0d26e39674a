"""Another workspace depends on xrex, offline: what works, and what Bazel must refuse."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bazel_runner import Bazel

pytestmark = pytest.mark.bazel

WORKSPACE = Path(__file__).parent / "consumer_workspace"


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """Runs a Bazel command in the workspace."""
    started = Bazel(WORKSPACE, tmp_path_factory.mktemp("bazel"))
    yield started
    started.shutdown()


def test_a_program_builds_and_runs(bazel: Bazel) -> None:
    result = bazel("run", "//:lookup", XREX_PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[[20.0, 21.0, 22.0, 23.0], [8.0, 9.0, 10.0, 11.0]]"


def test_a_module_is_not_visible(bazel: Bazel) -> None:
    result = bazel("build", "//:depends_on_a_module", XREX_PYTHON=sys.executable)
    assert result.returncode != 0
    assert "is not visible from" in result.stderr


def test_a_forbidden_layer_is_found(bazel: Bazel) -> None:
    result = bazel("test", "--test_output=errors", "//:layering_test", XREX_PYTHON=sys.executable)
    assert result.returncode != 0
    assert "xrex_py/pallas_kernels/api.py, against the layering" in result.stdout


def test_a_missing_package_is_named(bazel: Bazel, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    result = bazel("build", "//:lookup", XREX_PYTHON=str(python))
    assert result.returncode != 0
    lacks = f"{python} (Python {sys.version.split()[0]}) lacks: absl-py, jax, jaxlib, numpy."
    assert f"{lacks}\nRun: {python} -m pip install absl-py jax jaxlib numpy" in result.stderr


def test_a_missing_interpreter_is_named(bazel: Bazel) -> None:
    result = bazel("build", "//:lookup", XREX_PYTHON="no_such_python")
    assert result.returncode != 0
    assert "xrex found no Python: no_such_python is not there.\nRun: " in result.stderr
