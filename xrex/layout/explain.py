"""Layouts explained to people: every requirement that one breaks, what would fix it, what it costs.

`make_context_handle` names the first requirement that a layout breaks. This module lists all of
them, and offers no change that `make_context_handle` does not accept.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from xrex.layout.handle import make_context_handle
from xrex.layout.layout import SIZES, Layout, as_layout, is_positive_integer
from xrex.layout.plan import Plan, plan_layout
from xrex.layout.requirements import REQUIREMENTS, Requirement, first_violation
from xrex.rules.base import UpdateRule

_CHANGES_PER_REQUIREMENT = 3
_SEARCHED = 32


@dataclass(frozen=True)
class Change:
    """Arguments to change together. `make_context_handle` accepts the layout that they make.

    Attributes:
      arguments: names and new values. A tuple of axes is one of strings; "mesh" is one of
        (axis, size).
      flags: the same for the command line of `tools/check_mesh.py`, ready to paste.
    """

    arguments: tuple[tuple[str, Any], ...]
    flags: str


@dataclass(frozen=True)
class BrokenRequirement:
    """One requirement that a layout breaks.

    Attributes:
      requirement: its short name.
      message: the error's text, to the letter.
      why: what would go wrong, in one sentence.
      changes: the smallest changes that fix this and whatever else is broken, the one of the
        fewest arguments first.
    """

    requirement: str
    message: str
    why: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class LayoutReport:
    """What there is to say about a layout. Pure data.

    Attributes:
      layout: as it was given.
      accepted: whether `make_context_handle` accepts the layout.
      broken: every requirement that the layout breaks, in the order in which they are checked; the
        first is what `make_context_handle` raises. Empty if accepted.
      plan: what the layout costs; None unless accepted.
    """

    layout: Layout
    accepted: bool
    broken: tuple[BrokenRequirement, ...]
    plan: Plan | None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of all broken requirements, each once, that of the fewest arguments first."""
        found = dict.fromkeys(change for part in self.broken for change in part.changes)
        return tuple(sorted(found, key=lambda change: len(change.arguments)))


def explain_layout(
    *layout: Any,
    vocab: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    rule: UpdateRule | None = None,
    reserved_bytes: int = 0,
    **layout_arguments: Any,
) -> LayoutReport:
    """Says whether a layout is accepted and, if not, why and what to change; plans it if it is.

    Called with a `Layout`, or with the arguments of one. Never raises for a layout that breaks
    requirements. Touches no device: with an `AbstractMesh`, layouts for clusters of any size can be
    explained anywhere. For example, 8 tokens and 8 columns on a mesh of 2 x 4 devices with axes
    ("r", "x"), table_axis "x" and data_axis ("r", "x") break the requirement
    "one_shard_per_rank", and the first of the changes is `--table_axis=x,r`.

    Args:
      layout: a `Layout`, or the mesh and the table axis; see `Layout` for all arguments.
      vocab: rows of the table; None plans without the bytes of table and state.
      dtype: the table's, bfloat16 or float32.
      rule: the table's update rule, whose state is planned for; None means `RowwiseAdagrad`.
      reserved_bytes: bytes per device that the dense model takes, left out of the largest
        vocabulary.
      **layout_arguments: the other arguments of `Layout`.

    Raises:
      ValueError: `vocab` is not a size that tables may have, or `reserved_bytes` is negative.
      TypeError: an argument of the layout is missing, unknown or of a wrong type, or tables have no
        such dtype.
    """
    wanted = as_layout(*layout, **layout_arguments)
    broken = tuple(_broken_requirements(wanted))
    plan = None
    if not broken:
        handle = make_context_handle(wanted)
        plan = plan_layout(handle, vocab, dtype, rule, reserved_bytes=reserved_bytes)
    return LayoutReport(layout=wanted, accepted=not broken, broken=broken, plan=plan)


def _broken_requirements(layout: Layout) -> Iterator[BrokenRequirement]:
    for requirement in REQUIREMENTS:
        message = requirement.violation(layout)
        if message is not None:
            changes = _smallest_changes(layout, requirement)
            yield BrokenRequirement(requirement.name, message, requirement.why, changes)


def _smallest_changes(layout: Layout, requirement: Requirement) -> tuple[Change, ...]:
    """What makes the layout acceptable, with a remedy of the requirement among it."""
    found = sorted(_fixed(layout, requirement), key=lambda fixed: _distance(layout, fixed))
    # A table that is no longer sharded is the last resort.
    found = [fixed for fixed in found if fixed.table_axis] or found
    changes = [_difference(layout, fixed) for fixed in found]
    smallest = [
        change for change in changes if not any(other.keys() < change.keys() for other in changes)
    ]
    return tuple(_as_change(change) for change in smallest[:_CHANGES_PER_REQUIREMENT])


def _distance(old: Layout, new: Layout) -> tuple[float, ...]:
    """How much of a layout changes: how many arguments, then whether the mesh, then how much the
    sizes.
    """
    changed = _difference(old, new)
    sizes = [name for name in SIZES if name in changed]
    factors = [
        abs(math.log(getattr(new, name) / getattr(old, name)))
        for name in sizes
        if is_positive_integer(getattr(old, name))
    ]
    return len(changed), "mesh" in changed, sum(factors)


def _fixed(layout: Layout, requirement: Requirement) -> Iterator[Layout]:
    """Accepted layouts that remedies lead to: the requirement's, then those of the next one broken.

    Depth first, so that one is found however many remedies there are.
    """
    waiting, seen, found = [*requirement.remedies(layout)][::-1], set(), 0
    while waiting and found < _SEARCHED:
        candidate = waiting.pop()
        changed = repr(_difference(layout, candidate))
        if changed in seen:
            continue
        seen.add(changed)
        broken = first_violation(candidate)
        if broken is not None:
            waiting.extend([*broken[0].remedies(candidate)][::-1])
            continue
        fixed = _without_idle_changes(layout, candidate)
        make_context_handle(fixed)
        found += 1
        yield fixed


def _without_idle_changes(old: Layout, new: Layout) -> Layout:
    """The accepted layout `new` with what need not have changed as it was in `old`."""
    for name in (field.name for field in fields(new)):
        if getattr(new, name) is not getattr(old, name):
            restored: dict[str, Any] = {name: getattr(old, name)}
            candidate = replace(new, **restored)
            if first_violation(candidate) is None:
                return _without_idle_changes(old, candidate)
    return new


def _difference(old: Layout, new: Layout) -> dict[str, Any]:
    """The arguments in which two layouts differ, with their new values."""
    changed: dict[str, Any] = {}
    if new.mesh_sizes != old.mesh_sizes:
        changed["mesh"] = tuple(new.mesh_sizes.items())
    for name in ("table_axis", "data_axis", *SIZES):
        value = getattr(new, name)
        if _differs(value, getattr(old, name)):
            changed[name] = value
    return changed


def _differs(new: Any, old: Any) -> bool:
    # By type as well: 8.0 == 8, and only one of them is a size.
    return new is not old and (type(new) is not type(old) or bool(new != old))


def _as_change(arguments: dict[str, Any]) -> Change:
    order = ("mesh", "table_axis", "data_axis", *SIZES)
    ordered = tuple((name, arguments[name]) for name in order if name in arguments)
    return Change(ordered, " ".join(_flag(name, value) for name, value in ordered))


def _flag(name: str, value: Any) -> str:
    if name == "mesh":
        value = ",".join(f"{axis}={size}" for axis, size in value)
    elif isinstance(value, tuple):
        value = ",".join(value)
    return shlex.quote(f"--{name}={value}")
