"""The suite can fail: each rule switched off, and the group size one off, is found out."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import xrex
from tests import judge, strategies
from tests.expected_rejection import check_rejection
from xrex import exchange
from xrex import layout as layout_rules
from xrex.layout import Layout

pytestmark = pytest.mark.property

Tally = Callable[[str], None]


def search(
    layouts: st.SearchStrategy[Layout], check: Callable[[Layout], None], most: int = 500
) -> None:
    """Checks the same layouts each time, until the first failure."""

    @settings(
        max_examples=most,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(layouts)
    def run(layout: Layout) -> None:
        check(layout)

    run()


def agree(layout: Layout) -> None:
    found = judge.disagreement(layout)
    assert found is None, found


def validator_and_runtime_agree(most: int = 500) -> None:
    search(strategies.layouts(2), agree, most)


def rejections_name_the_first_broken_rule() -> None:
    search(
        strategies.layouts_of_any_sizes(),
        lambda layout: check_rejection(layout, judge.make_handle),
    )


@pytest.fixture
def forgetful() -> Iterator[None]:
    """No verdict and no compiled program outlives a change of the runtime."""

    def forget() -> None:
        judge.forget_verdicts()
        jax.clear_caches()

    forget()
    yield
    forget()


def without(name: str) -> tuple[layout_rules.Rule, ...]:
    return tuple(rule for rule in layout_rules.RULES if rule.name != name)


def one_more(of: type) -> property:
    right = of.group_size.fget  # type: ignore[attr-defined]
    return property(lambda self: right(self) + 1)


def test_without_a_mutation_the_properties_hold() -> None:
    """What the tests below find is due to the mutation."""
    validator_and_runtime_agree(most=30)
    rejections_name_the_first_broken_rule()


FIVE_RULES = ("known_axes", "tokens_vary", "one_shard_per_rank", "even_tokens", "even_width")


@pytest.mark.parametrize("rule", [*FIVE_RULES, "repeated_axis"])
def test_a_missing_rule_lets_a_broken_layout_in(
    rule: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(layout_rules, "RULES", without(rule))
    with pytest.raises(AssertionError, match=r"^accepted\s+but the runtime fails: "):
        validator_and_runtime_agree()
    tally("mutations found out")


@pytest.mark.parametrize("rule", [rule.name for rule in layout_rules.RULES])
def test_a_missing_rule_is_missed_by_name(
    rule: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(layout_rules, "RULES", without(rule))
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
        validator_and_runtime_agree()
    tally("mutations found out")
