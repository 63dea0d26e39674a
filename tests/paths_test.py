"""Relative paths of a tool's command line mean the caller's folder, under `bazel run` too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.common.paths import from_caller

ROOT = Path(__file__).resolve().parent.parent


def test_a_path_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    assert from_caller("out") == Path("out")
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", "/home/caller")
    assert from_caller("out") == Path("/home/caller/out")
    assert from_caller("../data.csv") == Path("/home/caller/../data.csv")
    assert from_caller("/tmp/out") == Path("/tmp/out")


def run_as_bazel(caller: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a tool in a folder that is not the caller's."""
    elsewhere = caller / "runfiles"
    elsewhere.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"BUILD_WORKING_DIRECTORY": str(caller), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command],
        cwd=elsewhere,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert list(elsewhere.iterdir()) == []
    return result


def test_train_reads_and_writes_the_callers_files(tmp_path: Path) -> None:
    """It makes its folder first, and then names the file that it cannot read."""
    result = run_as_bazel(tmp_path, "-m", "tools.train", "--data=no.csv", "--out=runs/one")
    assert result.returncode == 2
    assert f"{tmp_path}/no.csv" in result.stderr
    assert (tmp_path / "runs" / "one").is_dir()


def test_check_mesh_draws_into_the_callers_folder(tmp_path: Path) -> None:
    layout = (
        "--mesh=batch=2 --table_axis=batch --data_axis=batch --tokens_per_batch=8 --emb_width=8 "
        "--num_unique=8 --num_devices_per_node=2 --png=picture.png"
    )
    result = run_as_bazel(tmp_path, "-m", "tools.check_mesh", *layout.split())
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_gpu_check_writes_into_the_callers_folder(tmp_path: Path) -> None:
    program = """
from tools import gpu_check
gpu_check.training_step = lambda *_: {"same bits in two runs": True}
gpu_check.table_batched = gpu_check.measure_width = lambda *_: []
gpu_check.COMMAND.run(gpu_check.main)
"""
    result = run_as_bazel(tmp_path, "-c", program, "--small", "--out=found/gpu.json")
    assert result.returncode == 0, result.stderr
    assert "training step" in json.loads((tmp_path / "found" / "gpu.json").read_text())
