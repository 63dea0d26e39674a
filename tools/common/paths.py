"""Paths as the caller of a tool means them."""

import os
import tempfile
from pathlib import Path

from tools.common.command import wrong_value


def from_caller(path: str | Path) -> Path:
    """Resolves a path of the command line against the folder that the command was given in.

    `bazel run` starts a tool in a folder of its own, and names the caller's in the environment.
    """
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def output_file(flag: str, path: str | Path) -> Path:
    """The file that a flag names, resolved; its folder is made.

    Call it before the work, which is lost where the file cannot be written after it.

    Raises:
      UserError: the file cannot be written.
    """
    file = from_caller(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Opened for appending: what is in it stays until there is something to write.
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    except (OSError, ValueError) as error:
        raise wrong_value(flag, path, f"cannot be written: {_reason(error)}") from error
    return file


def output_folder(flag: str, path: str | Path) -> Path:
    """The folder that a flag names, resolved and made.

    Raises:
      UserError: it cannot be made, or no file can be written into it.
    """
    folder = from_caller(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        raise wrong_value(flag, path, f"cannot be written: {_reason(error)}") from error
    return folder


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
