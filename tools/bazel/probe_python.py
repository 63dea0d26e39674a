"""Tells Bazel what an interpreter has. Run by python_environment.bzl, by any Python 3.

    python -I probe_python.py DISTRIBUTION=MODULE...

Prints the Python version, then one line each for the missing distributions (exit status 3), or for
every installed one (exit status 0).
"""

import platform
import sys
from importlib import metadata, util


def main(needed: list[str]) -> int:
    """Returns the exit status."""
    pairs = [pair.split("=") for pair in needed]
    missing = [name for name, module in pairs if util.find_spec(module) is None]
    installed = {f"{found.metadata['Name']}=={found.version}" for found in metadata.distributions()}
    print(f"Python {platform.python_version()}")
    print(*(missing or sorted(installed)), sep="\n")
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
