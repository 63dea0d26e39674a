"""The line that the Bazel part of the checks ends with."""

import json
from pathlib import Path

import pytest

from tools.bazel_results import Counts, count_events, main

REPORT = """<?xml version="1.0"?>
<testsuites>
  <testsuite name="one" tests="5" failures="1" errors="1" skipped="1" />
  <testsuite name="two" tests="2" failures="0" errors="0" />
</testsuites>
"""


def event(status: str, report: Path | None) -> str:
    outputs = [{"name": "test.log", "uri": "file:///nowhere/test.log"}]
    if report is not None:
        outputs.append({"name": "test.xml", "uri": report.as_uri()})
    return json.dumps({"testResult": {"status": status, "testActionOutput": outputs}})


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "test.xml"
    path.parent.mkdir()
    path.write_text(REPORT)
    return path


def test_the_cases_of_every_target_are_summed(report: Path) -> None:
    lines = [json.dumps({"started": {}}), event("FAILED", report), event("FAILED", report)]
    assert count_events(lines) == Counts(passed=8, failed=4, skipped=2)


def test_a_target_that_ran_out_of_time_counts_as_a_failure() -> None:
    assert count_events([event("TIMEOUT", None)]) == Counts(0, 1, 0)


def test_no_target_is_no_case() -> None:
    assert count_events([]) == Counts(0, 0, 0)


def test_the_line_stands_alone(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.json"
    events.write_text(event("FAILED", report) + "\n")
    main(str(events))
    assert capsys.readouterr().out == "4 passed, 2 failed, 1 skipped\n"
