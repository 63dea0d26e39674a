"""Most of the suite's time is XLA's: what it compiles for CPUs, it compiles quickly, and once.

A program that several tests make, each by a function of its own, is compiled for the first of them.
Results are those of fewer optimisations. A test whose subject is what the compiler makes of a
program asks for a user's compilation by its fixtures:
`pytestmark = pytest.mark.usefixtures("optimized")`, or for a user's memory alone:
`"users_buffers"`. With XREX_OPTIMIZED=1 all are compiled as a user's.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
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
# What users get but for the machine code, which has no part in how memory is planned.
USERS_BUFFERS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True

# There is no public place for options of all programs of one platform, nor for compiled programs.
_get_compile_options = compiler.get_compile_options


def _with_options(options: dict[str, Any]) -> Callable[..., Any]:
    """`compiler.get_compile_options` with these where a program for CPUs has none of its own."""

    def get_compile_options(*arguments: Any, **named: Any) -> Any:
        backend = named.get("backend")
        if backend is not None and backend.platform == "cpu":
            own = dict(named.get("env_options_overrides") or {})
            named["env_options_overrides"] = options | own
        return _get_compile_options(*arguments, **named)

    return get_compile_options


def _all_optimized() -> bool:
    return os.environ.get("XREX_OPTIMIZED") == "1"


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
    if not _all_optimized():
        compiler.get_compile_options = _with_options(QUICK)


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for it compiles as a user does."""
    monkeypatch.setattr(compiler, "get_compile_options", _get_compile_options)


@pytest.fixture
def users_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for it has programs that hold and reuse memory as a user's do."""
    if not _all_optimized():
        monkeypatch.setattr(compiler, "get_compile_options", _with_options(USERS_BUFFERS))
