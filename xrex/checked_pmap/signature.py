"""What a process would launch for a call, in words that processes can compare.

Pure functions over a traced call. A signature is a dict of lines, name to value, the most telling
first; its digest is what the processes compare, its lines are what an error shows.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping as AbstractMapping
from collections.abc import Sequence, Set
from typing import Any

import jax

from xrex.checked_pmap.call import Call, leaf_paths
from xrex.checked_pmap.mapping import Mapping
from xrex.checked_pmap.program import Program

Signature = dict[str, str]

# Where an object lies in memory, as its repr tells it, and functions by way of their callers.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
# Arguments that a signature shows. All of them are in the traced program, too.
_SHOWN = 1000


def function_name(fun: Any) -> str:
    """The function's qualified name, e.g. "mymodel.steps.train"."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    name = getattr(fun, "__qualname__", type(fun).__qualname__)
    return f"{getattr(fun, '__module__', None)}.{name}"


def stable_text(value: Any) -> str:
    """`repr`, without what differs between processes: addresses, and the order in a set."""
    if isinstance(value, functools.partial):
        return stable_text(("partial", value.func, value.args, value.keywords))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(stable_text, value)))}}}"
    if isinstance(value, AbstractMapping):
        entries = (f"{stable_text(key)}: {stable_text(value[key])}" for key in value)
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(stable_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}{stable_text(dict(fields))}"
    return _ADDRESS.sub("0x", repr(value))


def describe(
    mapping: Mapping, program: Program, call: Call, leaves: Sequence[Any], jaxpr: Any
) -> Signature:
    """The signature of a call.

    Args:
      mapping: what was given to `pmap`.
      program: the program for the call.
      call: the call, as this process makes it.
      leaves: the call's leaves as global arrays.
      jaxpr: of `program.run`, traced for them.
    """
    lines = {
        "function": function_name(mapping.fun),
        "axis_name": stable_text(mapping.axis_name),
        "axis_size": str(mapping.axis_size),
        "num_devices": "those of every process",
    }
    if mapping.devices is None:
        lines["local_axis_size"] = str(call.size)
    else:
        # Given devices may lie unevenly: each local size was checked against its own devices.
        lines["num_devices"] = str(len(mapping.devices))
    lines["device order"] = str([device.id for device in program.mesh.devices.flat])
    lines["donated arguments"] = str(mapping.donate_argnums)
    lines |= {
        f"static argument {at}": stable_text(value)
        for at, (_, value) in zip(mapping.static_argnums, call.statics, strict=True)
    }
    args, kwargs = jax.tree.unflatten(call.treedef, leaves)
    paths = leaf_paths(mapping, args, kwargs)
    lines["number of arrays"] = str(len(leaves))
    for path, leaf, axis in itertools.islice(zip(paths, leaves, call.axes, strict=True), _SHOWN):
        use = "whole" if axis is None else f"mapped over axis {axis}"
        lines[path] = f"{jax.typeof(leaf)} {use}"
    text = _ADDRESS.sub("0x", str(jaxpr))
    lines["traced program"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return lines


def digest(signature: Signature) -> str:
    """A short text that two signatures share only if they are equal."""
    return hashlib.sha256(json.dumps(signature).encode()).hexdigest()[:32]


def check_same(signatures: dict[int, Signature]) -> None:
    """Checks that processes would launch the same.

    Args:
      signatures: one per process.

    Raises:
      ValueError: they differ; it shows the first line that does.
    """
    names = dict.fromkeys(name for signature in signatures.values() for name in signature)
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, signature in signatures.items():
            holders.setdefault(signature.get(name, "none"), []).append(process)
        if len(holders) == 1:
            continue
        found = "; ".join(f"{name_processes(who)}: {value}" for value, who in holders.items())
        error = ValueError(f"pmap needs the same {name} on every process, but got {found}.")
        if name == "traced program":
            error.add_note(
                "The functions have one name and take the same arguments, but trace to different "
                "programs (those are digests of them): what `fun` computes must not depend on the "
                "process, and several functions must be called in the same order."
            )
        error.add_note(
            "Every process must make the same calls of pmap in the same order, each with its own "
            "equal part of the mapped axis. No process launched anything."
        )
        raise error


def name_processes(processes: Sequence[int]) -> str:
    """E.g. "process 1" or "processes 0, 2"."""
    listed = ", ".join(map(str, processes))
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"
