"""The layout rules: their texts to the letter, their order, their advice; and the handle."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import xrex
from tests import layouts
from xrex.layout.requirements import REQUIREMENTS

LAYOUT = {"tokens_per_batch": 16, "emb_width": 16, "num_unique": 8, "num_devices_per_node": 8}
GRID = AbstractMesh((2, 4), ("r", "x"))


def make(
    mesh: Any = GRID, table: Any = ("x",), data: Any = ("x",), **changes: Any
) -> xrex.AsyncEmbContextHandle:
    return xrex.make_context_handle(mesh, table, data_axis=data, **(LAYOUT | changes))


def refusal(*arguments: Any, **changes: Any) -> ValueError:
    with pytest.raises(ValueError, match="async_emb") as caught:
        make(*arguments, **changes)
    return caught.value


# The five rules that people search the web for.


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((GRID, "z", "x"), {}, f"async_emb axis 'z' is not a mesh axis of {GRID}"),
        ((GRID, "x", ("x", "q")), {}, f"async_emb axis 'q' is not a mesh axis of {GRID}"),
        (
            (GRID, ("r", "x"), "x"),
            {},
            "async_emb requires token shards to vary across the communicator: "
            "table_axis ['r'] missing from data_axis ('x',)",
        ),
        (
            (GRID, ("x", "r"), ()),
            {},
            "async_emb requires token shards to vary across the communicator: "
            "table_axis ['x', 'r'] missing from data_axis ()",
        ),
        (
            (GRID, "x", ("r", "x")),
            {},
            "async_emb requires exactly one token shard per communicator rank: data_axis "
            "('r', 'x') shards tokens over 2 positions outside table_axis ('x',)",
        ),
        (
            (GRID, "x", "x"),
            {"tokens_per_batch": 18},
            "async_emb tokens_per_batch=18 does not shard evenly over the 4-rank communicator",
        ),
        (
            (GRID, ("x", "r"), ("r", "x")),
            {"emb_width": 12},
            "async_emb emb_width=12 does not shard evenly over the 8-rank communicator",
        ),
    ],
)
def test_texts_to_the_letter(arguments: Any, changes: Any, message: str) -> None:
    assert str(refusal(*arguments, **changes)) == message


@pytest.mark.parametrize(
    ("arguments", "changes", "advice"),
    [
        ((GRID, "z", "x"), {}, "The mesh's axes are ('r', 'x')."),
        ((GRID, ("r", "x"), "x"), {}, "data_axis=('x', 'r')."),
        ((GRID, ("r", "x"), "x"), {}, "table_axis=('x',)."),
        ((GRID, "x", ("r", "x")), {}, "table_axis=('x', 'r')."),
        ((GRID, "x", ("r", "x")), {}, "data_axis=('x',)."),
        ((GRID, "x", ("r", "x")), {}, "drop ('r',) from the mesh, or run one job per replica"),
        ((GRID,), {"tokens_per_batch": 18}, "tokens_per_batch=16 or tokens_per_batch=20"),
        ((GRID,), {"emb_width": 3}, "Use a multiple of 4: emb_width=4."),
        ((GRID, ("x", "x"), "x"), {}, "Name each axis once."),
        ((GRID,), {"num_unique": 0}, "a Python integer from 1 to 2147483647"),
    ],
)
def test_advice_is_in_the_notes(arguments: Any, changes: Any, advice: str) -> None:
    assert advice in "\n".join(refusal(*arguments, **changes).__notes__)


def test_following_the_advice_works() -> None:
    assert make(GRID, ("x", "r"), ("r", "x")).group_size == 8
    assert make(GRID, "x", ("x",)).group_size == 4
    assert make(GRID, "x", "x", tokens_per_batch=20).tokens_per_rank == 5


def test_the_first_broken_rule_is_the_one_reported() -> None:
    """Each step changes what the one before complained of."""
    broken = {
        "table": ("x", "x", "z"),
        "data": ("x", "r"),
        "num_unique": 0,
        "tokens_per_batch": 18,
        "emb_width": 18,
    }
    remedies = [
        ("repeated_axis", {"table": ("x", "z")}),
        ("positive_sizes", {"num_unique": 1}),
        ("known_axes", {"table": ("r", "x"), "data": ("x",)}),
        ("tokens_vary", {"table": ("x",), "data": ("x", "r")}),
        ("one_shard_per_rank", {"data": ("x",)}),
        ("even_tokens", {"tokens_per_batch": 16}),
        ("even_width", {"emb_width": 16}),
    ]
    assert [name for name, _ in remedies] == [rule.name for rule in REQUIREMENTS]
    for rule, (_, remedy) in zip(REQUIREMENTS, remedies, strict=True):
        assert refusal(GRID, **broken).__notes__[0] == rule.why
        broken |= remedy
    make(GRID, **broken)


@pytest.mark.parametrize("axes", ["table", "data"])
def test_an_axis_named_twice(axes: str) -> None:
    message = f"async_emb {axes}_axis ('x', 'x') names axis 'x' more than once"
    assert str(refusal(**{axes: ("x", "x")})) == message


@pytest.mark.parametrize("name", list(LAYOUT))
@pytest.mark.parametrize("value", [0, -1, True, 16.0, "16", None, np.float32(16), np.bool_(True)])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    message = f"async_emb {name}={value!r} must be a positive integer"
    assert str(refusal(**{name: value})) == message


@pytest.mark.parametrize("name", list(LAYOUT))
def test_sizes_fit_in_int32(name: str) -> None:
    message = f"async_emb {name}={2**31} must be at most {2**31 - 1}, as int32 positions are"
    assert str(refusal(**{name: 2**31})) == message


@pytest.mark.parametrize("value", [np.int32(16), np.uint8(16), np.int64(16)])
def test_sizes_may_be_of_numpy(value: Any) -> None:
    handle = make(tokens_per_batch=value, emb_width=value, num_unique=value)
    assert handle == make(num_unique=16)
    assert type(handle.tokens_per_batch) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mesh",), "mesh must be a jax.sharding.Mesh or AbstractMesh, not str"),
        ((GRID, ("x", 1)), "table_axis=('x', 1) must be an axis name or a tuple"),
        ((GRID, "x", 3), "data_axis=3 must be an axis name or a tuple of them"),
        ((GRID, None), "table_axis=None must be an axis name or a tuple of them"),
    ],
)
def test_what_is_no_mesh_and_no_axis(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_of_range": "wrap"}, "out_of_range='wrap' is not one of ('zero', 'clip', 'raise')"),
        ({"padding_id": 1.0}, "padding_id=1.0 must be an integer or None"),
        ({"padding_id": True}, "padding_id=True must be an integer or None"),
        ({"padding_id": 2**31}, "padding_id=2147483648 does not fit in int32"),
    ],
)
def test_policies_are_checked(changes: Any, message: str) -> None:
    assert message in str(refusal(**changes))


def test_an_implementation_is_taken_or_refused_never_replaced() -> None:
    mesh = layouts.mesh({"x": 4})
    assert make(mesh).implementation == "reference"
    assert make(mesh, implementation="reference").implementation_reason == "asked for"
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        make(mesh, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation='triton' is not known"):
        make(mesh, implementation="triton")


# What is accepted, and stands in the handle.


@pytest.mark.parametrize("case", layouts.LAYOUTS, ids=str)
def test_derived_sizes_and_communicators(case: layouts.LayoutCase) -> None:
    handle = case.handle()
    sizes = dict(case.axes)
    group = int(np.prod([sizes[axis] for axis in case.table_axis]))
    assert handle.group_size == group
    assert handle.tokens_per_rank == layouts.TOKENS // group
    assert handle.shard_width == layouts.WIDTH // group
    # Ranks in the order in which columns are laid out: what a sharded array does is the judge.
    groups = np.array(handle.flatten_replicas).reshape(-1, group)
    columns = layouts.put_table(handle, np.arange(layouts.WIDTH)[None])
    first = {shard.device.id: int(shard.data[0, 0]) for shard in columns.addressable_shards}
    assert sorted(groups.ravel().tolist()) == sorted(first)
    for ranks in groups.tolist():
        wanted = [rank * handle.shard_width for rank in range(group)]
        assert [first[device] for device in ranks] == wanted


def test_a_bare_string_is_one_axis() -> None:
    assert make(GRID, "x", "x") == make(GRID, ("x",), ["x"])


def test_axes_of_size_1_are_legal_anywhere() -> None:
    mesh = AbstractMesh((1, 4), ("one", "x"))
    assert make(mesh, ("one", "x"), ("x", "one")).group_size == 4
    assert make(mesh, "x", ("one", "x")).group_size == 4
    assert make(mesh, "one", "one").group_size == 1
    # By name, whatever its size: the one layout that would work and is rejected.
    assert "table_axis ['one'] missing" in str(refusal(mesh, ("one", "x"), "x"))


@pytest.mark.parametrize("axis_type", list(AxisType))
def test_any_axis_type_and_abstract_meshes(axis_type: AxisType) -> None:
    devices = np.array(jax.devices()).reshape(2, 4)
    concrete = Mesh(devices, ("r", "x"), axis_types=(axis_type,) * 2)
    abstract = concrete.abstract_mesh
    assert make(concrete).flatten_replicas == make(abstract).flatten_replicas == tuple(range(8))
    assert make(concrete) != make(abstract)


def test_the_handle_is_frozen_hashable_and_compared_by_content() -> None:
    handle, same = make(layouts.mesh({"x": 4})), make(layouts.mesh({"x": 4}))
    assert (handle, hash(handle), handle.context_id) == (same, hash(same), same.context_id)
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.emb_width = 8  # type: ignore[misc]
    others = [
        make(layouts.mesh({"x": 4}), **changes)
        for changes in (
            *({name: 32} for name in LAYOUT),
            {"out_of_range": "clip"},
            {"padding_id": 0},
        )
    ]
    others += [make(layouts.mesh({"x": 4}, reverse=True)), make(AbstractMesh((4,), ("x",)))]
    assert len({handle, *others}) == len(others) + 1


def test_context_ids_tell_layouts_apart() -> None:
    handles = [
        make(GRID, table, data, **changes)
        for table, data in [("x", "x"), (("x", "r"), ("x", "r")), (("r", "x"), ("x", "r"))]
        for changes in ({}, {"num_unique": 9}, {"out_of_range": "clip"}, {"padding_id": 0})
    ]
    assert len({handle.context_id for handle in handles}) == len(handles)
    assert all(0 <= handle.context_id < 2**63 for handle in handles)


def test_the_context_id_is_the_same_in_every_process() -> None:
    program = (
        "import xrex; from jax.sharding import AbstractMesh;"
        "print(xrex.make_context_handle(AbstractMesh((2, 4), ('r', 'x')), 'x', data_axis='x',"
        f"**{LAYOUT}).context_id)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    assert int(run.stdout) == make().context_id


@pytest.mark.parametrize("mesh", [GRID, layouts.mesh({"r": 2, "x": 4}, reverse=True)], ids=type)
def test_pickles_and_copies(mesh: Any) -> None:
    handle = make(mesh, padding_id=3)
    for copied in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert copied == handle
        assert copied.flatten_replicas == handle.flatten_replicas


def test_a_pickle_from_a_larger_machine_says_so() -> None:
    function, (mesh, fields) = make(layouts.mesh({"r": 2, "x": 4})).__reduce__()
    mesh["devices"][3] = ("cpu", 1000)
    with pytest.raises(ValueError, match="names cpu device 1000, which is not here"):
        function(mesh, fields)


def test_a_handle_is_a_static_argument() -> None:
    traces = []

    @jax.jit(static_argnums=0)
    def width(handle: xrex.AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
        traces.append(handle)
        return x * handle.emb_width

    for _ in range(2):
        assert width(make(layouts.mesh({"x": 4})), 2) == 32
    assert len(traces) == 1


def test_describe_names_what_matters() -> None:
    text = make(layouts.mesh({"x": 4}), padding_id=7).describe()
    for part in ("4 ranks x 4", "room for 8", "padding id 7", "out of range: zero", "reference"):
        assert part in text


class _Device:
    """A device that answers its platform and id, and counts how often."""

    asked = 0

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def id(self) -> int:
        type(self).asked += 1
        return self.number

    @property
    def platform(self) -> str:
        type(self).asked += 1
        return "cpu"


def test_a_handle_for_131072_devices_looks_at_one_of_them() -> None:
    """A device's own time would be the cost: it is asked once, however many there are."""
    devices = np.empty(131072, object)
    devices[:] = [_Device(number) for number in range(131072)]
    mesh = Mesh(devices.reshape(16384, 8), ("r", "x"))
    _Device.asked = 0
    handle = make(mesh)
    assert handle.group_size == 8
    assert _Device.asked == 1
    assert "flatten_replicas" not in vars(handle)
    assert "context_id" not in vars(handle)


# The two helpers.


@pytest.mark.parametrize(
    ("table", "data", "off"),
    [
        ("x", "x", 1),
        ("x", ("x", "r"), 2),
        ("r", ("r", "x"), 4),
        (("r", "x"), "x", 1),
        ((), ("r", "x"), 8),
        ("x", ("r", "r", "x"), 2),
    ],
)
def test_single_shard_per_rank(table: Any, data: Any, off: int) -> None:
    assert xrex.single_shard_per_rank(GRID, table, data) == (off == 1)
    if off == 1:
        xrex.check_single_shard_per_rank(GRID, table, data)
        return
    with pytest.raises(ValueError, match="token shards outside") as caught:
        xrex.check_single_shard_per_rank(GRID, table, data)
    assert str(caught.value) == (
        f"{off} token shards outside the communicator; "
        "add the extra axes to table_axis or drop them from data_axis"
    )


@pytest.mark.parametrize("helper", [xrex.single_shard_per_rank, xrex.check_single_shard_per_rank])
def test_the_helpers_know_the_mesh(helper: Any) -> None:
    with pytest.raises(ValueError, match="async_emb axis 'z' is not a mesh axis of"):
        helper(GRID, "x", ("x", "z"))
