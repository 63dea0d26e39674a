#!/usr/bin/env bash
# Creates or reuses .venv with the pinned packages of requirements.txt.
#
#   bash tools/setup_env.sh [--bazel] [--aot]
#
# --bazel  also sees to it that `bazel` is on PATH (Debian's bazel-bootstrap, where apt exists), and
#          puts buildifier, which checks BUILD files, into .venv (where npm exists).
# --aot    also installs what tools/compile_for_gpu.py needs (about 400 MB).
#
# XREX_PYTHON  the interpreter to build .venv with (default: python3; 3.11 or newer).
# XREX_VENV    the folder to build (default: .venv in the repository).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${XREX_VENV:-.venv}"
base="${XREX_PYTHON:-python3}"

fail() {
  echo "setup_env: $1" >&2
  exit 1
}

# Says what the environment lacks of a requirements file; fails if it lacks anything.
probe() { "$venv/bin/python" -I tools/bazel/probe_python.py --pinned="$1" 2>&1 >/dev/null; }

# Installs a requirements file unless what it pins is there, whatever happened to it since.
install_pinned() {
  local requirements="$1" lacks
  probe "$requirements" >/dev/null && return 0
  echo "setup_env: installing $requirements into $venv" >&2
  "$venv/bin/python" -c 'import pip' 2>/dev/null ||
    "$venv/bin/python" -m ensurepip >/dev/null ||
    fail "$venv has no pip, and ensurepip cannot put it there: delete $venv, then run this again"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}" -r "$requirements" ||
    fail "pip could not install $requirements (its message is above): check the network, then run this again"
  lacks="$(probe "$requirements")" ||
    fail "pip installed $requirements, and yet $lacks Delete $venv, then run this again"
  # A running Bazel looks at this file.
  touch "$venv/pyvenv.cfg"
}

# A venv of another Python version, or one whose interpreter has gone, is built anew; nothing else.
create_venv() {
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    fail "$venv is there, and is no virtual environment: set XREX_VENV to another folder"
  fi
  echo "setup_env: creating $venv with $("$base" --version)" >&2
  "$base" -m venv --clear "$venv" ||
    fail "'$base -m venv' failed (on Debian and Ubuntu: apt-get install python3-venv)"
}

install_bazel() {
  command -v apt-get >/dev/null ||
    fail "no bazel on PATH and no apt-get here: install Bazel 4.2 to 6 (or Bazelisk) and run this again"
  echo "setup_env: installing bazel-bootstrap" >&2
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends bazel-bootstrap; } >/dev/null ||
    fail "apt-get could not install bazel-bootstrap (as root?): install Bazel 4.2 to 6 and run this again"
}

# No Python package has buildifier; its npm package holds the binaries of every platform.
install_buildifier() {
  local version=8.2.1 sha256=b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee
  local target="$venv/bin/buildifier" scratch platform
  "$target" --version 2>/dev/null | grep -q "version: $version" && return 0
  if ! command -v npm >/dev/null; then
    echo "setup_env: no npm, so no buildifier: the format of BUILD files stays unchecked" >&2
    return 0
  fi
  case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) platform=linux_amd64 ;;
    Linux-aarch64) platform=linux_arm64 ;;
    Darwin-x86_64) platform=darwin_amd64 ;;
    Darwin-arm64) platform=darwin_arm64 ;;
    *) fail "buildifier has no binary for $(uname -s) on $(uname -m)" ;;
  esac
  echo "setup_env: installing buildifier $version into $venv" >&2
  scratch="$(mktemp -d)"
  (
    cd "$scratch" &&
      npm pack --silent "@bazel/buildifier@$version" >/dev/null &&
      echo "$sha256  bazel-buildifier-$version.tgz" | sha256sum --check --quiet &&
      tar -xzf "bazel-buildifier-$version.tgz" "package/buildifier-$platform"
  ) || fail "npm could not fetch buildifier $version (its message is above)"
  install -m 755 "$scratch/package/buildifier-$platform" "$target"
  rm -r "$scratch"
}

want_bazel=false
want_aot=false
for argument in "$@"; do
  case "$argument" in
    --bazel) want_bazel=true ;;
    --aot) want_aot=true ;;
    *) fail "unknown argument '$argument' (known: --bazel, --aot)" ;;
  esac
done

command -v "$base" >/dev/null ||
  fail "no interpreter '$base': install Python 3.11 or newer, or set XREX_PYTHON to one"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$base" --version) is too old: xrex needs Python 3.11 or newer; set XREX_PYTHON to one"

version_of() { "$1" -c 'import sys; print(sys.version_info[:3])' 2>/dev/null || true; }
[ "$(version_of "$venv/bin/python")" = "$(version_of "$base")" ] || create_venv

install_pinned requirements.txt
if $want_aot; then
  # --no-deps: the plugins ask for CUDA's runtime libraries, which compiling does not need.
  install_pinned requirements-aot.txt --no-deps
fi
if $want_bazel; then
  command -v bazel >/dev/null || install_bazel
  install_buildifier
fi
