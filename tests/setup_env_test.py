"""tools/setup_env.sh fixes what an environment lacks, and empties none that it was not told to.

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


def write_wheel(folder: Path, version: str, name: str = "small") -> None:
    """A package of one empty module, as pip installs it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)


# Stands in for the interpreter that makes environments: as it does, but with links to a pip that is
# there already, whose installation would take most of the tests' time.
BASE = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec "{python}" "$@"
shift 2
for venv; do :; done
"{python}" -m venv --without-pip "$@" && ln -s "{pip}"/pip* "$venv"/lib/python*/site-packages/
"""


class Checkout:
    """A tree with the script, and requirements of one package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / ".venv" / "bin" / "python"
        self.base = sys.executable
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

    def setup(self, *flags: str, **changed: str) -> subprocess.CompletedProcess[str]:
        """Runs the script; an empty XREX_PYTHON is as none."""
        environment = {
            "PATH": os.environ["PATH"],
            "XREX_PYTHON": self.base,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.root / "wheels"),
        }
        return subprocess.run(
            ["bash", self.root / "tools" / "setup_env.sh", *flags],
            env=environment | changed,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def lend_pip(self) -> None:
        """Gives the environment's pip to all that are made from here on."""
        (packages,) = self.root.glob(".venv/lib/python*/site-packages")
        base = self.root / "base_python"
        base.write_text(BASE.format(python=sys.executable, pip=packages))
        base.chmod(0o755)
        self.base = str(base)

    def make_venv(self, folder: Path, *flags: str) -> Path:
        """An environment as a user makes it, with something of the user's own."""
        subprocess.run([self.base, "-m", "venv", *flags, folder], check=True)
        (folder / "precious.txt").touch()
        return folder

    def installed(self, venv: Path | None = None) -> str:
        """The package's version, as the environment's own interpreter sees it."""
        program = "import small; from importlib.metadata import version; print(version('small'))"
        python = self.python if venv is None else venv / "bin" / "python"
        run = subprocess.run([python, "-Ic", program], capture_output=True, text=True)
        return run.stdout.strip()

    def remove(self) -> None:
        """Takes the package out of the environment."""
        for found in self.root.glob(".venv/lib/python*/site-packages/small*"):
            shutil.rmtree(found) if found.is_dir() else found.unlink()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose environment is whole, or is fixed by the test that breaks it.

    It begins as one without any package, pip included.
    """
    made = Checkout(tmp_path_factory.mktemp("checkout"))
    venv = made.root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    result = made.setup()
    assert (result.returncode, result.stderr) == (0, INSTALLING)
    assert made.installed() == "1.0"
    # This script had no pip to begin with, and put one there.
    made.lend_pip()
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


def test_another_version_is_replaced_or_its_lack_told_every_time(checkout: Checkout) -> None:
    checkout.pin("2.0")
    try:
        for _ in range(2):
            result = checkout.setup(PIP_FIND_LINKS="/nowhere")
            assert result.returncode == 1
            assert "setup_env: pip could not install requirements.txt" in result.stderr
        assert checkout.setup().stderr == INSTALLING
        assert checkout.installed() == "2.0"
    finally:
        checkout.pin("1.0")
        checkout.setup()
    assert checkout.installed() == "1.0"


MARK = ".made_by_xrex"
ELSEWHERE = "set XREX_VENV to another folder"


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def assert_refused(checkout: Checkout, venv: Path, *texts: str, **changed: str) -> None:
    """One message, and nothing in the folder is touched."""
    before = contents(venv)
    result = checkout.setup(**{"XREX_VENV": str(venv)} | changed)
    assert result.returncode == 1
    assert result.stderr.startswith("setup_env: ")
    assert result.stderr.count("\n") == 1
    for text in texts:
        assert text in result.stderr
    assert contents(venv) == before


def pretend_version(venv: Path, version: str) -> None:
    """Lets the environment's interpreter tell another version."""
    python = venv / "bin" / "python"
    python.unlink()
    major, minor = version.split(".")
    python.write_text(
        "#!/bin/sh\n"
        f'case "$2" in *"< (3, 11)"*) exit {int((int(major), int(minor)) < (3, 11))} ;;\n'
        f'*version_info*) echo {version} ;; *) exec "{sys.executable}" "$@" ;; esac\n'
    )
    python.chmod(0o755)


def test_what_it_makes_is_marked(checkout: Checkout) -> None:
    assert not (checkout.root / ".venv" / MARK).exists()  # the fixture made that one
    made = checkout.root / "deep" / "by name"
    # With an interpreter's own pip.
    assert checkout.setup(XREX_VENV="deep/by name", XREX_PYTHON=sys.executable).returncode == 0
    assert (made / MARK).exists()
    assert checkout.installed(made) == "1.0"
    assert checkout.setup(XREX_VENV=str(made)).stderr == ""


def test_what_was_left_half_made_is_finished(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / MARK).touch()
    assert checkout.setup(XREX_VENV=str(tmp_path)).returncode == 0
    assert checkout.installed(tmp_path) == "1.0"


def test_a_folder_that_is_no_environment_is_not_touched(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").touch()
    assert_refused(checkout, tmp_path, f"{tmp_path} is there, and is no virtual", ELSEWHERE)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/gone/python")
    assert_refused(checkout, tmp_path, f"{tmp_path} is there, and is no virtual", ELSEWHERE)
    result = checkout.setup("--recreate", XREX_VENV=str(tmp_path))
    assert (result.returncode, (tmp_path / "precious.txt").exists()) == (1, True)


def test_a_file_or_a_broken_link_in_its_place(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("file", "link"):
        for flags in ((), ("--recreate",)):
            result = checkout.setup(*flags, XREX_VENV=str(tmp_path / name))
            assert result.returncode == 1
            assert f"{tmp_path / name} is there, and is no folder: {ELSEWHERE}" in result.stderr
    assert not (tmp_path / "gone").exists()


def test_a_conda_environment_is_never_emptied(checkout: Checkout, tmp_path: Path) -> None:
    venv = checkout.make_venv(tmp_path / "conda")
    (venv / "conda-meta").mkdir()
    for config in (True, False):
        if not config:
            (venv / "pyvenv.cfg").unlink()
        assert_refused(checkout, venv, "lacks: small==1.0.", "run it again with --install")
        result = checkout.setup("--recreate", XREX_VENV=str(venv))
        assert result.returncode == 1
        assert "is a conda environment, which this script does not empty" in result.stderr
        assert (venv / "precious.txt").exists()


def test_a_users_environment_gets_packages_only_when_told(
    checkout: Checkout, tmp_path: Path
) -> None:
    venv = tmp_path / "link"
    venv.symlink_to(checkout.make_venv(tmp_path / "of a user"))
    assert_refused(checkout, venv, f"This script did not make {venv}: run it again with --install")
    result = checkout.setup("--install", XREX_VENV=str(venv))
    assert (result.returncode, checkout.installed(venv)) == (0, "1.0")
    # It is whole now, and used as it is.
    result = checkout.setup(XREX_VENV=str(venv), XREX_PYTHON="")
    assert (result.returncode, result.stderr) == (0, "")
    assert (venv / "precious.txt").exists()
    assert not (venv / MARK).exists()


def test_another_pythons_environment(checkout: Checkout, tmp_path: Path) -> None:
    """Used where its packages are there and XREX_PYTHON asks for nothing else; never emptied."""
    venv = checkout.make_venv(tmp_path / "venv")
    (venv / MARK).touch()
    pretend_version(venv, "3.99")
    found = "was made by Python 3.99, and XREX_PYTHON="
    assert_refused(checkout, venv, found, ELSEWHERE, "--recreate", "leave XREX_PYTHON out")
    checkout.pin("3.0")  # which cannot be had: the script goes as far as to install it
    result = checkout.setup(XREX_VENV=str(venv), XREX_PYTHON="")
    checkout.pin("1.0")
    assert "installing requirements.txt" in result.stderr
    assert (venv / "precious.txt").exists()


def test_an_old_pythons_environment_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    venv = checkout.make_venv(tmp_path / "venv")
    pretend_version(venv, "3.10")
    found = "was made by Python 3.10, and xrex needs 3.11 or newer"
    assert_refused(checkout, venv, found, ELSEWHERE, "--recreate", XREX_PYTHON="")


def test_told_so_it_empties_an_environment(checkout: Checkout, tmp_path: Path) -> None:
    venv = checkout.make_venv(tmp_path / "venv")
    pretend_version(venv, "3.99")
    result = checkout.setup("--recreate", XREX_VENV=str(venv))
    assert (result.returncode, checkout.installed(venv)) == (0, "1.0")
    assert not (venv / "precious.txt").exists()
    assert (venv / MARK).exists()


@pytest.mark.parametrize("made_by", ["mark", "earlier version", "user"])
def test_an_interpreter_that_has_gone(checkout: Checkout, tmp_path: Path, made_by: str) -> None:
    venv = checkout.make_venv(
        tmp_path / "venv", *(["--clear"] if made_by == "earlier version" else [])
    )
    if made_by == "mark":
        (venv / MARK).touch()
    if made_by == "earlier version":  # which gave this flag alone
        config = venv / "pyvenv.cfg"
        config.write_text(config.read_text().replace(" --without-pip", ""))
    for name in ("python", "python3"):
        (venv / "bin" / name).unlink()
        (venv / "bin" / name).symlink_to("/gone/python")
    if made_by == "user":
        assert_refused(checkout, venv, "bin/python does not run", ELSEWHERE, "--recreate")
        return
    assert checkout.setup(XREX_VENV=str(venv)).returncode == 0
    assert checkout.installed(venv) == "1.0"


def test_what_compiles_for_gpus_lies_beside_the_packages(checkout: Checkout) -> None:
    """And a plugin without its libraries, from an earlier version, goes from among them."""
    (checkout.root / "requirements-aot.txt").write_text("small==2.0\n")
    (packages,) = checkout.root.glob(".venv/lib/python*/site-packages")
    (packages / "jax_cuda13_plugin").mkdir()
    (packages / "nvidia_cudnn_cu13").mkdir()  # its libraries: the user's own
    assert checkout.setup("--aot").returncode == 0
    assert checkout.installed() == "1.0"
    assert (checkout.root / ".venv" / "xrex_aot" / "small-2.0.dist-info").exists()
    assert (packages / "jax_cuda13_plugin").exists()
    assert checkout.setup("--aot").stderr == ""
    (packages / "jax_cuda13_plugin").rmdir()
    (packages / "nvidia_cudnn_cu13").rmdir()
    write_wheel(checkout.root / "wheels", "0.13", "jax_cuda13_plugin")
    pip = [checkout.python, "-m", "pip", "install", "--quiet", "--no-index"]
    wheels = checkout.root / "wheels"
    subprocess.run([*pip, "--find-links", wheels, "jax_cuda13_plugin"], check=True)
    assert "removing the CUDA plugin" in checkout.setup().stderr
    assert not (packages / "jax_cuda13_plugin").exists()
    assert checkout.setup().stderr == ""


def test_an_unknown_flag(checkout: Checkout) -> None:
    result = checkout.setup("--all")
    assert result.returncode == 1
    assert "unknown argument '--all' (known: --bazel, --aot, --install, --rec" in result.stderr
