"""The layers point one way, and importing xrex is free of side effects."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a folder's modules may import of the project, by prefix.
MAY_IMPORT = {
    "pallas_kernels": ("pallas_kernels",),
    "xrex": ("xrex", "pallas_kernels.api"),
    "tools": ("tools", "xrex", "pallas_kernels", "tests.layout_report"),
}
OWN = ("pallas_kernels", "tests", "tools", "xrex")
# The modules that may use JAX's private parts, one per package; tests may too.
COMPATIBILITY = ("pallas_kernels/compat.py", "xrex/compat.py")
# As getattr and importlib take it.
PRIVATE_IN_TEXT = re.compile(r"(jax\.)?_src(\.\w+)*")
# Imported by the suite or the tools alone.
NOT_FOR_USERS = (
    "chex",
    "hypothesis",
    "matplotlib",
    "optax",
    "pyarrow",
    "pytest",
    "rich",
    "tests",
    "tools",
)


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def chain(node: ast.expr) -> str | None:
    """`a.b.c` of an expression that is nothing but that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (parent := chain(node.value)):
        return f"{parent}.{node.attr}"
    return None


def used_names(source: str) -> Iterator[str]:
    """Every dotted name that a module imports, or reaches from what it imported.

    A relative import has a leading dot.
    """
    tree = ast.parse(source)
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (node.module or "")
            for alias in node.names:
                yield f"{parent}.{alias.name}"
                bound[alias.asname or alias.name] = f"{parent}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := chain(node)):
            first, _, rest = dotted.partition(".")
            if first in bound:
                yield f"{bound[first]}.{rest}"
        elif isinstance(node, ast.Constant) and PRIVATE_IN_TEXT.fullmatch(str(node.value)):
            yield f"jax.{node.value.removeprefix('jax.')}"


def forbidden_names(file: str, source: str) -> list[str]:
    """What the file at that path from the root uses against the rules."""
    folder = file.partition("/")[0]
    return [
        name
        for name in used_names(source)
        if name.startswith(".")
        or (is_within(name, OWN) and not is_within(name, MAY_IMPORT[folder]))
        or (is_within(name, ("jax._src",)) and file not in COMPATIBILITY)
    ]


def files_of(folder: str) -> list[str]:
    return sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_every_use_points_down(folder: str) -> None:
    files = files_of(folder)
    assert files
    wrong = {file: forbidden_names(file, (ROOT / file).read_text()) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("pallas_kernels/api.py", "import xrex"),
        ("pallas_kernels/api.py", "from xrex.layout.handle import Handle"),
        ("pallas_kernels/api.py", "def late():\n    from xrex import context"),
        ("xrex/lookup.py", "from pallas_kernels import reference"),
        ("xrex/lookup.py", "from tests import oracle"),
        ("xrex/lookup.py", "from tools import clicks"),
        ("xrex/lookup.py", "from . import exchange"),
        ("xrex/lookup.py", "from jax._src import core"),
        ("tools/train.py", "from tests import oracle"),
        ("tools/train.py", "import jax._src.core"),
        ("xrex/lookup.py", "import jax\njax._src.core.Tracer"),
        ("xrex/lookup.py", "import jax.numpy as jnp, jax as j\ndef late(): return j._src"),
        ("xrex/lookup.py", "from jax import core\nimport jax\nx = [jax._src][0]"),
        ("xrex/lookup.py", "import jax\ngetattr(jax, '_src')"),
        ("xrex/lookup.py", "import importlib\nimportlib.import_module('jax._src.core')"),
        ("xrex/lookup.py", "import pallas_kernels.api\npallas_kernels.reference.gather_rows"),
        ("tools/check_suite.py", "import tests.one_layout\ntests.oracle.lookup"),
    ],
)
def test_a_wrong_use_is_seen(file: str, source: str) -> None:
    assert forbidden_names(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("xrex/lookup.py", "import pallas_kernels.api\npallas_kernels.api.gather_rows"),
        ("xrex/lookup.py", "'Not: jax._src.core.'\nimport jax\njax.numpy.sum"),
        ("pallas_kernels/compat.py", "import jax\njax._src.core"),
        ("xrex/compat.py", "from jax._src import distributed"),
    ],
)
def test_a_right_use_is_let_pass(file: str, source: str) -> None:
    assert forbidden_names(file, source) == []


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("program", "works"),
    [("import xrex", True), ("import jax; jax.devices()", False)],
)
def test_importing_xrex_touches_no_device(program: str, works: bool) -> None:
    # With a platform that does not exist, the first look at a device raises.
    result = run_python(program, JAX_PLATFORMS="no_such_platform")
    assert (result.returncode == 0) == works, result.stderr


def test_importing_xrex_imports_no_package_of_the_suite() -> None:
    result = run_python("import sys, xrex; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    loaded = {name for name in result.stdout.split() if is_within(name, NOT_FOR_USERS)}
    assert loaded == set()


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name} has {code_lines(node)} lines"
        for folder in ("pallas_kernels", "tools", "xrex")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > 60
    ]
    assert not long, "\n".join(long)
