"""The judge: does a layout work, whatever the validator says of it?

A layout works when a lookup and two updates on simulated devices give what the oracle gives, bit
for bit, on every device that holds a copy. The checks of layouts are bypassed, the runtime never
is. Looking up alone would not do: some broken layouts look rows up correctly and only train
wrongly.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, AxisType

import xrex
from tests import trial
from xrex.layout import requirements
from xrex.layout.layout import Layout

_VOCAB = 8


@dataclass(frozen=True)
class Works:
    """The layout trains correctly."""

    def __str__(self) -> str:
        return "works"


@dataclass(frozen=True)
class Fails:
    """The layout raises or trains wrongly."""

    reason: str
    kind: str = "raises"

    def __str__(self) -> str:
        return f"fails: {self.reason}"


@dataclass(frozen=True)
class Accepted:
    """The validator made a handle."""

    def __str__(self) -> str:
        return "accepted"


@dataclass(frozen=True)
class Rejected:
    """The validator raised."""

    requirement: str
    message: str

    def __str__(self) -> str:
        return f"rejected by {self.requirement}: {self.message}"


def runtime_verdict(layout: Layout) -> Works | Fails:
    """What the runtime does with a layout of positive sizes, legal or not.

    Runs on the devices of the layout's mesh. Layouts that differ only in the names of their axes or
    in `num_devices_per_node` are run once in a process.
    """
    return _verdict(_canonical(layout))


def forget_verdicts() -> None:
    """Runs every layout again from now on: for tests that change the runtime."""
    _verdict.cache_clear()


def validator_decision(layout: Layout) -> Accepted | Rejected:
    """What `make_context_handle` says of a layout."""
    try:
        make_handle(layout)
    except ValueError as error:
        broken = requirements.first_violation(layout)
        return Rejected("unlisted" if broken is None else broken[0].name, str(error))
    return Accepted()


def make_handle(layout: Layout, **policy: object) -> xrex.AsyncEmbContextHandle:
    """The checked handle of a layout."""
    arguments = dict(vars(layout))
    mesh, table_axis = arguments.pop("mesh"), arguments.pop("table_axis")
    return xrex.make_context_handle(mesh, table_axis, **arguments, **policy)  # type: ignore[arg-type]


def is_listed_exception(layout: Layout) -> bool:
    """Whether a layout that works is rejected on purpose: the only kind there is.

    A table axis of size 1 that is missing from the data axis does no harm, but is rejected by its
    name, so that a layout stays legal when the axis grows.
    """
    missing = set(layout.table_axis) - set(layout.data_axis)
    return bool(missing) and all(layout.mesh.shape.get(axis) == 1 for axis in missing)


def disagreement(layout: Layout) -> str | None:
    """Where validator and runtime differ on a layout, in words; None where they agree.

    The listed exception counts as agreement.
    """
    decision, verdict = validator_decision(layout), runtime_verdict(layout)
    if isinstance(decision, Accepted) == isinstance(verdict, Works):
        return None
    excused = isinstance(decision, Rejected) and decision.requirement == "tokens_vary"
    if isinstance(verdict, Works) and excused and is_listed_exception(layout):
        return None
    return f"{decision}\nbut the runtime {verdict}\n{as_code(layout)}"


def abstract(layout: Layout) -> Layout:
    """The same layout on a mesh without devices."""
    mesh = layout.mesh
    sizes, names = tuple(mesh.shape.values()), tuple(mesh.shape)
    return replace(layout, mesh=AbstractMesh(sizes, names, axis_types=mesh.axis_types))


# What the line that `as_code` prints needs.
IMPORTS = """import jax, numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from xrex.layout.layout import Layout"""


def as_code(layout: Layout) -> str:
    """A line that makes the layout again, after `IMPORTS`."""
    mesh = layout.mesh
    sizes, names = tuple(mesh.shape.values()), tuple(mesh.shape)
    types = f", axis_types=({''.join(f'{kind}, ' for kind in mesh.axis_types)})"
    if isinstance(mesh, AbstractMesh):
        made = f"AbstractMesh({sizes}, {names}{types})"
    else:
        devices = [device.id for device in mesh.devices.flat]
        plain = all(kind == AxisType.Auto for kind in mesh.axis_types)
        types = "" if plain else types
        made = f"Mesh(np.array(jax.devices())[{devices}].reshape({sizes}), {names}{types})"
    rest = [f"{name}={value!r}" for name, value in vars(layout).items() if name != "mesh"]
    return f"Layout(mesh={made}, {', '.join(rest)})"


def _canonical(layout: Layout) -> Layout:
    """The layout with its axes renamed by position: the compiler does not look at names."""
    names = {name: f"axis{i}" for i, name in enumerate(layout.mesh.shape)}
    mesh = type(layout.mesh)(
        layout.mesh.devices, tuple(names.values()), axis_types=layout.mesh.axis_types
    )
    return replace(
        layout,
        mesh=mesh,
        table_axis=tuple(names.get(axis, f"unknown {axis}") for axis in layout.table_axis),
        data_axis=tuple(names.get(axis, f"unknown {axis}") for axis in layout.data_axis),
        num_devices_per_node=1,
    )


@functools.cache
def _verdict(layout: Layout) -> Works | Fails:
    batches = tuple(_batches(layout))
    table = np.arange(_VOCAB * layout.emb_width, dtype=np.float32)
    attempt = trial.Trial(table.reshape(_VOCAB, layout.emb_width), batches)
    handle = trial.unchecked_handle(layout)
    rule = xrex.RowwiseAdagrad(learning_rate=1.0, eps=1e-30)
    try:
        steps = trial.run(handle, rule, attempt, trial.quick_step)
        trial.check_steps(steps, trial.expect(handle, rule, attempt, steps), exact=True)
    except AssertionError as error:
        return Fails(_first_line(error), "trains wrongly")
    except (AttributeError, ImportError, NameError):
        raise  # A fault of the code, not of the layout: no rejection may be right for that.
    except Exception as error:  # Whatever else is raised, by whomever: the layout does not train.
        return Fails(_first_line(error))
    return Works()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s}".splitlines()[0]


def _batches(layout: Layout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Two batches with room for every distinct id, and every token's gradient different."""
    rng = np.random.default_rng(0)
    ids = np.arange(layout.tokens_per_batch, dtype=np.int32) % min(layout.num_unique, _VOCAB)
    for batch in (ids, ids[::-1]):
        yield batch, trial.exact_gradients(rng, batch, layout.emb_width)
