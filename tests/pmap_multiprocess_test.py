"""pmap over two real processes that talk over gloo, two CPU devices each."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest

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
}
ERRORS = {
    "wrong_on_both": ("ValueError", "Specified axis_size 2 doesn't match received axis_size 2."),
    "absurd_on_one": ("ValueError", "doesn't match received axis_size 2."),
    "uneven_sizes": ("ValueError", "the same local_axis_size on every process"),
    "interleaved_devices": ("ValueError", "must be neighbours in `devices`"),
    "traced": ("NotImplementedError", "cannot run under jit, grad or vmap"),
    "global_array": ("ValueError", "an array of shape (2,) that spans processes"),
}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _run_both(cases: list[str]) -> list[dict[str, Any]]:
    """Runs the cases in two new processes; returns what each saw, by case."""
    flag = f"--xla_force_host_platform_device_count={LOCAL_DEVICES}"
    environment = os.environ | {
        "XLA_FLAGS": flag,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "tests/pmap_worker.py", ",".join(cases), str(_free_port()), "2"]
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
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
    """All cases that need no processes of their own, in one run."""
    return _run_both([*VALUES, *ERRORS, "bad_argument_on_one"])


@pytest.mark.parametrize("case", VALUES)
def test_values(seen: list[dict[str, Any]], case: str) -> None:
    for result, expected in zip(seen, VALUES[case], strict=True):
        if case in ("right_axis_size", "jax_pmap", "own_devices", "own_devices_traced"):
            expected = expected and pytest.approx(expected, abs=0, rel=1e-6)
        assert result[case] == {"value": expected}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(seen: list[dict[str, Any]], case: str) -> None:
    kind, text = ERRORS[case]
    for result in seen:
        assert result[case].get("error") == kind, result[case]
        assert text in result[case]["text"]


def test_global_and_local_sizes_are_explained(seen: list[dict[str, Any]]) -> None:
    for result in seen:
        notes = " ".join(result["wrong_on_both"]["notes"])
        assert "this process passed 2 entries, so 2 processes pass 4 together" in notes


def test_argument_that_one_process_rejects(seen: list[dict[str, Any]]) -> None:
    healthy, wrong = (result["bad_argument_on_one"] for result in seen)
    assert "args[0] over axis 0" in wrong["text"]
    assert healthy["text"] == "pmap was not launched: process 1 rejected its arguments."


def test_axis_size_wrong_on_one_process_is_an_error_on_both() -> None:
    """Both processes end within SECONDS, start included; neither waits for the other for ever."""
    results = _run_both(["wrong_on_one", "right_axis_size"])
    for result in results:
        text = "Specified axis_size 2 doesn't match received axis_size 2."
        assert result["wrong_on_one"]["text"] == text
        assert "value" in result["right_axis_size"]  # the processes can still work together
    healthy, _ = results
    assert "Process 1 rejected its arguments" in healthy["wrong_on_one"]["notes"][-1]
