"""The checks of pmap on their own: numbers in, an error with its cures out, no device touched."""

import dataclasses
import functools
import re
from typing import Any

import jax
import pytest

from xrex.checked_pmap import checks as pmap_checks
from xrex.checked_pmap import signature, together
from xrex.checked_pmap.checks import Leaf


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every question about devices an error."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a check asked for devices")

    for name in ("devices", "local_devices", "device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, refuse)
    for name in ("process_count", "process_index"):
        monkeypatch.setattr(jax, name, refuse)


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize(
    ("axis_size", "local", "processes", "devices", "accepted"),
    [
        (None, 3, 1, None, True),
        (4, 4, 1, None, True),
        (8, 4, 1, None, False),
        (4, 8, 1, None, False),
        (4, 4, 1, 6, True),  # one process: the devices have a check of their own
        (8, 4, 2, None, True),
        (4, 4, 2, None, False),  # the local size where the global one is meant
        (2, 4, 2, None, False),
        (None, 4, 2, None, True),
        (6, 4, 2, 6, True),  # 4 devices here, 2 there
        (8, 4, 2, 6, False),
        (1, 1, 1, None, True),
        (0, 1, 1, None, False),
        (-1, 1, 1, None, False),
    ],
)
def test_axis_size(
    axis_size: int | None, local: int, processes: int, devices: int | None, accepted: bool
) -> None:
    if accepted:
        pmap_checks.check_axis_size(axis_size, local, processes, devices)
        return
    with pytest.raises(ValueError, match="axis_size") as caught:
        pmap_checks.check_axis_size(axis_size, local, processes, devices)
    assert str(caught.value) == (
        f"Specified axis_size {axis_size} doesn't match received axis_size {local}."
    )
    notes = _notes(caught.value)
    for cure in ("Leave axis_size out", "resize or pad the mapped axis", "batch.shape[0]"):
        assert cure in notes
    if processes > 1:
        assert "global size" in notes
        assert str(local * processes if devices is None else devices) in notes


@pytest.mark.parametrize("axis_size", [True, 4.0, "4", [4]])
def test_axis_size_is_an_int(axis_size: object) -> None:
    with pytest.raises(TypeError, match="pmap axis_size must be an int or None"):
        pmap_checks.check_axis_size_type(axis_size)


def test_size_comes_from_all_mapped_leaves() -> None:
    leaves = [Leaf("x", (2, 5), None), Leaf("y", (3, 4), 1), Leaf("z", (4,), 0)]
    assert pmap_checks.infer_axis_size(leaves) == 4


@pytest.mark.parametrize(
    ("leaves", "parts"),
    [
        ([], ["pmap requires at least one argument with a mapped axis."]),
        ([Leaf("x", (4,), None)], ["pmap requires at least one argument with a mapped axis."]),
        ([Leaf("x", (), 0)], ["x", "axis 0", "rank 0"]),
        ([Leaf("x", (4,), 0), Leaf("y", (4, 4), 2)], ["y", "axis 2", "rank 2", "(4, 4)"]),
        (
            [Leaf("x['a']", (4,), 0), Leaf("y", (3, 2), 1)],
            ["x['a'] has 4 entries along axis 0", "y has 2 along axis 1", "(3, 2)"],
        ),
        ([Leaf("x", (0, 2), 0)], ["at least one entry", "x", "(0, 2)"]),
    ],
)
def test_size_that_cannot_be_inferred(leaves: list[Leaf], parts: list[str]) -> None:
    with pytest.raises(ValueError, match="pmap") as caught:
        pmap_checks.infer_axis_size(leaves)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("axes", [True, 1.0, "0", (0, "a"), {"x": 0.5}])
def test_axes_are_ints(axes: object) -> None:
    with pytest.raises(TypeError, match="pmap in_axes must be an int, None, or") as caught:
        pmap_checks.check_axes("in_axes", axes)
    assert str(axes) in str(caught.value)


def test_axes_are_not_negative() -> None:
    with pytest.raises(ValueError, match=r"pmap out_axes must not be negative, but got \(0, -1\)"):
        pmap_checks.check_axes("out_axes", (0, -1))


@pytest.mark.parametrize(
    ("argnums", "positions"), [(2, (2,)), ([3, 1, 3], (1, 3)), (iter((1, 0)), (0, 1)), ((), ())]
)
def test_argument_numbers(argnums: object, positions: tuple[int, ...]) -> None:
    assert pmap_checks.check_argnums("donate_argnums", argnums) == positions


@pytest.mark.parametrize(
    ("argnums", "error"),
    [(-1, ValueError), ((0, -2), ValueError), (1.0, TypeError), (True, TypeError)],
)
def test_wrong_argument_numbers(argnums: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="pmap donate_argnums must"):
        pmap_checks.check_argnums("donate_argnums", argnums)


def test_more_entries_than_devices() -> None:
    pmap_checks.check_device_count(8, 8)
    with pytest.raises(ValueError, match="9 entries, but only 8 devices are available") as caught:
        pmap_checks.check_device_count(9, 8)
    assert "--xla_force_host_platform_device_count=9" in _notes(caught.value)


@pytest.mark.parametrize(
    ("owners", "local", "process", "match"),
    [
        ([0] * 4, 4, 0, None),
        ([0, 0, 1], 2, 0, None),
        ([0, 0, 1], 1, 1, None),
        ([1, 1, 0, 0], 2, 0, None),
        ([0] * 6, 4, 0, "4 entries, but was given 6 devices of this process"),
        ([0, 0, 1], 2, 1, "2 entries, but was given 1 devices of this process"),
        ([1, 1], 2, 0, "given 0 devices of this process"),
        ([0, 1, 0, 1], 2, 0, "must be neighbours"),
    ],
)
def test_given_devices(owners: list[int], local: int, process: int, match: str | None) -> None:
    if match is None:
        pmap_checks.check_given_devices(owners, local, process)
        return
    with pytest.raises(ValueError, match=match):
        pmap_checks.check_given_devices(owners, local, process)


@dataclasses.dataclass(frozen=True)
class _Config:
    names: frozenset[str]
    function: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("a", "'a'"),
        (frozenset({"b", "a", "c"}), "{'a', 'b', 'c'}"),
        ({"k": {2, 1}}, "{'k': {1, 2}}"),
        ((1, [None]), "tuple(1, list(None))"),
        (_notes, f"{__name__}._notes"),
        (functools.partial(_notes, 1), f"tuple('partial', {__name__}._notes, tuple(1), {{}})"),
        (_Config(frozenset("ba"), len), "_Config{'names': {'a', 'b'}, 'function': builtins.len}"),
    ],
)
def test_texts_that_are_the_same_in_every_process(value: object, text: str) -> None:
    assert signature.stable_text(value) == text


def test_texts_hold_no_address() -> None:
    class Plain:
        pass

    assert signature.stable_text(Plain()) == signature.stable_text(Plain())


def test_signatures_that_are_the_same() -> None:
    signature.check_same({})
    signature.check_same({0: {"a": "1"}, 1: {"a": "1"}})


@pytest.mark.parametrize(
    ("signatures", "line", "found"),
    [
        (
            [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}],
            "same b",
            "process 0: 2; process 1: 3.",
        ),
        (
            [{"a": "1"}, {"a": "2"}, {"a": "1"}],
            "same a",
            "processes 0, 2: 1; process 1: 2.",
        ),
        (
            [{"a": "1"}, {"a": "1", "b": "2"}],
            "same b",
            "process 0: none; process 1: 2.",
        ),
    ],
)
def test_signatures_that_differ(signatures: list[dict[str, str]], line: str, found: str) -> None:
    text = f"pmap needs the {line} on every process, but got {found}"
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        signature.check_same(dict(enumerate(signatures)))
    assert "No process launched anything" in _notes(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [(None, 30.0), ("0.5", 0.5), ("90", 90.0)])
def test_deadline(monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float) -> None:
    monkeypatch.delenv("XREX_PMAP_SECONDS", raising=False)
    if text is not None:
        monkeypatch.setenv("XREX_PMAP_SECONDS", text)
    assert together.deadline_seconds() == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_wrong_deadline(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XREX_PMAP_SECONDS", text)
    with pytest.raises(ValueError, match="XREX_PMAP_SECONDS must be a positive number of seconds"):
        together.deadline_seconds()
