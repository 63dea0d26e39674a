"""xrex's own workspace, in a copy that may be broken: its Python environment, and its layers."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bazel_runner import Bazel
from tools.bazel import probe_python

pytestmark = pytest.mark.bazel

ROOT = Path(__file__).resolve().parent.parent
COPIED = (".bazelrc", "BUILD", "WORKSPACE", "requirements.txt", "pallas_kernels", "tools/bazel")
PROGRAMS = """
load("@rules_python//python:defs.bzl", "py_binary", "py_test")

py_binary(name = "program", srcs = ["program.py"], legacy_create_init = 0)

py_test(name = "program_test", srcs = ["program.py"], main = "program.py", legacy_create_init = 0)
"""
# Fails unless the profile is the one that its argument names.
PROGRAM = "import os, sys\nassert [os.environ['XREX_PROFILE']] == sys.argv[1:], os.environ\n"
PINS = probe_python.pins((ROOT / "requirements.txt").read_text())
MEND = "Run: bash tools/setup_env.sh"


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """Bazel in a copy of the workspace, with a small program in place of tools and tests."""
    workspace = tmp_path_factory.mktemp("folder") / "workspace"
    for name in (*COPIED, "xrex"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, workspace / name)
    (workspace / "programs").mkdir()
    (workspace / "programs" / "BUILD").write_text(PROGRAMS)
    (workspace / "programs" / "program.py").write_text(PROGRAM)
    started = Bazel(workspace, tmp_path_factory.mktemp("bazel"))
    yield started
    started.shutdown()


def make_environment(venv: Path, installed: dict[str, str]) -> None:
    """A virtual environment, without pip, where these distributions seem to be installed."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", venv], check=True)
    for name, version in installed.items():
        install(venv, name, version)


def install(venv: Path, name: str, version: str) -> None:
    (packages,) = venv.glob("lib/python*/site-packages")
    info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def uninstall(venv: Path, name: str) -> None:
    for info in venv.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
        shutil.rmtree(info)


def build(bazel: Bazel, **environment: str) -> subprocess.CompletedProcess[str]:
    return bazel("build", "//programs:program", **environment)


def assert_lacks(result: subprocess.CompletedProcess[str], python: Path, missing: str) -> None:
    """The build failed with one message: the interpreter, what it lacks, what to do about it."""
    lacks = f"{python} (Python {sys.version.split()[0]}) lacks: {missing}"
    assert result.returncode != 0
    assert re.search(rf"^{re.escape(lacks)}.*\.\n{MEND}$", result.stderr, re.M), result.stderr
    for once in ("ERROR", " lacks: ", MEND):
        assert result.stderr.count(once) == 1, result.stderr
    assert "Traceback" not in result.stderr


def test_one_message_names_what_the_environment_lacks_until_it_is_mended(bazel: Bazel) -> None:
    """One server sees all of it: an environment that comes, loses packages, and gets them back."""
    bare = bazel.workspace.parent / "bare"
    make_environment(bare, {})
    assert_lacks(build(bazel, XREX_PYTHON=f"{bare}/bin/python"), bare / "bin/python", "absl-py, ")

    venv = bazel.workspace / ".venv"
    python = venv / "bin" / "python"
    make_environment(venv, {})
    first = next(f"{name}=={version}, " for name, version in PINS.items())
    assert_lacks(build(bazel), python, first)

    make_environment(venv, PINS)
    result = build(bazel)
    assert result.returncode == 0, result.stderr

    uninstall(venv, "optax")
    assert_lacks(build(bazel), python, f"optax=={PINS['optax']}")

    install(venv, "optax", "0.0.1")
    assert_lacks(build(bazel), python, f"optax=={PINS['optax']} (has 0.0.1)")

    uninstall(venv, "optax")
    install(venv, "optax", PINS["optax"])
    result = build(bazel)
    assert result.returncode == 0, result.stderr
    shutil.rmtree(venv)
    assert build(bazel, XREX_PYTHON=sys.executable).returncode == 0


def test_an_interpreter_that_does_not_run_is_named(bazel: Bazel, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    result = build(bazel, XREX_PYTHON=str(python))
    assert f"\n{python} does not run as Python 3.11 or newer.\n{MEND}\n" in result.stderr


def test_the_environment_may_be_beside_the_workspace(bazel: Bazel) -> None:
    beside = bazel.workspace.parent / "beside"
    missing = build(bazel, XREX_VENV="../beside")
    assert f"found no Python: {beside}/bin/python is not there." in missing.stderr
    assert missing.stderr.count(f"Run: XREX_VENV=../beside {MEND.removeprefix('Run: ')}") == 1
    make_environment(beside, {name: PINS[name] for name in PINS if name != "optax"})
    assert f"lacks: optax=={PINS['optax']}.\n" in build(bazel, XREX_VENV="../beside").stderr
    install(beside, "optax", PINS["optax"])
    result = build(bazel, XREX_VENV="../beside")
    assert result.returncode == 0, result.stderr


def test_the_profile_reaches_tests(bazel: Bazel) -> None:
    def run(command: str, profile: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"XREX_PYTHON": sys.executable, "XREX_PROFILE": profile}
        return bazel(command, "//programs:program_test", *arguments, **environment)

    assert run("test", "ci", "--test_arg=dev").returncode != 0
    result = run("test", "dev", "--test_arg=dev")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "(cached) PASSED" in run("test", "dev", "--test_arg=dev").stdout
    # Nothing that was analysed is thrown away by the next command.
    assert "discarding analysis cache" not in run("build", "dev", "--test_arg=dev").stderr
    result = run("test", "dev", "--config=thorough", "--test_arg=thorough")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("dependency", "refusal"),
    [("//xrex/layout", "is not visible from"), ("//:xrex", "cycle in dependency graph")],
)
def test_kernels_that_depend_on_xrex_are_refused(
    dependency: str, refusal: str, bazel: Bazel
) -> None:
    file = bazel.workspace / "pallas_kernels" / "BUILD"
    honest = file.read_text()
    target = '    srcs = ["reference.py"],\n'
    assert target in honest
    file.write_text(honest.replace(target, f'{target}    deps = ["{dependency}"],\n'))
    try:
        result = bazel("build", "--nobuild", "//pallas_kernels:reference")
    finally:
        file.write_text(honest)
    assert result.returncode != 0
    assert refusal in result.stderr
