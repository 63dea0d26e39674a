"""Prints the report of a layout."""

from rich.console import Console

import xrex
from tools.layouts import layout_text, mesh_picture

_PIPED_WIDTH = 120


def show(report: xrex.LayoutReport, drawn: mesh_picture.Picture | None) -> None:
    """Prints a report: in colour on a terminal, plain elsewhere."""
    out = console()
    out.print(layout_text.verdict(report))
    overflow = layout_text.overflow(report)
    if overflow is not None:
        out.print(overflow)
    if drawn is not None:
        out.print(f"\n{drawn.title}")
        out.print(mesh_picture.as_table(drawn))
    if report.plan is None:
        out.print(layout_text.explanation(report))
    else:
        out.print(layout_text.plan_tables(report.plan))


def console() -> Console:
    """Where reports go."""
    # The terminal breaks long lines, not the tool: errors and flags are to be copied whole. Names
    # of axes are the user's: what looks like markup in them is printed as it is.
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = _PIPED_WIDTH
    return out
