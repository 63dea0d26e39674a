"""Counts of what the property suite saw, printed at the end of a session, also under xdist."""

import os
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Verbosity, settings

_COUNTS = pytest.StashKey[Counter[str]]()
_PROFILE = pytest.StashKey[str]()
_KEY = "xrex_suite_counts"
_COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "verbosity": Verbosity.normal,
}


def register_profiles() -> str:
    """Registers and loads the profile that XREX_PROFILE names, and returns its name.

    ci: 200 examples a property, the same in every run. dev: a few, other ones each time.
    thorough: 10,000 layouts, other ones each time.
    """
    settings.register_profile("ci", derandomize=True, max_examples=200, **_COMMON)
    settings.register_profile("dev", max_examples=50, **_COMMON)
    settings.register_profile("thorough", max_examples=10_000, print_blob=True, **_COMMON)
    name = os.environ.get("XREX_PROFILE", "ci")
    settings.load_profile(name)
    return name


def examples(share: float = 1.0) -> int:
    """How many examples a property runs that gets this share of the profile's."""
    return max(1, round(settings().max_examples * share))


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """`tally(what)` counts one; what was counted is printed at the end."""
    counts = pytestconfig.stash[_COUNTS]

    def count(what: str) -> None:
        counts[what] += 1

    return count


def pytest_configure(config: pytest.Config) -> None:
    """Starts the counts and the profile."""
    config.stash[_COUNTS] = Counter()
    config.stash[_PROFILE] = register_profiles()


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
    terminalreporter.section(f"property suite, profile {config.stash[_PROFILE]}")
    for what, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:7,} {what}")
