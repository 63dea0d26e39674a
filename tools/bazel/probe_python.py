"""Tells what an interpreter has installed, and what it lacks. Run by any Python from 3.8 on.

    python -I probe_python.py [--pinned=requirements.txt] [--path=FOLDER] [DISTRIBUTION...]

Prints the Python version and every installed distribution with its version, a line each. What is
missing, of the named distributions and of those that the file pins, is told in one line to standard
error; then the exit status is 3. With --path, what lies in that folder counts alone. Nothing is
imported, and no network is used.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

OLDEST = (3, 11)
MISSING = 3
# More names than this would hide what the callers say next: the command that installs it.
SHOWN = 8
# The part of a requirements file's language that requirements.txt keeps to: an exact version, for
# some Python versions. The `packaging` library may be among what is missing.
PIN = re.compile(
    r"""(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)
    (\s*;\s*python_version\s*(?P<relation><|>=)\s*"(?P<python>\d+\.\d+)")?""",
    re.VERBOSE,
)


def pins(requirements: str) -> dict[str, str]:
    """The versions that a requirements file asks for, of this Python.

    Raises:
      ValueError: a line that is neither a pin nor a comment.
    """
    wanted = {}
    for line in requirements.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pin = PIN.fullmatch(text)
        if pin is None:
            raise ValueError(
                f'{text!r} is no pin of the form name==version; python_version < "3.12"'
            )
        if pin["relation"]:
            boundary = tuple(int(part) for part in pin["python"].split("."))
            if (sys.version_info[:2] >= boundary) != (pin["relation"] == ">="):
                continue
        wanted[pin["name"]] = pin["version"]
    return wanted


def installed_versions(path: Path | None) -> dict[str, str]:
    """The versions of all distributions, by name, in a folder or where Python looks."""
    look = [] if path is None else [str(path)]
    found = metadata.distributions(path=look) if look else metadata.distributions()
    # Where one is there twice, Python takes the first.
    return {each.metadata["Name"]: each.version for each in reversed(list(found))}


def normalized(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(names: list[str], pinned: dict[str, str], installed: dict[str, str]) -> list[str]:
    """What is missing of those, in words."""
    versions = {normalized(name): version for name, version in installed.items()}
    missing = []
    if sys.version_info < OLDEST:
        missing.append("Python {}.{} or newer".format(*OLDEST))
    missing += [name for name in names if normalized(name) not in versions]
    for name, version in pinned.items():
        found = versions.get(normalized(name))
        # A pin without a local version, such as +cuda, is met by one with it.
        if found is None:
            missing.append(f"{name}=={version}")
        elif version not in (found, found.partition("+")[0]):
            missing.append(f"{name}=={version} (has {found})")
    return missing


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Tells what this interpreter has installed.")
    parser.add_argument("--pinned", type=Path)
    parser.add_argument("--path", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    installed = installed_versions(options.path)
    python = f"Python {platform.python_version()}"
    print(python, *sorted(f"{name}=={version}" for name, version in installed.items()), sep="\n")
    pinned = pins(options.pinned.read_text()) if options.pinned else {}
    missing = lacking(options.names, pinned, installed)
    if not missing:
        return 0
    more = [f"and {len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
    listed = ", ".join(missing[:SHOWN] + more)
    where = options.path or f"{sys.executable} ({python})"
    print(f"{where} lacks: {listed}.", file=sys.stderr)
    return MISSING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
