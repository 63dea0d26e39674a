"""What `pytest_test` runs keeps to the rules of `bazel test`."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

MAIN = Path(__file__).parent.parent / "tools" / "bazel" / "pytest_main.py"
TWO_TESTS = "def test_one(): pass\ndef test_two(): pass\n"


def run_main(workspace: Path, source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it as Bazel would, on one test file in a workspace of its own."""
    (workspace / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (workspace / "some_test.py").write_text(source)
    bazel = {"TEST_TMPDIR": str(workspace), "XML_OUTPUT_FILE": str(workspace / "test.xml")}
    inherited = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    return subprocess.run(
        [sys.executable, MAIN, "some_test.py"],
        cwd=workspace,
        env=inherited | bazel | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def cases_of(workspace: Path) -> list[str]:
    """The names of the tests in test.xml."""
    return [
        case.get("name", "") for case in ElementTree.parse(workspace / "test.xml").iter("testcase")
    ]


def test_every_test_runs_and_is_reported(tmp_path: Path) -> None:
    assert run_main(tmp_path, TWO_TESTS).returncode == 0
    assert cases_of(tmp_path) == ["test_one", "test_two"]


def test_a_failure_fails(tmp_path: Path) -> None:
    assert run_main(tmp_path, "def test_one(): assert False\n").returncode == 1


def test_no_test_fails(tmp_path: Path) -> None:
    assert (
        run_main(tmp_path, "def helper(): pass\n").returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    )


@pytest.mark.parametrize("index", [0, 1, 2])
def test_shards_share_the_tests_out_and_one_may_be_empty(index: int, tmp_path: Path) -> None:
    status = tmp_path / "shard_status"
    shard = {"TEST_TOTAL_SHARDS": "3", "TEST_SHARD_INDEX": str(index)}
    result = run_main(tmp_path, TWO_TESTS, TEST_SHARD_STATUS_FILE=str(status), **shard)
    assert result.returncode == 0, result.stdout
    assert status.exists()
    assert cases_of(tmp_path) == [["test_one"], ["test_two"], []][index]


def test_a_filter_chooses(tmp_path: Path) -> None:
    assert run_main(tmp_path, TWO_TESTS, TESTBRIDGE_TEST_ONLY="two").returncode == 0
    assert cases_of(tmp_path) == ["test_two"]


def test_a_filter_that_chooses_nothing_fails(tmp_path: Path) -> None:
    result = run_main(tmp_path, TWO_TESTS, TESTBRIDGE_TEST_ONLY="three")
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_package_from_elsewhere_is_found_out(tmp_path: Path) -> None:
    """The workspace has a folder of that name, without its `__init__.py`."""
    elsewhere, workspace = tmp_path / "elsewhere", tmp_path / "workspace"
    for package in (elsewhere / "shadowed", workspace / "shadowed"):
        package.mkdir(parents=True)
    (elsewhere / "shadowed" / "__init__.py").touch()
    source = "import shadowed\n" + TWO_TESTS
    result = run_main(workspace, source, PYTHONPATH=f"{workspace}:{elsewhere}")
    assert result.returncode == 1
    assert f"shadowed came from {elsewhere / 'shadowed'}, not from Bazel" in result.stderr
