"""Most of the suite's time is XLA's: what it compiles for CPUs, it compiles quickly, and once.

A program that several tests make, each by a function of its own, is compiled for the first of them.
Results are those of fewer optimisations. A test whose subject is what the compiler makes of a
program, such as the memory that it takes, asks for a user's compilation by its fixtures:
`pytestmark = pytest.mark.usefixtures("optimized")`. With XREX_OPTIMIZED=1 all do.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import jax
import pytest
from jax._src import compiler

# In a third of the time with JAX 0.10, in two thirds of it with 0.12.
QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# What users get, for a program of a test that compiles quickly.
OPTIMIZED: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True

# There is no public place for options of all programs of one platform, nor for compiled programs.
_get_compile_options = compiler.get_compile_options


def _get_quick_options(*arguments: Any, **named: Any) -> Any:
    backend = named.get("backend")
    if backend is not None and backend.platform == "cpu":
        named["env_options_overrides"] = QUICK | dict(named.get("env_options_overrides") or {})
    return _get_compile_options(*arguments, **named)


# The newest programs: each is some memory maps, of which Linux grants a process 65,530.
_KEPT = 512
_compiled: OrderedDict[Hashable, Any] = OrderedDict()
_compile = compiler.backend_compile_and_load


def _compile_once(
    backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, **others: Any
) -> Any:
    """XLA's compilation, for a CPU, of a program that was not compiled in this process lately."""
    if backend.platform != "cpu" or callbacks:
        return _compile(backend, module, devices, options, callbacks, **others)
    text = module.operation.get_asm(enable_debug_info=False)
    digest = hashlib.blake2b(text.encode()).digest()
    key = (digest, tuple(devices), options.SerializeAsString())
    if key not in _compiled:
        _compiled[key] = _compile(backend, module, devices, options, callbacks, **others)
    _compiled.move_to_end(key)
    while len(_compiled) > _KEPT:
        _compiled.popitem(last=False)
    return _compiled[key]


def pytest_sessionstart() -> None:
    """Compiles quickly from here on, in fixtures of modules too."""
    compiler.backend_compile_and_load = _compile_once
    if os.environ.get("XREX_OPTIMIZED") != "1":
        compiler.get_compile_options = _get_quick_options


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for it compiles as a user does."""
    monkeypatch.setattr(compiler, "get_compile_options", _get_compile_options)
