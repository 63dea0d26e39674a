"""The packages as others import and install them. What may import what is in layering_test.py."""

import importlib.metadata
import inspect
import json
import os
import pathlib
import pkgutil
import shutil
import subprocess
import sys
import zipfile

import pytest

import pallas_kernels
import xrex

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = (xrex, pallas_kernels)
MODULES = sorted(
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


def run_python(program: str, cwd: pathlib.Path, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_and_planning_touch_no_device() -> None:
    """Every module, where JAX has no platform at all, and a layout for 131,072 devices."""
    program = f"""
import importlib, jax
for name in {MODULES}:
    importlib.import_module(name)
import xrex
mesh = jax.sharding.AbstractMesh((131072,), ("x",))
xrex.make_context_handle(mesh, "x", data_axis="x", tokens_per_batch=131072, emb_width=131072,
                         num_unique=1, num_devices_per_node=8)
try:
    jax.devices()
except RuntimeError:
    print("a device would have been an error")
"""
    assert "would have been" in run_python(program, ROOT, JAX_PLATFORMS="nowhere")


# Names


def test_public_names_are_explicit() -> None:
    assert sorted(xrex.__all__) == xrex.__all__
    public = {
        name
        for name, value in vars(xrex).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(xrex.__all__)


@pytest.mark.parametrize("name", xrex.__all__)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(xrex, name)
    assert value.__module__.startswith("xrex.")
    assert inspect.getdoc(value)


def test_the_version_is_the_packages() -> None:
    assert f'version = "{xrex.__version__}"' in (ROOT / "pyproject.toml").read_text()


# Installing


def _setuptools() -> int:
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return 0
    return int(version.split(".")[0])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy, so that nothing is left behind in the tree; without the network."""
    if _setuptools() < 77:
        pytest.skip("building a wheel without the network needs setuptools 77 or newer")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("xrex", "pallas_kernels", "tools", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(out), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("xrex-*-py3-none-any.whl")
    return path


def test_the_wheel_holds_the_typed_packages_and_nothing_else(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"xrex/py.typed", "pallas_kernels/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "xrex",
        "pallas_kernels",
    }
    shipped = {name for name in names if name.endswith(".py")}
    sources = (
        path for folder in PACKAGES for path in pathlib.Path(folder.__path__[0]).rglob("*.py")
    )
    assert shipped == {path.relative_to(ROOT).as_posix() for path in sources}


def test_it_installs_and_works_from_elsewhere(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    program = """
import json, jax, numpy as np, xrex
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
handle = xrex.make_context_handle(mesh, "x", data_axis="x", tokens_per_batch=2, emb_width=2,
                                  num_unique=2, num_devices_per_node=2)
pin = xrex.lookup_start(handle, [1, 0], np.arange(4, dtype=np.float32).reshape(2, 2))
print(json.dumps([xrex.__file__, xrex.lookup_done(handle, pin).tolist()]))
"""
    out = run_python(program, tmp_path, PYTHONPATH=str(tmp_path / "site"), JAX_PLATFORMS="cpu")
    file, rows = json.loads(out)
    assert pathlib.Path(file).is_relative_to(tmp_path)
    assert rows == [[2, 3], [0, 1]]
