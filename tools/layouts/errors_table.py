"""Writes the section of xrex/README.md on errors and their fixes, from the layout's requirements.

    python -m tools.layouts.errors_table [--check]

replaces what is between the file's two markers; with --check it only says whether that is current:
exit status 1 if it is not. A test does the same.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, AxisType

import xrex
from tools.common.command import DONE, NO, Command, UserError
from tools.layouts.layout_flags import FIELDS
from xrex.layout.requirements import REQUIREMENTS, Requirement

COMMAND = Command("errors_table", __doc__)
_CHECK = COMMAND.switch("check", False, "Only say whether the section is current.")

README = Path(__file__).parents[2] / "xrex" / "README.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"

_MESH = {"replica": 2, "batch": 8}
_LAYOUT = xrex.Layout(
    AbstractMesh(tuple(_MESH.values()), tuple(_MESH), axis_types=(AxisType.Auto,) * len(_MESH)),
    ("batch",),
    data_axis=("batch",),
    tokens_per_batch=65536,
    emb_width=512,
    num_unique=65536,
    num_devices_per_node=8,
)
# What breaks each requirement, and no other.
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
    head = f"""\
## Errors and their fixes

What `make_context_handle` raises, in the order in which it checks. Each example is one change to a
layout that works:

{_layout_flags()}
Fixes are flags of `python -m tools.check_mesh`, named like the fields of `xrex.Layout`; each alone
makes the example valid. The tool and `xrex.explain_layout` find those of your own layout.
"""
    return "\n".join((head, *map(_entry, REQUIREMENTS), _same_by_another_name()))


def _layout_flags() -> str:
    """The layout of the examples as flags, in lines of an indented block."""
    flags = [f"--mesh={','.join(f'{name}={size}' for name, size in _MESH.items())}"]
    for name in FIELDS[1:]:
        value = getattr(_LAYOUT, name)
        flags.append(f"--{name}={','.join(value) if isinstance(value, tuple) else value}")
    return f"    {' '.join(flags[:4])}\n    {' '.join(flags[4:])}\n"


def _entry(requirement: Requirement) -> str:
    broken_by = EXAMPLES[requirement.name]
    report = xrex.explain_layout(replace(_LAYOUT, **broken_by))
    (broken,) = report.broken
    example = ", ".join(f"{name}={value!r}" for name, value in broken_by.items())
    fixes = " or ".join(f"`{change.flags}`" for change in broken.changes)
    return f"- `{broken.message}`\n\n  {broken.why}\n  Example: `{example}`. Fix: {fixes}.\n"


def _same_by_another_name() -> str:
    try:
        xrex.check_single_shard_per_rank(_LAYOUT.mesh, "batch", ("batch", "replica"))
    except ValueError as error:
        return (
            f"`check_single_shard_per_rank` raises `{error}` for what breaks the requirement "
            "of one token shard per rank.\n"
        )
    raise RuntimeError("the example of check_single_shard_per_rank is accepted")


def updated(readme: str) -> str:
    """A README with the section of today between its markers.

    Raises:
      UserError: the markers are not there, in order and once.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise UserError(f"the README must have the lines {BEGIN} and {END} once each")
    before, rest = readme.split(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise UserError(f"the README has {END} before {BEGIN}")
    return f"{before}{BEGIN}\n{section()}{END}{after}"


def main() -> int:
    """Writes or checks the section."""
    readme = README.read_text()
    wanted = updated(readme)
    if _CHECK.value:
        return DONE if readme == wanted else NO
    README.write_text(wanted)
    return DONE


if __name__ == "__main__":
    COMMAND.run(main)
