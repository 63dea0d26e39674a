"""Starts Bazel in another workspace, offline and with a server of its own."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = (
    "--symlink_prefix=/",
    "--nosandbox_debug",
    "--noshow_progress",
    "--color=no",
    "--jobs=1",
    "--experimental_repository_disable_download",
)


def unusable() -> str | None:
    """Why Bazel cannot run here."""
    if "TEST_SRCDIR" in os.environ:
        return "starts Bazel itself, and so is for pytest alone"
    if shutil.which("bazel") is None:
        return "no bazel on PATH: `bash tools/setup_env.sh --bazel` installs it"
    version = subprocess.run(["bazel", "--version"], capture_output=True, text=True).stdout
    if (number := re.search(r"(\d+)\.", version)) and int(number[1]) > 6:
        return f"WORKSPACE mode needs Bazel 4.2 to 6, and this is {version.strip()}"
    return None


class Bazel:
    """Bazel commands in one workspace."""

    def __init__(self, workspace: Path, user_root: Path) -> None:
        """Skips the test, or fails it in CI, where Bazel cannot run."""
        if reason := unusable():
            assert not os.environ.get("CI"), reason
            pytest.skip(reason)
        self.workspace = workspace
        self._start = ["bazel", f"--output_user_root={user_root}"]

    def __call__(
        self, command: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command; the environment is what the caller's shell would have exported."""
        inherited = {name: text for name, text in os.environ.items() if "XREX" not in name}
        return subprocess.run(
            [*self._start, command, *FLAGS, *arguments],
            cwd=self.workspace,
            env=inherited | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def shutdown(self) -> None:
        """Ends the server."""
        subprocess.run([*self._start, "shutdown"], cwd=self.workspace, check=True, timeout=60)
