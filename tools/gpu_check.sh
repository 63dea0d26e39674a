#!/usr/bin/env bash
# Checks and measures xrex on a machine with one NVIDIA GPU and no network; within 8 minutes.
#
#   bash tools/gpu_check.sh [file.json]
#
# Uses the Python at hand (XREX_PYTHON, or python3), which must have a JAX that sees the GPU, and
# pytest, hypothesis and optax. Writes one JSON file (default: out/gpu_check.json). Exit status: 0
# when all checks passed, whatever the speeds are; 1 when one failed; 2 when they cannot be run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${XREX_PYTHON:-python3}"
result="${1:-out/gpu_check.json}"
mkdir -p "$(dirname "$result")"

# Part of the memory would be reserved by the tests' process while the measurements need it.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_PLATFORMS=cuda,cpu

"$python" -c 'import jax; jax.devices("cuda")' 2>/dev/null || {
  echo "gpu_check: $python has no JAX that sees an NVIDIA GPU: install jax[cuda13] or set XREX_PYTHON" >&2
  exit 2
}

tests=passed
timeout 180 "$python" -m pytest -q -m requires_gpu tests/kernels_gpu_test.py || tests="failed ($?)"
timeout 270 "$python" -m tools.gpu_check --tests="$tests" --out="$result"
