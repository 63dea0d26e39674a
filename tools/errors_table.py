"""Writes the README's section on errors and their cures, from the rules that raise them.

    python -m tools.errors_table [--check]

replaces what is between the README's two markers; with --check it only says whether that is
current: exit status 1 if it is not. A test does the same.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, AxisType

import xrex
from xrex.layout.requirements import REQUIREMENTS, Requirement

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"

_MESH = {"replica": 2, "batch": 8}
_LAYOUT: dict[str, Any] = {
    "table_axis": ("batch",),
    "data_axis": ("batch",),
    "tokens_per_batch": 65536,
    "emb_width": 512,
    "num_unique": 65536,
    "num_devices_per_node": 8,
}
# What breaks each rule, and no other.
EXAMPLES: dict[str, dict[str, Any]] = {
    "repeated_axis": {"data_axis": ("batch", "batch")},
    "positive_sizes": {"num_unique": 0},
    "known_axes": {"data_axis": ("batch", "model")},
    "tokens_vary": {"table_axis": ("batch", "replica")},
    "one_shard_per_rank": {"data_axis": ("batch", "replica")},
    "even_tokens": {"tokens_per_batch": 65537},
    "even_width": {"emb_width": 500},
}


def section() -> str:
    """The section's text, without the markers."""
    mesh = ", ".join(f"{name}={size}" for name, size in _MESH.items())
    head = f"""\
## Errors and their cures

What `make_context_handle` raises, in the order in which it checks. Each example is one change to a
layout that works:

{_layout_flags(mesh)}
Cures are flags of `python -m tools.check_mesh`, named like the arguments of `make_context_handle`;
each alone makes the example valid. The tool and `xrex.explain_layout` find those of your own
layout.
"""
    return "\n".join((head, *map(_entry, REQUIREMENTS), _same_by_another_name()))


def _layout_flags(mesh: str) -> str:
    """The layout of the examples as flags, in lines of an indented block."""
    flags = [f"--mesh={mesh.replace(' ', '')}"]
    for name, value in _LAYOUT.items():
        text = ",".join(value) if isinstance(value, tuple) else value
        flags.append(f"--{name}={text}")
    return f"    {' '.join(flags[:4])}\n    {' '.join(flags[4:])}\n"


def _mesh() -> AbstractMesh:
    types = (AxisType.Auto,) * len(_MESH)
    return AbstractMesh(tuple(_MESH.values()), tuple(_MESH), axis_types=types)


def _entry(requirement: Requirement) -> str:
    broken_by = EXAMPLES[requirement.name]
    arguments = {**_LAYOUT, **broken_by}
    report = xrex.explain_layout(_mesh(), arguments.pop("table_axis"), **arguments)
    (broken,) = report.broken
    example = ", ".join(f"{name}={value!r}" for name, value in broken_by.items())
    cures = " or ".join(f"`{change.flags}`" for change in broken.changes)
    return f"- `{broken.message}`\n\n  {broken.why}\n  Example: `{example}`. Cure: {cures}.\n"


def _same_by_another_name() -> str:
    try:
        xrex.check_single_shard_per_rank(_mesh(), "batch", ("batch", "replica"))
    except ValueError as error:
        return (
            f"`check_single_shard_per_rank` raises `{error}` for what breaks the rule "
            "of one token shard a rank.\n"
        )
    raise RuntimeError("the example of check_single_shard_per_rank is accepted")


def updated(readme: str) -> str:
    """A README with the section of today between its markers.

    Raises:
      ValueError: the markers are not there, in order and once.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README must have the lines {BEGIN} and {END} once each")
    before, rest = readme.split(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the README has {END} before {BEGIN}")
    return f"{before}{BEGIN}\n{section()}{END}{after}"


def main(argv: Sequence[str]) -> int:
    """Runs the tool and returns its exit status."""
    if argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    readme = README.read_text()
    wanted = updated(readme)
    if argv[1:]:
        return int(readme != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
