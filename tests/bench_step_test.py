"""The benchmark of a training step runs, at a size that says nothing of speed."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tools import bench_step
from tools.common.zipf import zipf_ids

FLAGS = ("--devices=2", "--vocab=1000", "--emb_width=16", "--tokens_per_batch=64", "--repeats=1")


def test_a_process_prints_its_ratios() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-m", "tools.bench_step", "--staleness=1", *FLAGS],
        # Most optimizations take longer than the steps that they speed up.
        env=environment | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ratios = re.findall(
        r"^(?:xrex / plain JAX|4 x the rows / once|all ids equal / Zipf) +(\d+\.\d+)$",
        run.stdout,
        re.M,
    )
    assert len(ratios) == 3, run.stdout
    assert run.stderr == ""


def test_a_synchronous_step_can_be_timed_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()  # Before the tool simulates fewer.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    bench_step.COMMAND.parse(["--staleness=0", *FLAGS])
    step = bench_step.xrex_step(bench_step.settings(), 1000, np.arange(64, dtype=np.int32))
    assert bench_step.median_seconds({"xrex": step}, 1)["xrex"] > 0


def test_zipf_ids_follow_the_law() -> None:
    ids = zipf_ids(np.random.default_rng(0), 100_000, 1000, 1.2)
    assert ids.min() >= 0
    assert ids.max() < 1000
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    np.testing.assert_allclose(counts[0] / counts[7], 8**1.2, rtol=0.15)
