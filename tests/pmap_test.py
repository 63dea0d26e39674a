"""`xrex.pmap` on eight CPU devices: what it computes, how often it compiles, what it refuses.

Random cases against `jax.pmap` are in pmap_property_test.py, several processes in
pmap_multiprocess_test.py, the checks on their own in pmap_checks_test.py.
"""

import doctest
import functools
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import bench_pmap
from xrex.checked_pmap.pmap import pmap

AXIS = "i"
ROOT = Path(__file__).parent.parent


def _float(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def _share(x: jax.Array) -> jax.Array:
    return x / jax.lax.psum(x, AXIS)


def _same(ours: Any, theirs: Any) -> None:
    """Same tree, same values, same devices."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(our), np.asarray(their))
        assert our.sharding.is_equivalent_to(their.sharding, our.ndim)


def test_is_a_name_of_xrex() -> None:
    """In an interpreter that has imported nothing else of xrex."""
    program = """
import xrex
from xrex import pmap
import numpy as np
assert xrex.pmap is pmap and callable(pmap) and "pmap" in xrex.__all__
print(xrex.pmap(lambda x: 2 * x)(np.arange(1.0, dtype=np.float32)))
import xrex.checked_pmap.pmap as module
assert xrex.pmap is module.pmap is pmap
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stdout) == (0, "[0.]\n"), run.stderr


# The pmap rows of the public reports.


def test_axis_size_that_contradicts_the_data() -> None:
    mapped = pmap(lambda x: x, axis_size=4, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="Specified") as caught:
        mapped(_float(2, 3))
    assert str(caught.value) == "Specified axis_size 4 doesn't match received axis_size 2."
    assert "Leave axis_size out" in _notes(caught.value)


def test_arguments_that_disagree_are_both_named() -> None:
    with pytest.raises(ValueError, match="differ in size") as caught:
        pmap(lambda x, y: x)({"a": _float(4)}, _float(2))
    assert "args[0]['a'] has 4 entries along axis 0" in str(caught.value)
    assert "args[1] has 2 along axis 0" in str(caught.value)


def test_axis_size_alone_maps_nothing() -> None:
    with pytest.raises(ValueError, match="pmap requires at least one argument with a mapped axis"):
        pmap(lambda x: x, in_axes=None, axis_size=4)(_float(4))


# Values.


@pytest.mark.parametrize(
    "fun",
    [
        _share,
        lambda x: jax.lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
        lambda x: jax.lax.all_gather(x, AXIS)[::-1],
        lambda x: jax.random.normal(
            jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(AXIS))
        ),
        lambda x: (x, 3.0, {"a": None, "b": x > 2}),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, total: total + x, jnp.zeros(())),
        jax.grad(lambda x: x**2),
        jax.grad(lambda x: jax.lax.psum(x**2, AXIS)),
        jax.grad(lambda x: jax.lax.pmean(jnp.sin(x), AXIS)),
    ],
)
def test_computes_what_jax_pmap_does(fun: Callable[..., Any]) -> None:
    x = _float(8)
    _same(pmap(fun, AXIS)(x), jax.pmap(fun, AXIS)(x))


def test_gradient_of_a_whole_argument_is_each_devices_own() -> None:
    """shard_map with check_vma would sum it over the axis, and a pmean after it would be wrong."""

    def step(weight: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: w * x)(weight)
        return jnp.stack([gradient, jax.lax.pmean(gradient, AXIS)])

    results = [
        implementation(step, AXIS, in_axes=(None, 0))(np.float32(2), _float(4))
        for implementation in (pmap, jax.pmap)
    ]
    np.testing.assert_array_equal(np.asarray(results[0])[:, 0], _float(4))
    _same(*results)


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.vmap, lambda f: jax.vmap(jax.jit(f), in_axes=1)]
)
def test_under_jit_and_vmap(transform: Callable[..., Any]) -> None:
    x = _float(4, 4)
    ours, theirs = (
        transform(implementation(_share, AXIS))(x) for implementation in (pmap, jax.pmap)
    )
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("out_axes", [0, None])
def test_under_grad(out_axes: int | None) -> None:
    def loss(implementation: Callable[..., Any], x: Any, scale: Any) -> Any:
        mapped = implementation(
            lambda x, scale: jax.lax.psum(scale * x**2, AXIS),
            AXIS,
            in_axes=(0, None),
            out_axes=out_axes,
        )
        return mapped(x, scale).sum()

    gradients = [
        jax.grad(functools.partial(loss, implementation), argnums=(0, 1))(_float(4), np.float32(3))
        for implementation in (pmap, jax.pmap)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_keys_are_mapped() -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    ours, theirs = (
        jax.random.key_data(implementation(lambda key: jax.random.fold_in(key, 7))(keys))
        for implementation in (pmap, jax.pmap)
    )
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_devices_are_used_in_the_order_given() -> None:
    devices = [jax.devices()[i] for i in (5, 2, 7)]
    result = pmap(lambda x: x, devices=devices, axis_size=3)(_float(3))
    assert [shard.device for shard in result.addressable_shards] == devices
    assert [float(shard.data[0]) for shard in result.addressable_shards] == [0.0, 1.0, 2.0]


def test_static_arguments_of_different_types_are_different() -> None:
    mapped = pmap(lambda x, flag: x if flag is True else x + 1, static_broadcasted_argnums=1)
    for flag, expected in ((1, 1.0), (True, 0.0), (1.0, 1.0)):
        assert float(mapped(_float(1), flag)[0]) == expected


def test_static_arguments_between_others() -> None:
    def fun(op: Any, x: Any, scale: float, y: Any) -> Any:
        return op(x, y) * scale

    mapped = pmap(fun, in_axes=(None, 0, None, 1), static_broadcasted_argnums=(2, 0))
    _same(
        mapped(operator.sub, _float(2, 3), 2.0, _float(3, 2)),
        jax.pmap(lambda x, y: (x - y) * 2.0, in_axes=(0, 1))(_float(2, 3), _float(3, 2)),
    )


def test_donated_argument_is_gone() -> None:
    """Counted from the front, static argument included."""
    state = pmap(lambda x: x)(_float(4))
    kept = pmap(lambda x: x)(_float(4))
    mapped = pmap(lambda flag, state, x: state + x, static_broadcasted_argnums=0, donate_argnums=1)
    for keywords in ({}, {"x": kept}):
        state = mapped(True, previous := state, *(() if keywords else (kept,)), **keywords)
        assert previous.is_deleted()
    assert not kept.is_deleted()
    np.testing.assert_array_equal(np.asarray(state), 3 * _float(4))


# One compiled program a signature.


def test_traces_once_a_signature() -> None:
    traces = []

    def fun(x: jax.Array, flag: bool) -> jax.Array:
        traces.append((x.shape, flag))
        return x

    mapped = pmap(fun, static_broadcasted_argnums=1)
    for x in (_float(4), _float(4) + 1, _float(4, 2), _float(2), _float(4)):
        for flag in (True, False, True):
            mapped(x, flag)
    # Shapes (4,), (4, 2) and (2,), twice each.
    assert len(traces) == 6


def test_lower_is_like_that_of_jax_pmap() -> None:
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    tree = {"x": shape}

    def fun(tree: Any, y: Any) -> Any:
        return {"sum": tree["x"] + y}

    for args, kwargs in (((tree, shape), {}), ((tree,), {"y": shape})):
        ours = pmap(fun, donate_argnums=0).lower(*args, **kwargs)
        theirs = jax.pmap(fun, donate_argnums=0).lower(*args, **kwargs)
        assert ours.in_tree == theirs.in_tree
        assert ours.out_tree == theirs.out_tree
        assert ours.args_info == theirs.args_info
        assert ours.out_info["sum"].shape == (4,)
        assert "shard_map" in ours.as_text() or "manual" in ours.as_text()
        values = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), (args, kwargs))
        result = ours.compile()(*values[0], **values[1])
        np.testing.assert_array_equal(np.asarray(result["sum"]), np.full(4, 2, np.float32))


def test_looks_like_the_function() -> None:
    mapped = pmap(_share, AXIS)
    assert mapped.__name__ == "_share"  # type: ignore[attr-defined]
    assert "pmap__share" in mapped.lower(_float(4)).as_text()


# out_axes=None.


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.lax.psum(x, AXIS),
        lambda x: jax.lax.pmax(x, AXIS) + 1,
        lambda x: jax.lax.all_gather(x, AXIS, to="invarying"),
        lambda x: 2.5,
        lambda x: jax.lax.pmean(
            jax.lax.fori_loop(
                0, 3, lambda _, total: total + x, jax.lax.pcast(jnp.zeros(()), AXIS, to="varying")
            ),
            AXIS,
        ),
    ],
)
def test_output_that_does_not_vary_is_returned_once(fun: Callable[..., Any]) -> None:
    ours, theirs = (
        implementation(fun, AXIS, out_axes=None)(_float(4)) for implementation in (pmap, jax.pmap)
    )
    _same(ours, theirs)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x,
        lambda x: jax.lax.axis_index(AXIS),
        lambda x: jax.lax.psum(x, AXIS) + x,
        lambda x: jax.lax.psum_scatter(jnp.stack([x] * 4), AXIS),
    ],
)
def test_output_that_varies_is_never_the_first_devices(fun: Callable[..., Any]) -> None:
    mapped = pmap(lambda x: {"a": x, "b": fun(x)}, AXIS, out_axes={"a": 0, "b": None})
    for call in (mapped, jax.jit(mapped), mapped.lower):
        with pytest.raises(ValueError, match=r"the output\['b'\] varies over the mapped axis 'i'"):
            call(_float(4))


def test_output_that_cannot_be_shown_not_to_vary() -> None:
    """The loop's carry starts the same on every device and ends up different."""

    def fun(x: jax.Array) -> jax.Array:
        total = jax.lax.fori_loop(0, 3, lambda _, total: total + x, jnp.zeros(()))
        return jax.lax.psum(total, AXIS)

    with pytest.raises(ValueError, match="could not be shown") as caught:
        pmap(fun, AXIS, out_axes=None)(_float(4))
    assert "pcast" in _notes(caught.value)
    assert "carry" in str(caught.value.__cause__)


def test_error_of_the_function_is_the_functions() -> None:
    def fun(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pmap(fun, out_axes=None)(_float(4))


# Refusals.


def test_more_entries_than_devices() -> None:
    with pytest.raises(ValueError, match="9 entries, but only 8 devices are available") as caught:
        pmap(lambda x: x)(_float(9))
    assert "--xla_force_host_platform_device_count=9" in _notes(caught.value)


@pytest.mark.parametrize("count", [3, 5])
def test_given_devices_match_the_entries(count: int) -> None:
    with pytest.raises(ValueError, match=f"4 entries, but was given {count} devices"):
        pmap(lambda x: x, devices=jax.devices()[:count])(_float(4))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"fun": 3}, TypeError, "expects a callable"),
        ({"axis_name": ["i"]}, TypeError, "unhashable"),
        ({"axis_name": ("i", "j")}, TypeError, "over one axis"),
        ({"in_axes": 1.0}, TypeError, "pmap in_axes must be an int, None, or"),
        ({"out_axes": {"a": "0"}}, TypeError, "pmap out_axes must be an int, None, or"),
        ({"in_axes": -1}, ValueError, "in_axes must not be negative"),
        ({"out_axes": -1}, ValueError, "out_axes must not be negative"),
        ({"axis_size": 4.0}, TypeError, "axis_size must be an int or None"),
        ({"devices": []}, ValueError, "must be non-empty, or None"),
        ({"devices": ["cpu", "cpu"]}, ValueError, "must differ"),
        ({"static_broadcasted_argnums": -1}, ValueError, "must not be negative"),
        ({"donate_argnums": "x"}, TypeError, "collection of ints"),
        (
            {"static_broadcasted_argnums": 1, "donate_argnums": 1},
            ValueError,
            "both name argument 1",
        ),
    ],
)
def test_arguments_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        pmap(**({"fun": lambda x: x} | arguments))


@pytest.mark.parametrize(
    ("options", "args", "match"),
    [
        ({}, (np.float32(1),), r"cannot map args\[0\] over axis 0: it has rank 0"),
        ({"in_axes": 2}, (_float(4, 4),), r"cannot map args\[0\] over axis 2: it has rank 2"),
        ({}, (_float(4), 3.0), r"cannot map args\[1\] over axis 0"),
        ({"in_axes": (0, None, 0)}, (_float(4), _float(4)), "in_axes is not a tree prefix"),
        ({"in_axes": [0, None]}, (_float(4), _float(4)), "in_axes is not a tree prefix"),
        ({"in_axes": ({"a": 0},)}, ({"b": _float(4)},), "in_axes is not a tree prefix"),
        ({"out_axes": (0, 0)}, (_float(4),), "out_axes is not a tree prefix of the output"),
        ({"out_axes": 3}, (_float(4),), "mapped axis of the output at 3, but its rank is 0"),
        ({"static_broadcasted_argnums": 1}, (_float(4),), "called with only 1 positional argument"),
        ({"static_broadcasted_argnums": 1}, (_float(4), [1]), "static argument 1, of type list"),
        ({}, (_float(0, 2),), "at least one entry along the mapped axis"),
    ],
)
def test_calls_refused(options: dict[str, Any], args: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pmap(lambda x, *_: x, **options)(*args)


def test_paths_count_static_and_keyword_arguments() -> None:
    mapped = pmap(lambda flag, x, y: x, static_broadcasted_argnums=0)
    with pytest.raises(ValueError, match="differ in size") as caught:
        mapped(True, _float(4), y={"a": _float(3)})
    assert "args[1] has 4 entries" in str(caught.value)
    assert "kwargs['y']['a'] has 3" in str(caught.value)


@pytest.mark.parametrize("outer", [pmap, jax.pmap, jax.vmap])
def test_nested_use(outer: Callable[..., Any]) -> None:
    nested = outer(pmap(lambda x: 2 * x, "inner"), axis_name="outer")
    if outer is jax.vmap:  # which maps no devices
        np.testing.assert_array_equal(np.asarray(nested(_float(2, 2))), 2 * _float(2, 2))
        return
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot be called inside pmap or shard_map.*outer"):
            nested(_float(2, 2))


def test_nested_use_of_a_cached_program() -> None:
    inner = pmap(lambda x: 2 * x)
    inner(_float(2))
    with pytest.raises(ValueError, match="cannot be called inside pmap or shard_map"):
        pmap(inner)(_float(2, 2))


def test_mesh_that_is_set() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"cannot be called under jax\.set_mesh"),
    ):
        pmap(lambda x: x)(_float(4))


def test_array_on_an_explicit_mesh() -> None:
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=types)
    x = jax.device_put(_float(8), jax.NamedSharding(mesh, jax.P(("a", "b"))))
    mapped = pmap(lambda x: 2 * x)
    np.testing.assert_array_equal(np.asarray(mapped(np.asarray(x))), 2 * _float(8))
    with pytest.raises(ValueError, match=r"sharded over another, explicit one: float32\[8@"):
        mapped(x)


# The examples in the docstrings, and the benchmark at a size that says nothing about time.


@pytest.mark.parametrize("module", ["xrex.checked_pmap.pmap", "xrex.checked_pmap.checks"])
def test_examples(module: str) -> None:
    result = doctest.testmod(sys.modules[module])
    assert result.attempted >= 2
    assert result.failed == 0


def test_benchmark_runs() -> None:
    config = bench_pmap.BenchConfig(leaves=2, calls=1, rounds=1)
    overheads = bench_pmap.measure(config)
    row = bench_pmap.format_row(config, *overheads).split()
    assert len(row) == 7
    assert all(0 < overhead.returned <= overhead.ready for overhead in overheads)
