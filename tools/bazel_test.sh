#!/usr/bin/env bash
# Builds every Bazel target, then runs tests with Bazel and counts their cases.
#
#   bash tools/bazel_test.sh [targets and arguments of bazel test]
#
# Without arguments: the tests that run in seconds on a CPU, and those of the layering.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_env.sh --bazel
[ $# -gt 0 ] || set -- //:cpu_tests //:layering_tests

events="$(mktemp)"
trap 'rm -f "$events"' EXIT

bazel build --config=ci //...
status=0
bazel test --config=ci --build_event_json_file="$events" "$@" || status=$?
"${XREX_VENV:-.venv}/bin/python" -m tools.bazel.results "$events"
exit "$status"
