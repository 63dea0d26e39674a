"""Calls of a mapped function that several processes make together: agree first, then launch.

A launched program waits for the devices of all processes, for ever if one of them does not launch
it. So all that may fail in one process is done before: arguments are read, laid out and traced.
Then the processes tell each other what they would launch, or why not. At the first call of a
signature they also compile, and tell each other how that went. Nobody waits beyond a deadline.
"""

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from xrex.checked_pmap import processes
from xrex.checked_pmap.call import Call
from xrex.checked_pmap.mapping import Mapping
from xrex.checked_pmap.program import Program
from xrex.checked_pmap.signature import (
    check_same,
    describe,
    digest,
    function_name,
    name_processes,
)
from xrex.rendezvous import Late, Rendezvous, rendezvous_of

# How long a process waits for the others, and the environment variable that changes it.
DEADLINE_SECONDS = 30.0
DEADLINE_VARIABLE = "XREX_PMAP_SECONDS"
# As long, while others are known to compile. A process that has died is found by jax.distributed.
_COMPILE_SECONDS = 3600.0
# Characters of an error that are told to the other processes.
_ERROR_SHOWN = 2000


class Report(NamedTuple):
    """What one process tells the others about a call."""

    error: str = ""  # why it will not launch; empty if it will
    digest: str = ""  # of what it would launch
    compiled: bool = True

    def text(self) -> str:
        """As JSON."""
        return json.dumps(self)

    @classmethod
    def rejection(cls, error: Exception) -> "Report":
        """The report of a process in which `error` was raised."""
        return cls(error=f"{type(error).__name__}: {error}"[:_ERROR_SHOWN])


class _Prepared(NamedTuple):
    """A call that this process is ready to launch."""

    program: Program
    arguments: tuple[Any, ...]  # of program.run, global
    traced: Any  # the jax.stages.Traced of both
    digest: str


class TogetherCalls:
    """The calls of one mapped function by several processes."""

    def __init__(self, mapping: Mapping, meeting: Rendezvous):
        """Args: what was given to `pmap`; where the processes that own its devices meet."""
        self._mapping, self._meeting = mapping, meeting
        self._digests: dict[Any, str] = {}  # by the traced program
        self._compiled: set[str] = set()
        self._calls = 0

    def __call__(self, find: Callable[[], tuple[Program, Call]]) -> Any:
        """Launches a call if all processes would launch the same.

        Args:
          find: reads and checks this process's call.

        Raises:
          ValueError: a process rejected its call, or the calls differ.
          TimeoutError: a process did not come to the call in time.
        """
        self._calls += 1
        try:
            seconds = deadline_seconds()
            ready = self._prepare(*find())
        except Exception as error:
            self._reject(error)
            raise
        report = Report(digest=ready.digest, compiled=ready.digest in self._compiled)
        reports = self._exchange(report, seconds)
        self._check_same(reports, seconds)
        if not all(report.compiled for report in reports.values()):
            self._compile(ready)
        outputs = ready.program.run(*ready.arguments)
        return processes.to_local(outputs, ready.program.mesh, ready.program.out_specs)

    def _prepare(self, program: Program, call: Call) -> _Prepared:
        """Does all that can fail before a launch, without waiting for anybody."""
        arguments = _global_arguments(program, call)
        traced = program.run.trace(*arguments)
        found = self._digests.get(traced.jaxpr)
        if found is None:
            signature = describe(
                self._mapping, program, call, jax.tree.leaves(arguments), traced.jaxpr
            )
            found = self._digests[traced.jaxpr] = digest(signature)
            # For those that would launch something else, to say what differs.
            self._meeting.put(found, json.dumps(signature))
        return _Prepared(program, arguments, traced, found)

    def _compile(self, ready: _Prepared) -> None:
        """Compiles in all processes; the launch then takes what was compiled."""
        try:
            ready.traced.lower().compile()
        except Exception as error:
            self._reject(error)
            raise
        self._exchange(Report(digest=ready.digest), _COMPILE_SECONDS)
        self._compiled.add(ready.digest)

    def _name(self) -> str:
        return f"call {self._calls} of {function_name(self._mapping.fun)}"

    def _reject(self, error: Exception) -> None:
        """Tells the others that this process will not launch, and waits for nobody."""
        self._meeting.publish(Report.rejection(error).text())
        others = [at for at in self._meeting.processes if at != self._meeting.process]
        error.add_note(
            f"Process {self._meeting.process} rejected {self._name()}: {name_processes(others)} "
            "will not launch it either."
        )

    def _exchange(self, report: Report, seconds: float) -> dict[int, Report]:
        """Returns the reports of all processes, none of which is a rejection."""
        self._meeting.publish(report.text())
        try:
            texts = self._meeting.collect(seconds)
        except Late as late:
            raise self._too_late(late) from None
        reports = {process: Report(*json.loads(text)) for process, text in texts.items()}
        for process, found in reports.items():
            if found.error:
                error = ValueError(
                    f"pmap was not launched: process {process} rejected its call: {found.error}"
                )
                error.add_note(f"No process launched {self._name()}.")
                raise error
        return reports

    def _check_same(self, reports: dict[int, Report], seconds: float) -> None:
        """Raises ValueError unless all would launch the same."""
        digests = {process: report.digest for process, report in reports.items()}
        if len(set(digests.values())) == 1:
            return
        found = {each: json.loads(self._meeting.get(each, seconds)) for each in digests.values()}
        check_same({process: found[each] for process, each in digests.items()})

    def _too_late(self, late: Late) -> TimeoutError:
        who = "this process" if late.process == self._meeting.process else "it"
        error = TimeoutError(
            f"pmap was not launched: process {late.process} did not come to {self._name()} within "
            f"{late.seconds:g} s, and process {late.by} gave up waiting for {who}."
        )
        error.add_note(
            f"{name_processes(self._meeting.processes).capitalize()} own the devices: each must "
            "make the same calls of pmap in the same order."
        )
        error.add_note(
            f"If a process may need longer between two calls, e.g. to write a checkpoint, set "
            f"{DEADLINE_VARIABLE} to more seconds in the environment of all processes."
        )
        return error


def launch_alone(program: Program, call: Call) -> Any:
    """Launches a call on devices of this process, which is one of several."""
    return program.run(*_global_arguments(program, call))


def _global_arguments(program: Program, call: Call) -> tuple[Any, ...]:
    """What `program.run` takes."""
    leaves = processes.to_global(call.leaves, program.mesh, program.in_specs)
    args, kwargs = jax.tree.unflatten(call.treedef, leaves)
    return (*args, kwargs) if kwargs else args


def together(mapping: Mapping) -> TogetherCalls | None:
    """Returns what calls of `mapping` go through, or None if this process makes them alone.

    Raises:
      RuntimeError: several processes own the devices, and `jax.distributed` was not initialized.
    """
    owners = mapping.processes()
    if len(owners) == 1 or jax.process_index() not in owners:
        return None
    return TogetherCalls(mapping, rendezvous_of(owners))


def deadline_seconds() -> float:
    """How long a process waits for the others before a launch.

    Raises:
      ValueError: the environment variable is not a positive number.
    """
    text = os.environ.get(DEADLINE_VARIABLE)
    if text is None:
        return DEADLINE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{DEADLINE_VARIABLE} must be a positive number of seconds, got {text!r}.")
    return seconds
