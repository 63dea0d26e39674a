"""Tools choose their devices in one way."""

import os

import jax
import pytest

from tools.common import devices
from tools.common.command import UserError

COUNT = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("present", "wanted", "flags"),
    [
        ("", None, f"{COUNT}=8"),
        ("", 3, f"{COUNT}=3"),
        ("--other", 3, f"--other {COUNT}=3"),
        (f"{COUNT}=4", None, f"{COUNT}=4"),
        (f"{COUNT}=4", 3, f"{COUNT}=4 {COUNT}=3"),
    ],
)
def test_the_count_of_the_command_line_holds(
    present: str, wanted: int | None, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", present)
    devices.simulate(wanted)
    assert os.environ["XLA_FLAGS"] == flags


@pytest.fixture
def no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.mark.usefixtures("no_change")
@pytest.mark.parametrize(
    ("mesh", "count", "shape"),
    [(None, None, (8,)), (None, 3, (3,)), ("2x4", None, (2, 4)), ("2x2", 4, (2, 2))],
)
def test_a_mesh_of_devices(mesh: str | None, count: int | None, shape: tuple[int, ...]) -> None:
    assert devices.choose_mesh(mesh, count) == shape
    assert len(devices.choose_devices(count)) == (count or 8)


@pytest.mark.usefixtures("no_change")
@pytest.mark.parametrize(
    ("mesh", "count", "told"),
    [
        ("2x4", 4, "--mesh=2x4 has 8 devices, and --devices is 4"),
        ("3x3", None, "9 devices were asked for, and there are 8 of platform cpu"),
        (None, 9, "9 devices were asked for, and there are 8 of platform cpu"),
        ("2x", None, "--mesh=2x: wanted sizes such as 8, 2x4"),
        ("0", None, "--mesh=0: wanted sizes"),
        ("", None, "--mesh=: wanted sizes"),
        ("2x1024", None, "--mesh=2x1024: wanted at most 1024 devices"),
        ("9" * 5000, None, ": wanted sizes"),
    ],
)
def test_a_mesh_that_cannot_be(mesh: str | None, count: int | None, told: str) -> None:
    with pytest.raises(UserError) as raised:
        devices.choose_mesh(mesh, count)
    assert told in str(raised.value)


def test_memory_that_is_not_there_is_not_asked_for() -> None:
    devices.check_memory(2**20, "tables")
    with pytest.raises(UserError, match="tables take 1,152,921,504,606,846,976 bytes"):
        devices.check_memory(2**60, "tables")
