"""BUILD files tell the truth: one target per module, its imports as `deps`, its markers as `tags`.

BUILD files are Python to the parser, so `ast` reads them.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("pallas_kernels", "tests", "tools", "xrex")
# Folders whose Python files are no modules: Bazel's own scripts, and another workspace.
NOT_PACKAGES = ("tools/bazel", "tests/consumer_workspace")
RULES = ("py_binary", "py_library", "pytest_test")
# Packages whose target promises every module of theirs.
WHOLE = (
    "pallas_kernels",
    "xrex",
    "xrex/checked_pmap",
    "xrex/embeddings",
    "xrex/rules",
    "xrex/training",
)
# Markers of tests that `bazel test //...` leaves out.
MANUAL = {"bazel", "requires-gpu"}
# Tags that say how Bazel runs a test, not what it is.
ABOUT_RUNNING = {"exclusive", "manual"}


class Target(NamedTuple):
    """One target of a BUILD file; attributes that are not literals are missing."""

    folder: str
    rule: str
    attributes: dict[str, Any]

    @property
    def label(self) -> str:
        return label_of(self.folder, self.attributes["name"])

    @property
    def sources(self) -> list[str]:
        return [f"{self.folder}/{source}" for source in self.attributes.get("srcs", [])]

    @property
    def dependencies(self) -> set[str]:
        return {
            label_of(self.folder, dep[1:]) if dep.startswith(":") else dep
            for dep in self.attributes.get("deps", [])
        }


def label_of(folder: str, name: str) -> str:
    return f"//{folder}" if folder.endswith(f"/{name}") or folder == name else f"//{folder}:{name}"


def packages(root: Path) -> list[str]:
    """Every folder that has Python modules, from the root."""
    files = [file for top in TOPS for file in (root / top).rglob("*.py")]
    folders = {file.parent.relative_to(root).as_posix() for file in files}
    return sorted(folder for folder in folders if not folder.startswith(NOT_PACKAGES))


def read_targets(root: Path, folder: str, rules: tuple[str, ...] = RULES) -> list[Target]:
    """The targets of a folder's BUILD file that are made by one of the rules."""
    targets = []
    for statement in ast.parse((root / folder / "BUILD").read_text()).body:
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
            continue
        call = statement.value
        if isinstance(call.func, ast.Name) and call.func.id in rules:
            literals = {}
            for keyword in call.keywords:
                try:
                    literals[str(keyword.arg)] = ast.literal_eval(keyword.value)
                except ValueError:
                    continue
            targets.append(Target(folder, call.func.id, literals))
    return targets


def imported_names(module: ast.Module) -> Iterator[str]:
    """Every dotted name that a module may mean by an import, functions' own imports included."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(source: str) -> str:
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(root: Path, target: Target, by_module: dict[str, Target]) -> set[str]:
    """Labels of what a target's sources import."""
    found = set()
    for source in target.sources:
        for name in imported_names(ast.parse((root / source).read_text())):
            owner = by_module.get(name) or by_module.get(name.rpartition(".")[0])
            if owner is not None and owner.label != target.label:
                found.add(owner.label)
    return found


def markers_of(root: Path, target: Target) -> set[str]:
    """The project's markers in a target's sources, as tags; `cpu` where there is none."""
    registered = {
        line.partition(":")[0]
        for line in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"][
            "ini_options"
        ]["markers"]
    }
    used = {
        node.attr.replace("_", "-")
        for source in target.sources
        for node in ast.walk(ast.parse((root / source).read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in registered
        and ast.unparse(node.value) == "pytest.mark"
    }
    return used or {"cpu"}


def reached_from(label: str, targets: dict[str, Target]) -> set[str]:
    """A target and all that it depends on."""
    reached, new = set(), {label}
    while new:
        reached |= new
        new = {dep for name in new if name in targets for dep in targets[name].dependencies}
        new -= reached
    return reached


def expected_rule(root: Path, target: Target) -> str:
    """pytest_test for tests, py_binary for what can be run of the tools, else py_library."""
    if any(source.endswith("_test.py") for source in target.sources):
        return "pytest_test"
    texts = [(root / file).read_text() for file in target.sources if (root / file).exists()]
    is_program = any('if __name__ == "__main__"' in text for text in texts)
    return "py_binary" if is_program and target.folder == "tools" else "py_library"


def has_tests(root: Path, file: str) -> bool:
    """Whether a module is meant to be collected by pytest, by its name or by what it defines."""
    if Path(file).name.startswith("test_"):
        return True
    return any(
        (isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
        or (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        for node in ast.parse((root / file).read_text()).body
    )


def audit_files(root: Path, folder: str, targets: list[Target]) -> Iterator[str]:
    """Every module in one target, named after it; no target without its files."""
    files = {file.relative_to(root).as_posix() for file in (root / folder).glob("*.py")}
    listed = [source for target in targets for source in target.sources]
    for file in sorted(files - set(listed)):
        yield f"{file}: no target in {folder}/BUILD; add one"
    for file in sorted(files):
        if not file.endswith("_test.py") and has_tests(root, file):
            yield f"{file}: pytest collects files named x_test.py, not its tests; rename it"
    for source in sorted(set(listed)):
        if source not in files:
            yield f"{folder}/BUILD: {source} does not exist"
        elif listed.count(source) > 1:
            yield f"{folder}/BUILD: {source} is in {listed.count(source)} targets"
    for target in targets:
        stems = {Path(source).stem for source in target.sources} | {Path(folder).name}
        if target.attributes["name"] not in stems:
            yield f"{target.label}: name it after its file"
        expected = expected_rule(root, target)
        if target.rule != expected:
            yield f"{target.label}: should be a {expected}"


def listed_tests(root: Path, folder: str) -> set[str]:
    """What the folder's suites list by name: Bazel leaves manual tests out of the others."""
    suites = read_targets(root, folder, rules=("test_suite",))
    return {
        label_of(folder, test[1:])
        for suite in suites
        for test in suite.attributes.get("tests", [])
        if test.startswith(":")
    }


def audit_tags(root: Path, target: Target) -> Iterator[str]:
    """Tags that follow the markers, in tests."""
    tags = set(target.attributes.get("tags", []))
    expected = markers_of(root, target)
    if tags - ABOUT_RUNNING != expected:
        yield f"{target.label}: tags should be {sorted(expected)}, its file's markers"
    if ("manual" in tags) != bool(expected & MANUAL):
        yield f"{target.label}: the tag `manual` goes with {sorted(MANUAL)}"
    if "requires-gpu" in expected and target.label not in listed_tests(root, target.folder):
        yield f"{target.label}: gpu_tests does not list it"


def audit_dependencies(
    root: Path, target: Target, by_module: dict[str, Target], by_label: dict[str, Target]
) -> Iterator[str]:
    """`deps` that are the imports."""
    imports = imports_of(root, target, by_module)
    if target.label not in {f"//{folder}" for folder in WHOLE}:
        if target.dependencies != imports:
            yield f"{target.label}: deps should be {sorted(imports)}, its imports"
        return
    if missing := imports - target.dependencies:
        yield f"{target.label}: deps lack {sorted(missing)}, which it imports"
    inside = (f"//{target.folder}:", f"//{target.folder}/")
    all_inside = {label for label in by_label if label.startswith(inside)}
    if missing := all_inside - reached_from(target.label, by_label):
        yield f"{target.label}: does not reach {sorted(missing)}, modules of its package"


def audit_own_data(targets: list[Target], folders: Iterable[str]) -> Iterator[str]:
    """Under Bazel this audit sees only the folders that its own target lists."""
    for target in targets:
        if target.label == "//tests:bazel_targets_test":
            wanted = {f"//{folder}:sources" for folder in folders}
            if missing := wanted - set(target.attributes.get("data", [])):
                yield f"{target.label}: data lack {sorted(missing)}"


def audit(root: Path) -> list[str]:
    """What is wrong with the BUILD files under root, a line each."""
    problems = []
    by_folder: dict[str, list[Target]] = {}
    for folder in packages(root):
        if (root / folder / "BUILD").exists():
            by_folder[folder] = read_targets(root, folder)
            problems += audit_files(root, folder, by_folder[folder])
        else:
            problems.append(f"{folder}: no BUILD file")
    targets = [target for some in by_folder.values() for target in some]
    present = [t for t in targets if all((root / source).exists() for source in t.sources)]
    by_module = {module_of(source): target for target in present for source in target.sources}
    by_label = {target.label: target for target in targets}
    problems += audit_own_data(targets, by_folder)
    for target in present:
        problems += audit_dependencies(root, target, by_module, by_label)
        if target.rule == "pytest_test":
            problems += audit_tags(root, target)
    return problems


def test_the_build_files_match_the_tree() -> None:
    problems = audit(ROOT)
    assert not problems, "\n".join(problems)


SMALL_TREE = {
    "pyproject.toml": """
[tool.pytest.ini_options]
markers = ["property: random layouts", "requires_gpu: needs one"]
""",
    "xrex/__init__.py": "from xrex import layout\n",
    "xrex/layout.py": "",
    "xrex/BUILD": """
py_library(name = "xrex", srcs = ["__init__.py"], deps = [":layout"])
py_library(name = "layout", srcs = ["layout.py"])
""",
    "tests/layout_test.py": "import pytest\nimport xrex\n",
    "tests/BUILD": """
pytest_test(name = "layout_test", srcs = ["layout_test.py"], tags = ["cpu"], deps = ["//xrex"])
""",
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            {"tests/another_test.py": ""},
            "tests/another_test.py: no target in tests/BUILD; add one",
        ),
        ({"xrex/rules/__init__.py": ""}, "xrex/rules: no BUILD file"),
        ({"tests/kernels/fast_test.py": ""}, "tests/kernels: no BUILD file"),
        (
            {
                "tests/test_layout.py": "",
                "tests/BUILD": SMALL_TREE["tests/BUILD"]
                + 'py_library(name = "test_layout", srcs = ["test_layout.py"])',
            },
            "tests/test_layout.py: pytest collects files named x_test.py, not its tests; rename it",
        ),
        (
            {"xrex/layout.py": "def test_layout():\n    pass\n"},
            "xrex/layout.py: pytest collects files named x_test.py, not its tests; rename it",
        ),
        (
            {
                "tests/bazel_targets_test.py": "",
                "tests/BUILD": SMALL_TREE["tests/BUILD"]
                + 'pytest_test(name = "bazel_targets_test", srcs = ["bazel_targets_test.py"], '
                'data = ["//tests:sources"], tags = ["cpu"])',
            },
            "//tests:bazel_targets_test: data lack ['//xrex:sources']",
        ),
        (
            {"xrex/layout.py": "def late():\n    import xrex\n"},
            "//xrex:layout: deps should be ['//xrex'], its imports",
        ),
        (
            {"xrex/__init__.py": "from xrex import layout, lookup\n", "xrex/lookup.py": ""},
            "xrex/lookup.py: no target in xrex/BUILD; add one",
        ),
        (
            {"tests/layout_test.py": "import pytest, xrex\npytestmark = pytest.mark.property\n"},
            "//tests:layout_test: tags should be ['property'], its file's markers",
        ),
        (
            {"tests/layout_test.py": "import pytest\n@pytest.mark.requires_gpu\ndef test(): ..."},
            "//tests:layout_test: gpu_tests does not list it",
        ),
        (
            {"tests/BUILD": SMALL_TREE["tests/BUILD"].replace("pytest_test", "py_library")},
            "//tests:layout_test: should be a pytest_test",
        ),
        (
            {
                "tools/train.py": 'if __name__ == "__main__":\n    pass\n',
                "tools/BUILD": 'py_library(name = "train", srcs = ["train.py"])',
            },
            "//tools:train: should be a py_binary",
        ),
        (
            {"xrex/BUILD": SMALL_TREE["xrex/BUILD"].replace('"layout"', '"other"')},
            "//xrex:other: name it after its file",
        ),
        (
            {
                "xrex/lookup.py": "",
                "xrex/BUILD": SMALL_TREE["xrex/BUILD"]
                + 'py_library(name = "lookup", srcs = ["lookup.py"])',
            },
            "//xrex: does not reach ['//xrex:lookup'], modules of its package",
        ),
    ],
)
def test_a_difference_is_found(added: dict[str, str], problem: str, tmp_path: Path) -> None:
    write_tree(tmp_path, SMALL_TREE)
    assert audit(tmp_path) == []
    write_tree(tmp_path, added)
    assert problem in audit(tmp_path)


def test_a_target_without_its_file_is_found(tmp_path: Path) -> None:
    write_tree(tmp_path, SMALL_TREE)
    (tmp_path / "tests" / "layout_test.py").unlink()
    (tmp_path / "tests" / "helper.py").touch()
    assert "tests/BUILD: tests/layout_test.py does not exist" in audit(tmp_path)


def test_the_build_files_are_formatted() -> None:
    folders = (f"{sys.prefix}/bin", f"{ROOT}/.venv/bin", os.environ["PATH"])
    buildifier = shutil.which("buildifier", path=os.pathsep.join(folders))
    if buildifier is None:
        hint = "no buildifier: `bash tools/setup_env.sh --bazel` installs it, with npm"
        assert not (os.environ.get("CI") and shutil.which("npm")), hint
        pytest.skip(hint)
    names = ("BUILD", "WORKSPACE", "WORKSPACE.bzlmod", "MODULE.bazel", "*.bzl")
    files = [
        file
        for folder in (".", "tools/bazel", "tests/consumer_workspace", *packages(ROOT))
        for name in names
        for file in (ROOT / folder).glob(name)
    ]
    result = subprocess.run(
        [buildifier, "-mode=diff", "-lint=warn", *files], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
