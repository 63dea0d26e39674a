#!/usr/bin/env bash
# Runs the whole suite: formatting, lint and types, then every test that needs no GPU.
#
#   bash tools/test.sh [pytest arguments]
#
# Creates or reuses .venv; XREX_PYTHON and XREX_VENV choose another interpreter and folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_env.sh
bin="${XREX_VENV:-.venv}/bin"

"$bin/ruff" check --quiet .
"$bin/ruff" format --quiet --check .
"$bin/mypy"
exec "$bin/python" -m pytest --numprocesses=2 --dist=worksteal -q -rs "$@"
