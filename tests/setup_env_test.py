"""tools/setup_env.sh mends whatever a virtual environment lacks, and says so where it cannot.

Offline: pip takes a package of two versions from a folder.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("tools/setup_env.sh", "tools/bazel/probe_python.py")
INSTALLING = "setup_env: installing requirements.txt into .venv\n"


def write_wheel(folder: Path, version: str) -> None:
    """A package of one empty module, as pip installs it."""
    info = f"small-{version}.dist-info"
    files = {
        "small.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: small\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"small-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)


class Checkout:
    """A tree with the script, and requirements of one package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / ".venv" / "bin" / "python"
        for script in SCRIPTS:
            (root / script).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / script, root / script)
        (root / "wheels").mkdir()
        for version in ("1.0", "2.0"):
            write_wheel(root / "wheels", version)
        self.pin("1.0")

    def pin(self, version: str) -> None:
        other = f'small==0; python_version < "{sys.version_info[0]}.{sys.version_info[1]}"'
        pin = f'small=={version}; python_version >= "3.11"'
        (self.root / "requirements.txt").write_text(f"# Pins.\n{other}\n{pin}\n")

    def setup(self, **changed: str) -> subprocess.CompletedProcess[str]:
        """Runs the script."""
        environment = {
            "PATH": os.environ["PATH"],
            "XREX_PYTHON": sys.executable,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.root / "wheels"),
        }
        return subprocess.run(
            ["bash", self.root / "tools" / "setup_env.sh"],
            env=environment | changed,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def installed(self) -> str:
        """The package's version, as the environment's own interpreter sees it."""
        program = "import small; from importlib.metadata import version; print(version('small'))"
        run = subprocess.run([self.python, "-Ic", program], capture_output=True, text=True)
        return run.stdout.strip()

    def remove(self) -> None:
        """Takes the package out of the environment."""
        for found in self.root.glob(".venv/lib/python*/site-packages/small*"):
            shutil.rmtree(found) if found.is_dir() else found.unlink()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose environment is whole, or is mended by the test that breaks it.

    It begins as one without any package, pip included.
    """
    made = Checkout(tmp_path_factory.mktemp("checkout"))
    venv = made.root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    result = made.setup()
    assert (result.returncode, result.stderr) == (0, INSTALLING)
    assert made.installed() == "1.0"
    return made


def test_a_whole_environment_is_left_alone_in_silence(checkout: Checkout) -> None:
    result = checkout.setup(PIP_FIND_LINKS="/nowhere")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_what_was_removed_comes_back(checkout: Checkout) -> None:
    checkout.remove()
    before = (checkout.root / ".venv" / "pyvenv.cfg").stat().st_mtime_ns
    result = checkout.setup()
    assert (result.returncode, result.stderr) == (0, INSTALLING)
    assert checkout.installed() == "1.0"
    # What tells a running Bazel.
    assert (checkout.root / ".venv" / "pyvenv.cfg").stat().st_mtime_ns > before


def test_another_version_is_replaced(checkout: Checkout) -> None:
    checkout.pin("2.0")
    try:
        assert checkout.setup().stderr == INSTALLING
        assert checkout.installed() == "2.0"
    finally:
        checkout.pin("1.0")
        checkout.setup()
    assert checkout.installed() == "1.0"


def test_a_package_that_cannot_be_had_fails_every_time(checkout: Checkout) -> None:
    checkout.remove()
    for _ in range(2):
        result = checkout.setup(PIP_FIND_LINKS="/nowhere")
        assert result.returncode == 1
        assert "setup_env: pip could not install requirements.txt" in result.stderr
    assert checkout.setup().returncode == 0


def test_a_folder_that_is_no_environment_is_not_cleared(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").touch()
    result = checkout.setup(XREX_VENV=str(tmp_path))
    assert result.returncode == 1
    assert f"{tmp_path} is there, and is no virtual environment" in result.stderr
    assert (tmp_path / "precious.txt").exists()
