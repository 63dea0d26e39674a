"""Paths as the caller of a tool means them."""

import os
from pathlib import Path


def from_caller(path: str | Path) -> Path:
    """Resolves a path of the command line against the folder that the command was given in.

    `bazel run` starts a tool in a folder of its own, and names the caller's in the environment.
    """
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)
