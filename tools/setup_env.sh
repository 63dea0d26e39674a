#!/usr/bin/env bash
# Creates or reuses .venv with the pinned packages of requirements.txt.
#
#   bash tools/setup_env.sh [--bazel] [--aot] [--install] [--recreate]
#
# --bazel     also sees to it that `bazel` is on PATH (Debian's bazel-bootstrap, where apt exists), and
#             puts buildifier, which checks BUILD files, into .venv (where npm exists).
# --aot       also installs what tools/compile_for_gpu.py needs (about 400 MB), into .venv/xrex_aot: only
#             that tool and the tests look there, so that no other program loads JAX's CUDA plugin.
# --install   installs also into an environment that this script did not make.
# --recreate  empties the environment, whoever made it, and builds it anew with $XREX_PYTHON.
#
# XREX_PYTHON  the interpreter to build .venv with (default: python3; 3.11 or newer).
# XREX_VENV    the folder, absolute or from the repository (default: .venv).
#
# An environment that is there is used with its own interpreter; if XREX_PYTHON asks for another
# version, that is an error. Nothing is emptied without --recreate. Packages are installed only into
# the repository's .venv and into what this script made, which has a file .made_by_xrex (or, made by
# an earlier version, was begun with `venv --clear`); the environment's other packages stay. One that
# this script made and whose interpreter has gone is built anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${XREX_VENV:-.venv}"
base="${XREX_PYTHON:-python3}"
mark="$venv/.made_by_xrex"
python="$venv/bin/python"

fail() {
  echo "setup_env: $1" >&2
  exit 1
}

# Says what a folder, or the environment, lacks of a requirements file; fails if it lacks anything.
probe() { "$python" -I tools/bazel/probe_python.py --pinned="$1" ${2:+--path="$2"} 2>&1 >/dev/null; }

# Installs a requirements file unless what it pins is there, whatever happened to it since.
install_pinned() {
  local requirements="$1" folder="${2:-}" lacks
  lacks="$(probe "$requirements" "$folder")" && return 0
  may_install ||
    fail "$lacks This script did not make $venv: run it again with --install to put the pinned packages there, or set XREX_VENV to another folder"
  echo "setup_env: installing $requirements into ${folder:-$venv}" >&2
  "$python" -c 'import pip' 2>/dev/null ||
    "$python" -m ensurepip >/dev/null ||
    fail "$venv has no pip, and ensurepip cannot put it there: run this again with --recreate"
  # A folder of its own is filled anew: pip would keep what lies there.
  [ -z "$folder" ] || rm -rf "$folder"
  # --no-deps: the plugins ask for CUDA's runtime libraries, which compiling does not need.
  "$python" -m pip install --quiet --disable-pip-version-check ${folder:+--no-deps --target "$folder"} \
    -r "$requirements" ||
    fail "pip could not install $requirements (its message is above): check the network, then run this again"
  lacks="$(probe "$requirements" "$folder")" ||
    fail "pip installed $requirements, and yet $lacks Run this again with --recreate"
  # A running Bazel looks at this file.
  [ ! -e "$venv/pyvenv.cfg" ] || touch "$venv/pyvenv.cfg"
}

# Earlier versions of this script installed the CUDA plugin among the environment's packages, without
# the libraries that it needs to run: each start of JAX then printed an error.
remove_plugin_without_libraries() {
  local packages
  for packages in "$venv"/lib/python*/site-packages; do
    if [ -d "$packages/jax_cuda13_plugin" ] && ! compgen -G "$packages/nvidia_cudnn_*" >/dev/null; then
      echo "setup_env: removing the CUDA plugin from $packages (--aot puts it into $venv/xrex_aot)" >&2
      "$python" -m pip uninstall --quiet --yes --disable-pip-version-check \
        jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm >&2 ||
        fail "pip could not remove the CUDA plugin (its message is above)"
    fi
  done
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }

is_ours() {
  [ -e "$mark" ] || grep -qs '^command = .* -m venv --clear ' "$venv/pyvenv.cfg"
}
may_install() {
  $want_install || is_ours || [ -z "${XREX_VENV:-}" ]
}

check_base() {
  command -v "$base" >/dev/null ||
    fail "no interpreter '$base': install Python 3.11 or newer, or set XREX_PYTHON to one"
  is_new_enough "$base" ||
    fail "$("$base" --version) is too old: xrex needs Python 3.11 or newer; set XREX_PYTHON to one"
}

# Fills the folder, emptying it first if $1 says so.
create_venv() {
  check_base
  echo "setup_env: creating $venv with $("$base" --version)" >&2
  # Marked first: what stops half-way is still this script's.
  { mkdir -p "$venv" && touch "$mark"; } || fail "$venv cannot be written to: set XREX_VENV to another folder"
  "$base" -m venv "$@" "$venv" ||
    fail "'$base -m venv' failed (on Debian and Ubuntu: apt-get install python3-venv)"
  touch "$mark"
}

# Leaves an environment whose interpreter runs, is new enough and is what XREX_PYTHON asks for.
find_or_create_venv() {
  local how="set XREX_VENV to another folder" found wanted
  if { [ -e "$venv" ] || [ -L "$venv" ]; } && [ ! -d "$venv" ]; then
    fail "$venv is there, and is no folder: $how"
  elif [ -z "$(ls -A "$venv" 2>/dev/null)" ] || { [ -e "$mark" ] && [ ! -e "$venv/pyvenv.cfg" ]; }; then
    create_venv
  elif [ -d "$venv/conda-meta" ] && $want_recreate; then
    fail "$venv is a conda environment, which this script does not empty: $how"
  elif [ ! -e "$venv/pyvenv.cfg" ] && { $want_recreate || ! found="$(version_of "$python")"; }; then
    fail "$venv is there, and is no virtual environment: $how"
  elif $want_recreate || { is_ours && [ ! -e "$python" ]; }; then
    create_venv --clear
  fi
  found="$(version_of "$python")" ||
    fail "$venv is there, and its interpreter $python does not run: $how, or run this again with --recreate, which empties it"
  is_new_enough "$python" ||
    fail "$venv was made by Python $found, and xrex needs 3.11 or newer: $how, or run this again with --recreate, which empties it"
  [ -n "${XREX_PYTHON:-}" ] || return 0
  check_base
  wanted="$(version_of "$base")"
  [ "$found" = "$wanted" ] ||
    fail "$venv was made by Python $found, and XREX_PYTHON=$base is Python $wanted: $how, or leave XREX_PYTHON out, or run this again with --recreate, which empties it"
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
want_install=false
want_recreate=false
for argument in "$@"; do
  case "$argument" in
    --bazel) want_bazel=true ;;
    --aot) want_aot=true ;;
    --install) want_install=true ;;
    --recreate) want_recreate=true ;;
    *) fail "unknown argument '$argument' (known: --bazel, --aot, --install, --recreate)" ;;
  esac
done

find_or_create_venv
install_pinned requirements.txt
if may_install; then remove_plugin_without_libraries; fi
if $want_aot; then install_pinned requirements-aot.txt "$venv/xrex_aot"; fi
if $want_bazel; then
  command -v bazel >/dev/null || install_bazel
  install_buildifier
fi
