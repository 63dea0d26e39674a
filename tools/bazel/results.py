"""Counts what Bazel's tests did: `python -m tools.bazel.results EVENTS`.

EVENTS is what `bazel test --build_event_json_file=EVENTS` wrote. Prints one line in the plain form
that log readers know: `12 passed, 0 failed, 1 skipped`.
"""

import json
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tools.common.command import Command, UserError

COMMAND = Command("bazel.results", __doc__, "EVENTS")


class Counts(NamedTuple):
    """Test cases by outcome."""

    passed: int
    failed: int
    skipped: int


def read_report(path: Path) -> Counts:
    """The cases of one test.xml."""
    suites = list(ElementTree.parse(path).iter("testsuite"))

    def total(name: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites)

    failed = total("failures") + total("errors")
    skipped = total("skipped")
    return Counts(total("tests") - failed - skipped, failed, skipped)


def count_target(result: dict[str, Any]) -> Counts:
    """The cases of one run of a target, or of a shard of one, from its event."""
    files = {file["name"]: file["uri"] for file in result.get("testActionOutput", [])}
    if "test.xml" in files:
        counts = read_report(
            Path(urllib.parse.unquote(urllib.parse.urlparse(files["test.xml"]).path))
        )
    else:
        counts = Counts(0, 0, 0)
    # One that ran out of time, or crashed, has no case to show for it.
    if result["status"] != "PASSED" and counts.failed == 0:
        return counts._replace(failed=1)
    return counts


def count_events(lines: Iterable[str]) -> Counts:
    """The cases of all targets."""
    events = (dict(json.loads(line)) for line in lines)
    counts = [count_target(event["testResult"]) for event in events if "testResult" in event]
    return (
        Counts(*(sum(column) for column in zip(*counts, strict=True)))
        if counts
        else Counts(0, 0, 0)
    )


def main() -> None:
    """Prints the line."""
    events = COMMAND.operand
    try:
        counts = count_events(Path(events).read_text(encoding="utf-8").splitlines())
    except (ValueError, LookupError, TypeError, AttributeError, ElementTree.ParseError) as error:
        raise UserError(f"{events} is no list of Bazel's events ({error!r})") from error
    print(f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped")


if __name__ == "__main__":
    COMMAND.run(main)
