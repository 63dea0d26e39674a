"""The line that the Bazel part of the checks ends with."""

import json
from pathlib import Path

import pytest

from tools.bazel import results
from tools.bazel.results import Counts, count_events
from tools.common import command

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
    status = results.COMMAND.status(results.main, [str(events)])
    assert status == command.DONE
    assert capsys.readouterr().out == "4 passed, 2 failed, 1 skipped\n"


@pytest.mark.parametrize(
    "text", ["no JSON", "[1]\n", "3\n", '{"testResult": 3}\n', '{"testResult": {}}\n', "\x00"]
)
def test_what_is_no_list_of_events_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.json"
    events.write_text(text)
    assert results.COMMAND.status(results.main, [str(events)]) == command.UNUSABLE
    assert f"{events} is no list of Bazel's events" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_a_file_that_cannot_be_read_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results.COMMAND.status(results.main, [str(tmp_path / name)]) == command.UNUSABLE
    assert str(tmp_path / name) in capsys.readouterr().err
