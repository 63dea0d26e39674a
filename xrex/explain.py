"""Layouts explained to people: every rule that one breaks, what would mend it, what it will cost.

`xrex.context` refuses a layout with the first rule it breaks. This module lists all of them, by the
same `xrex.layout.RULES`, and offers no change that `make_context_handle` does not accept.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from xrex import layout as layout_rules
from xrex.context import AsyncEmbContextHandle, make_context_handle
from xrex.layout import AnyMesh, AxisNames, Layout, Rule, make_layout
from xrex.plan import Plan, plan_layout
from xrex.rules.base import UpdateRule

_CHANGES_A_RULE = 3
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
class BrokenRule:
    """One rule that a layout breaks.

    Attributes:
      rule: the rule's short name.
      message: the error's text, to the letter.
      why: what would go wrong, in one sentence.
      changes: the smallest changes that mend this rule and whatever else is broken, the one of the
        fewest arguments first.
    """

    rule: str
    message: str
    why: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class LayoutReport:
    """What there is to say about a layout. Pure data.

    Attributes:
      accepted: whether `make_context_handle` accepts the layout.
      mesh: the mesh's axes and their sizes.
      table_axis: mesh axes of the table's columns.
      data_axis: mesh axes of the tokens.
      sizes: tokens_per_batch, emb_width, num_unique and num_devices_per_node, as they were given.
      broken: every rule that the layout breaks, in the order in which they are checked; the first
        is what `make_context_handle` raises. Empty if accepted.
      plan: what the layout costs; None unless accepted.
    """

    accepted: bool
    mesh: tuple[tuple[str, int], ...]
    table_axis: tuple[str, ...]
    data_axis: tuple[str, ...]
    sizes: tuple[tuple[str, Any], ...]
    broken: tuple[BrokenRule, ...]
    plan: Plan | None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of all broken rules, each once, that of the fewest arguments first."""
        found = dict.fromkeys(change for rule in self.broken for change in rule.changes)
        return tuple(sorted(found, key=lambda change: len(change.arguments)))


def explain_layout(
    mesh: AnyMesh,
    table_axis: AxisNames,
    *,
    data_axis: AxisNames,
    tokens_per_batch: int,
    emb_width: int,
    num_unique: int,
    num_devices_per_node: int,
    vocab: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    rule: UpdateRule | None = None,
    reserved_bytes: int = 0,
) -> LayoutReport:
    """Says whether a layout is accepted and, if not, why and what to change; plans it if it is.

    Never raises for a layout that breaks rules. Touches no device: with an `AbstractMesh`, layouts
    for clusters of any size can be explained anywhere. For example, 8 tokens and 8 columns on a
    mesh of 2 x 4 devices with axes ("r", "x"), table_axis "x" and data_axis ("r", "x") break the
    rule "one_shard_per_rank", and the first of the changes is `--table_axis=x,r`.

    Args:
      mesh: as in `make_context_handle`, like the six arguments below.
      table_axis: mesh axes of the table's columns.
      data_axis: mesh axes of the tokens.
      tokens_per_batch: tokens in a batch, over all ranks.
      emb_width: width of a whole row.
      num_unique: how many distinct ids of a batch are given room.
      num_devices_per_node: devices in one machine.
      vocab: rows of the table; None plans without the bytes of table and state.
      dtype: the table's, bfloat16 or float32.
      rule: the table's update rule, whose state is planned for; None means `RowwiseAdagrad`.
      reserved_bytes: bytes a device that the dense model takes, left out of the largest vocabulary.

    Raises:
      ValueError: `vocab` is not a size that tables may have, or `reserved_bytes` is negative.
      TypeError: `mesh` is no mesh, an axis is not named by a string, or tables have no such dtype.
    """
    layout = make_layout(
        mesh,
        table_axis,
        data_axis=data_axis,
        tokens_per_batch=tokens_per_batch,
        emb_width=emb_width,
        num_unique=num_unique,
        num_devices_per_node=num_devices_per_node,
    )
    broken = tuple(_broken_rules(layout))
    plan = None
    if not broken:
        plan = plan_layout(_accept(layout), vocab, dtype, rule, reserved_bytes=reserved_bytes)
    return LayoutReport(
        accepted=not broken,
        mesh=tuple(mesh.shape.items()),
        table_axis=layout.table_axis,
        data_axis=layout.data_axis,
        sizes=tuple((name, getattr(layout, name)) for name in layout_rules.SIZES),
        broken=broken,
        plan=plan,
    )


def _accept(layout: Layout) -> AsyncEmbContextHandle:
    """The handle of a layout.

    Raises:
      ValueError: the layout breaks a rule.
    """
    arguments = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return make_context_handle(arguments.pop("mesh"), arguments.pop("table_axis"), **arguments)


def _broken_rules(layout: Layout) -> Iterator[BrokenRule]:
    for rule in layout_rules.RULES:
        message = rule.violation(layout)
        if message is not None:
            yield BrokenRule(rule.name, message, rule.why, _smallest_changes(layout, rule))


def _smallest_changes(layout: Layout, rule: Rule) -> tuple[Change, ...]:
    """What makes the layout acceptable, with a remedy of the rule among it."""
    found = sorted(_mended(layout, rule), key=lambda mended: _distance(layout, mended))
    # A table that is no longer sharded is the last resort.
    found = [mended for mended in found if mended.table_axis] or found
    changes = [_difference(layout, mended) for mended in found]
    smallest = [
        change for change in changes if not any(other.keys() < change.keys() for other in changes)
    ]
    return tuple(_as_change(change) for change in smallest[:_CHANGES_A_RULE])


def _distance(old: Layout, new: Layout) -> tuple[float, ...]:
    """How much of a layout changes: how many arguments, then whether the mesh, then how much the
    sizes.
    """
    changed = _difference(old, new)
    sizes = [name for name in layout_rules.SIZES if name in changed]
    factors = [
        abs(math.log(getattr(new, name) / getattr(old, name)))
        for name in sizes
        if layout_rules.is_positive_integer(getattr(old, name))
    ]
    return len(changed), "mesh" in changed, sum(factors)


def _mended(layout: Layout, rule: Rule) -> Iterator[Layout]:
    """Accepted layouts that remedies lead to: the rule's first, then those of what is still broken.

    Depth first, so that one is found however many remedies there are.
    """
    waiting, seen, found = [*rule.remedies(layout)][::-1], set(), 0
    while waiting and found < _SEARCHED:
        candidate = waiting.pop()
        changed = repr(_difference(layout, candidate))
        if changed in seen:
            continue
        seen.add(changed)
        broken = layout_rules.first_violation(candidate)
        if broken is not None:
            waiting.extend([*broken[0].remedies(candidate)][::-1])
            continue
        mended = _without_idle_changes(layout, candidate)
        _accept(mended)
        found += 1
        yield mended


def _without_idle_changes(old: Layout, new: Layout) -> Layout:
    """The accepted layout `new` with what need not have changed as it was in `old`."""
    for name in (field.name for field in fields(new)):
        if getattr(new, name) is not getattr(old, name):
            restored: dict[str, Any] = {name: getattr(old, name)}
            candidate = replace(new, **restored)
            if layout_rules.first_violation(candidate) is None:
                return _without_idle_changes(old, candidate)
    return new


def _difference(old: Layout, new: Layout) -> dict[str, Any]:
    """The arguments in which two layouts differ, with their new values."""
    changed: dict[str, Any] = {}
    if new.mesh_sizes != old.mesh_sizes:
        changed["mesh"] = tuple(new.mesh_sizes.items())
    for name in ("table_axis", "data_axis", *layout_rules.SIZES):
        value = getattr(new, name)
        if _differs(value, getattr(old, name)):
            changed[name] = value
    return changed


def _differs(new: Any, old: Any) -> bool:
    # By type as well: 8.0 == 8, and only one of them is a size.
    return new is not old and (type(new) is not type(old) or bool(new != old))


def _as_change(arguments: dict[str, Any]) -> Change:
    order = ("mesh", "table_axis", "data_axis", *layout_rules.SIZES)
    ordered = tuple((name, arguments[name]) for name in order if name in arguments)
    return Change(ordered, " ".join(_flag(name, value) for name, value in ordered))


def _flag(name: str, value: Any) -> str:
    if name == "mesh":
        value = ",".join(f"{axis}={size}" for axis, size in value)
    elif isinstance(value, tuple):
        value = ",".join(value)
    return shlex.quote(f"--{name}={value}")
