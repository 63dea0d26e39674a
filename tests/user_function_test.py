"""A function of the user's on a command line: what is wrong with it is told in one message."""

import sys
from pathlib import Path

import jax
import pytest

from tests import layouts
from tools import compile_for_gpu
from tools.common import user_function
from tools.common.command import UserError

MODULE = """\
import jax, jax.numpy as jnp

three = 3

def sharded(mesh, *size):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding)

def good(mesh): return (lambda x: x + 1), (sharded(mesh, 8),)
def jitted(mesh): return jax.jit(lambda x: x + 1, donate_argnums=0), [sharded(mesh, 8)]
def nothing(mesh): return None
def one(mesh): return (lambda x: x,)
def no_function(mesh): return 3, ()
def no_tuple(mesh): return (lambda x: x), sharded(mesh, 8)
def bare(mesh): return (lambda x: x), (jax.ShapeDtypeStruct((4,), jnp.float32),)
def python(mesh): return (lambda x: x), (3.0,)
def raises(mesh): raise KeyError("[new]")
def leaves(mesh): raise SystemExit(3)
def takes_none(): return None
def mismatched(mesh):
    return (lambda x: x + jnp.zeros(3)), (sharded(mesh, 4),)
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"mine": MODULE, "broken": "1 / 0", "odd": "import no_such_package"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "broken", "odd"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("", "wanted MODULE:FUNCTION"),
        ("mine", "wanted MODULE:FUNCTION"),
        ("mine:", "wanted MODULE:FUNCTION"),
        (":good", "wanted MODULE:FUNCTION"),
        ("absent:f", "there is no module 'absent' to import"),
        ("absent.part:f", "there is no module 'absent' to import"),
        ("mine.part:f", "there is no module 'mine.part' to import"),
        (".mine:f", "importing it raised TypeError"),
        ("mine:absent", "module 'mine' has no function 'absent'"),
        ("mine:three", "'three' is no function, but of type int"),
        ("broken:f", "importing it raised ZeroDivisionError: division by zero ("),
        ("odd:f", "importing it raised ModuleNotFoundError: No module named 'no_such_package' ("),
    ],
)
def test_what_cannot_be_found_is_named(named: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        user_function.find(named)
    assert str(raised.value).startswith(f"{named}: ")
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "must return a function and a tuple of its arguments, not NoneType"),
        ("one", "must return a function and a tuple of its arguments, not tuple"),
        ("no_function", "not int and tuple"),
        ("no_tuple", "not function and ShapeDtypeStruct"),
        ("bare", "argument [0] has no sharding"),
        ("python", "argument [0] has no sharding"),
        ("raises", "calling it raised KeyError: '[new]' ({file}, line 17)"),
        ("leaves", "calling it raised SystemExit: 3 ({file}, line 18)"),
        ("takes_none", "calling it raised TypeError: takes_none() takes 0 positional"),
        ("mismatched", "lowering its program raised TypeError: add got incompatible shapes"),
    ],
)
def test_what_a_function_makes_of_a_mesh_is_checked(name: str, told: str, file: Path) -> None:
    with pytest.raises(UserError) as raised:
        compile_for_gpu.lowered_by_user(f"mine:{name}", layouts.mesh({"x": 2}))
    assert str(raised.value).startswith(f"mine:{name}: ")
    assert told.format(file=file) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["good", "jitted"])
def test_a_function_is_lowered(name: str) -> None:
    lowered = compile_for_gpu.lowered_by_user(f"mine:{name}", layouts.mesh({"x": 2}))
    assert isinstance(lowered, jax.stages.Lowered)
