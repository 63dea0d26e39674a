"""What every `pytest_test` runs: pytest on the given files, by the rules of `bazel test`."""

import os
import sys
from pathlib import Path

# Bazel puts this file's folder first, which would offer its neighbours as top-level modules.
sys.path.pop(0)

import pytest


class Shard:
    """Keeps every n-th of the collected tests, where Bazel splits a target into n shards."""

    def __init__(self) -> None:
        """Reads the shard from the environment, and tells Bazel that it was heeded."""
        self.index = int(os.environ.get("TEST_SHARD_INDEX", "0"))
        self.count = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
        self.only_this_is_empty = False
        if status := os.environ.get("TEST_SHARD_STATUS_FILE"):
            Path(status).touch()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Drops the other shards' tests, after every other choice."""
        mine = items[self.index :: self.count]
        self.only_this_is_empty = bool(items) and not mine
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine


def foreign_packages(root: Path) -> list[str]:
    """The workspace's packages that Python took from elsewhere, such as from site-packages.

    A target without a package's `__init__.py` sees a namespace package, and Python prefers any
    regular package of that name.
    """
    own = [name for name in sys.modules if "." not in name and (root / name).is_dir()]
    return [
        f"{name} came from {path}, not from Bazel: uninstall it from {sys.executable}"
        for name in own
        for path in getattr(sys.modules[name], "__path__", ())
        if root not in (Path(path), *Path(path).parents)
    ]


def pytest_arguments() -> list[str]:
    """The command line, and what Bazel asks for through the environment."""
    arguments = [
        "--config-file=pyproject.toml",
        f"--rootdir={Path.cwd()}",
        "-p",
        "no:cacheprovider",
        "-ra",
        *sys.argv[1:],
    ]
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):
        arguments += ["-k", chosen]
    if os.environ.get("TESTBRIDGE_TEST_RUNNER_FAIL_FAST") == "1":
        arguments += ["--exitfirst"]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments += [f"--junitxml={report}"]
    return arguments


def main() -> int:
    """Returns the exit status."""
    scratch = os.environ["TEST_TMPDIR"]
    os.environ["HOME"] = scratch
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(scratch, "hypothesis")
    shard = Shard()
    status = int(pytest.main(pytest_arguments(), plugins=[shard]))
    if foreign := foreign_packages(Path.cwd()):
        print(*foreign, sep="\n", file=sys.stderr)
        return 1
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and shard.only_this_is_empty:
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
