"""The suite can fail: each rule switched off, and the group size one off, is found out.

By the layouts that profile ci compares validator and runtime on, and by no more of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest
from hypothesis import Phase, given, settings

import xrex
from tests import judge, strategies
from tests.agreement import compare
from tests.expected_rejection import check_rejection
from tests.suite_report import Tally
from xrex import exchange
from xrex.layout import requirements
from xrex.layout.layout import Layout

pytestmark = pytest.mark.property

# The same in every run and profile, up to the first failure.
SEARCH: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "phases": [Phase.generate],
    "report_multiple_bugs": False,
}


def validator_and_runtime_agree(kinds: Sequence[str] = strategies.KINDS) -> None:
    for kind in kinds:
        compare(kind, lambda _: None, profile="ci", **SEARCH)


def rejections_name_the_first_broken_rule() -> None:
    @settings(max_examples=200, **SEARCH)
    @given(strategies.layouts_of_any_sizes())
    def run(layout: Layout) -> None:
        check_rejection(layout, judge.make_handle)

    run()


@pytest.fixture
def forgetful() -> Iterator[None]:
    """No verdict and no compiled program outlives a change of the runtime."""

    def forget() -> None:
        judge.forget_verdicts()
        jax.clear_caches()

    forget()
    yield
    forget()


def without(name: str) -> tuple[requirements.Requirement, ...]:
    return tuple(rule for rule in requirements.REQUIREMENTS if rule.name != name)


def one_more(of: type) -> property:
    right = of.group_size.fget  # type: ignore[attr-defined]
    return property(lambda self: right(self) + 1)


# Each rule whose lack the runtime shows, and the fault that breaks it: the comparison begins with
# layouts of that fault, which find out soonest.
FAULTS = {
    "known_axes": "unknown axis",
    "tokens_vary": "missing axis",
    "one_shard_per_rank": "outside axis",
    "even_tokens": "odd tokens",
    "even_width": "odd width",
    "repeated_axis": "repeated axis",
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_missing_rule_lets_a_broken_layout_in(
    rule: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(requirements, "REQUIREMENTS", without(rule))
    with pytest.raises(AssertionError, match=r"^accepted\s+but the runtime fails: "):
        validator_and_runtime_agree(sorted(strategies.KINDS, key=lambda kind: kind != FAULTS[rule]))
    tally("mutations found out")


@pytest.mark.parametrize("rule", [rule.name for rule in requirements.REQUIREMENTS])
def test_a_missing_rule_is_missed_by_name(
    rule: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(requirements, "REQUIREMENTS", without(rule))
    with pytest.raises(AssertionError, match="but expected: async_emb"):
        rejections_name_the_first_broken_rule()
    tally("mutations found out")


def test_a_group_size_one_off_in_the_validator_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(Layout, "group_size", one_more(Layout))
    with pytest.raises(AssertionError, match=r"accepted|rejected by even_"):
        validator_and_runtime_agree()
    tally("mutations found out")


def identity(handle: xrex.AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    return x


RUNTIME_MUTATIONS = {
    "group size one off": (xrex.AsyncEmbContextHandle, "group_size", one_more),
    "statistics of one rank alone": (exchange, "sum_over_ranks", lambda _: identity),
    "columns in a wrong order": (
        exchange,
        "blocks_to_rows",
        lambda module: lambda blocks, right=module.blocks_to_rows: right(blocks[::-1]),
    ),
}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("mutation", RUNTIME_MUTATIONS)
def test_a_broken_runtime_is_found_out(
    mutation: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    target, name, mutate = RUNTIME_MUTATIONS[mutation]
    mutant: Any = mutate(target)
    monkeypatch.setattr(target, name, mutant)
    with pytest.raises(AssertionError, match=r"^accepted\s+but the runtime fails: "):
        validator_and_runtime_agree(["legal"])
    tally("mutations found out")
