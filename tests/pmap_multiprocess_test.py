"""pmap over two and three real processes that talk over gloo, two CPU devices each."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest

from xrex.checked_pmap import together

pytestmark = pytest.mark.multiprocess

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 60  # within which everything ends, errors above all
LOCAL_DEVICES = 2

# Cases that end in the same way on both processes: the value of each, or the error and its text.
VALUES = {
    "right_axis_size": [[0.0, 1 / 6], [2 / 6, 3 / 6]],
    "no_axis_size": [
        {"each": [1.0, 12.0], "total": 6.0},
        {"each": [23.0, 34.0], "total": 6.0},
    ],
    "jax_pmap": [[0.0, 1 / 6], [2 / 6, 3 / 6]],
    "gradient_inside": [[0.0, 8.0], [16.0, 24.0]],
    "fewer_entries": [[[2.0], [0]], [[2.0], [1]]],
    "all_devices_backwards": [[2.0, 13.0], [20.0, 31.0]],
    "own_devices": [[1 / 3, 2 / 3], None],
    "own_devices_traced": [[1 / 3, 2 / 3], None],
    "donated": [[[1.0, 2.0], True], [[3.0, 4.0], True]],
    "lowered": [[4], [4]],
    "lowered_on_one": [None, [4]],
    "made_again_on_one": [[0.0, 1 / 6], [2 / 6, 3 / 6]],
    "traced_once": [1, 1],
    "many_calls": [[0.0, 1 / 6], [2 / 6, 3 / 6]],
}
ERRORS = {
    "wrong_on_both": ("ValueError", "Specified axis_size 2 doesn't match received axis_size 2."),
    "absurd_on_one": ("ValueError", "doesn't match received axis_size 2."),
    "wrong_on_one": ("ValueError", "Specified axis_size 2 doesn't match received axis_size 2."),
    "bad_argument_on_one": ("ValueError", "pmap cannot map args[0] over axis 0: it has rank 0"),
    "wrong_deadline": ("ValueError", "must be a positive number of seconds, got 'soon'"),
    "other_names": (
        "ValueError",
        "the same function on every process, but got process 0: __main__._same_share; "
        "process 1: __main__._share.",
    ),
    "depends_on_process": ("ValueError", "the same traced program on every process"),
    "uneven_sizes": (
        "ValueError",
        "pmap needs the same local_axis_size on every process, but got process 0: 2; process 1: 1.",
    ),
    "interleaved_devices": ("ValueError", "must be neighbours in `devices`"),
    "traced": ("NotImplementedError", "cannot run under jit, grad or vmap"),
    "global_array": ("ValueError", "an array of shape (2,) that spans processes"),
}


# Cases with a good call, one on which the processes do not agree, and the good one again: what the
# second said on process 0, and on the others.
REJECTED = "pmap was not launched: process {} rejected its call: "
LATER = {
    "later_contradiction_and_new_size": (
        "pmap got arguments whose mapped axes differ in size: args[0] has 1 entries along axis 0",
        REJECTED.format(0) + "ValueError: pmap got arguments whose mapped axes differ in size",
    ),
    "later_cached_and_bad": (
        REJECTED.format(1) + "ValueError: pmap cannot map args[0] over axis 0",
        "pmap cannot map args[0] over axis 0: it has rank 0",
    ),
    "later_cached_and_new": (
        "the same args[0] on every process, but got process 0: float32[{0}] mapped over axis 0; "
        "{1}: float32[{0},1] mapped over axis 0.",
    ),
    "later_dtypes": (
        "the same args[0] on every process, but got process 0: float32[{0}] mapped over axis 0; "
        "{1}: float16[{0}] mapped over axis 0.",
    ),
    "later_static": (
        "the same static argument 1 on every process, but got process 0: tuple(1.0, ",
    ),
    "later_number": (REJECTED.format(1) + "OverflowError: ", "with value 1099511627776"),
    "later_deleted": (REJECTED.format(1) + "RuntimeError: ", "Array has been deleted"),
    "later_raises_while_traced": (
        REJECTED.format(1) + "KeyError: 'not this shape'",
        "'not this shape'",
    ),
    "later_mesh_set": (
        REJECTED.format(1) + "ValueError: pmap cannot be called under jax.set_mesh",
        "pmap cannot be called under jax.set_mesh",
    ),
}


LEFT_OUT = ("call_left_out", "last_call_left_out")
COUNT = 3  # processes: more than one sees what another did wrong


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _run_all(cases: list[str], count: int = 2) -> list[dict[str, Any]]:
    """Runs the cases in `count` new processes; returns what each saw, by case."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={LOCAL_DEVICES}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    port = str(_free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "tests/pmap_worker.py", ",".join(cases), port, str(count), str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """All cases in two processes, in one run."""
    return _run_all([*VALUES, *ERRORS, "other_order"])


@pytest.fixture(scope="module")
def seen_by_three() -> list[dict[str, Any]]:
    """The cases of later calls in three processes, in one run.

    Last those in which one leaves a call out: it takes them seconds to tell.
    """
    return _run_all([*LATER, *LEFT_OUT], count=COUNT)


@pytest.mark.parametrize("case", VALUES)
def test_values(seen: list[dict[str, Any]], case: str) -> None:
    for result, expected in zip(seen, VALUES[case], strict=True):
        if isinstance(expected, list) and isinstance(expected[0], float):
            expected = pytest.approx(expected, abs=0, rel=1e-6)
        assert result[case] == {"value": expected}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(seen: list[dict[str, Any]], case: str) -> None:
    kind, text = ERRORS[case]
    for result in seen:
        assert result[case].get("error") == kind, result[case]
        assert text in result[case]["text"]


def test_the_rejected_process_gets_its_own_error(seen: list[dict[str, Any]]) -> None:
    for case in ("wrong_on_one", "bad_argument_on_one", "wrong_deadline"):
        healthy, wrong = (result[case] for result in seen)
        assert healthy["text"] == f"{REJECTED.format(1)}ValueError: {wrong['text']}"
        assert "Process 1 rejected call 1 of __main__._share" in wrong["notes"][-1]


@pytest.mark.parametrize("case", LATER)
def test_a_later_call_is_an_error_on_all(seen_by_three: list[dict[str, Any]], case: str) -> None:
    """Within seconds, and the processes can still work together."""
    assert len(seen_by_three) == COUNT
    for rank, result in enumerate(seen_by_three):
        first, error, last = result[case]["value"]
        assert first == last
        assert error["seconds"] < 10
        expected = LATER[case][min(rank, len(LATER[case]) - 1)]
        told = expected.replace("{0}", str(LOCAL_DEVICES * COUNT))
        assert told.replace("{1}", "processes 1, 2") in error["text"]


def test_functions_in_another_order(seen: list[dict[str, Any]]) -> None:
    """Both are lambdas of one function, with the same arguments: only the programs differ."""
    for result in seen:
        for error in result["other_order"]["value"]:
            assert "pmap needs the same traced program on every process" in error["text"]
            assert "called in the same order" in error["notes"][0]


def test_global_and_local_sizes_are_explained(seen: list[dict[str, Any]]) -> None:
    for result in seen:
        notes = " ".join(result["wrong_on_both"]["notes"])
        assert "this process passed 2 entries, so 2 processes pass 4 together" in notes


def test_a_call_left_out_is_an_error_on_the_others(seen_by_three: list[dict[str, Any]]) -> None:
    """It names the process that did not come, which gets one as well when it comes after all."""
    for rank, result in enumerate(seen_by_three):
        error, last = result["call_left_out"]["value"]
        assert error["error"] == "TimeoutError"
        text = "process 1 did not come to call 2 of __main__._share within 2 s, and process "
        assert text in error["text"]
        assert "XREX_PMAP_SECONDS" in error["notes"][-1]
        assert last == pytest.approx(_shares(rank, COUNT))
        assert error["seconds"] < 10
        if rank == 1:
            assert result["last_call_left_out"] == {"value": None}
        else:
            assert result["last_call_left_out"]["error"] == "TimeoutError"
            assert text in result["last_call_left_out"]["text"]


def _shares(rank: int, count: int) -> list[float]:
    """What `_share` gives process `rank` of `count`, of 0, 1, 2, ..."""
    total = LOCAL_DEVICES * count * (LOCAL_DEVICES * count - 1) / 2
    return [(LOCAL_DEVICES * rank + entry) / total for entry in range(LOCAL_DEVICES)]


def test_the_deadline_leaves_time_to_start() -> None:
    """A process that waits in its first call raises within SECONDS, too."""
    assert together.DEADLINE_SECONDS <= SECONDS / 2
