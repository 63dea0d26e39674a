"""Counts of what the property suite saw, printed at the end of a session, also under xdist."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# `tally(what)` counts one.
Tally = Callable[[str], None]

_COUNTS = pytest.StashKey[Counter[str]]()
_KEY = "xrex_suite_counts"
_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
# How many layouts validator and runtime are compared on.
_LAYOUTS = {"ci": 200, "dev": 50, "thorough": 10_000}


def profile() -> str:
    """The profile that XREX_PROFILE names: "ci" where it names none.

    Raises:
      pytest.UsageError: there is no profile of that name.
    """
    name = os.environ.get("XREX_PROFILE") or "ci"
    if name not in _LAYOUTS:
        raise pytest.UsageError(f"XREX_PROFILE={name!r} is not a profile; use one of {[*_LAYOUTS]}")
    return name


def load_profile() -> None:
    """Registers Hypothesis' profiles and loads the one to use.

    ci: 200 examples per property, the same in every run. dev: a few, other ones each time, and what
    failed before again. thorough: many, other ones each time.
    """
    settings.register_profile("ci", derandomize=True, max_examples=200, database=None, **_COMMON)
    # Said outright: where CI is set, Hypothesis' own default is to derandomize.
    fresh = _COMMON | {"derandomize": False}
    settings.register_profile("dev", max_examples=50, **fresh)
    settings.register_profile("thorough", max_examples=1_000, database=None, **fresh)
    settings.load_profile(profile())


def examples(share: float = 1.0) -> int:
    """How many examples a property runs that gets this share of the profile's."""
    return max(1, round(settings().max_examples * share))


def layouts(share: float, of: str | None = None) -> int:
    """How many layouts to compare validator and runtime on: this share of a profile's."""
    return max(1, round(_LAYOUTS[of or profile()] * share))


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """`tally(what)` counts one; what was counted is printed at the end."""
    counts = pytestconfig.stash[_COUNTS]

    def count(what: str) -> None:
        counts[what] += 1

    return count


def pytest_configure(config: pytest.Config) -> None:
    """Starts the counts and the profile."""
    config.stash[_COUNTS] = Counter()
    load_profile()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist sends its counts to the session that started it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_KEY] = dict(session.config.stash[_COUNTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """The session adds up its workers' counts."""
    counts = getattr(node, "workeroutput", {}).get(_KEY, {})
    node.config.stash[_COUNTS].update(counts)  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the counts."""
    counts = config.stash[_COUNTS]
    if not counts:
        return
    terminalreporter.section(f"property suite, profile {profile()}")
    for what, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:7,} {what}")
