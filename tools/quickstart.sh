#!/usr/bin/env bash
# Trains a recommender on MovieLens-100K, its table sharded over eight simulated devices (or over
# the GPUs that are there).
#
#   bash tools/quickstart.sh [flags of tools/train.py]
#
# Creates or reuses .venv; XREX_PYTHON and XREX_VENV choose another interpreter and folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_env.sh
exec "${XREX_VENV:-.venv}/bin/python" -m tools.train "$@"
