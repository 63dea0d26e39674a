"""The script for a machine with a GPU says so where there is none."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_gpu_check_without_a_gpu_ends_with_one_message(tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash", ROOT / "tools" / "gpu_check.sh", tmp_path / "result.json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XREX_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert run.returncode == 2
    assert "sees an NVIDIA GPU" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "result.json").exists()
