"""The benchmark of a training step runs, at a size that says nothing of speed."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tools.common.zipf import zipf_ids


@pytest.mark.parametrize("staleness", [0, 1])
def test_prints_its_ratios(staleness: int) -> None:
    run = subprocess.run(
        [
            sys.executable,
            *("-m", "tools.bench_step", f"--staleness={staleness}"),
            *("--vocab=1000", "--emb_width=16", "--tokens_per_batch=64", "--repeats=1"),
        ],
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


def test_zipf_ids_follow_the_law() -> None:
    ids = zipf_ids(np.random.default_rng(0), 100_000, 1000, 1.2)
    assert ids.min() >= 0
    assert ids.max() < 1000
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    np.testing.assert_allclose(counts[0] / counts[7], 8**1.2, rtol=0.15)
