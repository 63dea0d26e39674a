"""The command that checks one layout: what it says, and its exit status."""

import pytest

from tests import judge
from tools import check_suite

pytestmark = pytest.mark.property

COMMON = "--tokens_per_batch=8 --emb_width=8 --examples=2"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (
            "--mesh data=2,model=2 --table_axis model --data_axis data,model",
            ["rejected by one_shard_per_rank: async_emb requires exactly one", "fails: "],
        ),
        ("--mesh a=2,b=1 --table_axis a,b --data_axis a", ["rejected on purpose"]),
        ("--mesh a=3 --table_axis a --data_axis a", ["tokens_per_batch=8 does not shard evenly"]),
        ("--mesh a=2 --table_axis z --data_axis a", ["'z' is not a mesh axis"]),
        (
            "--mesh a=2 --table_axis axis0 --data_axis axis0",
            ["'axis0' is not a mesh axis", "fails: "],
        ),
    ],
)
def test_agreement_in_words(axes: str, words: list[str]) -> None:
    agree, text = check_suite.check(settings(f"{axes} {COMMON}".split()))
    assert agree, text
    for word in [*words, "They agree."]:
        assert word in text


def settings(arguments: list[str]) -> check_suite.Settings:
    check_suite.COMMAND.parse(arguments)
    return check_suite.settings()


def test_an_accepted_layout_is_tried_on_batches_of_real_size() -> None:
    sizes = "--tokens_per_batch=4096 --emb_width=16 --examples=2"
    line = f"--mesh data=2,model=2 --table_axis model --data_axis model --explicit {sizes}"
    agree, text = check_suite.check(settings(line.split()))
    assert agree, text
    assert "NO:" not in text
    for word in ("accepted", "works", "oracle", "(2 random examples)", "They agree."):
        assert word in text


def test_spaces_in_lists_are_no_part_of_names() -> None:
    layout = settings(["--mesh", "a=2, b=1", "--table_axis", "a, b", "--data_axis", "b ,a"]).layout
    assert layout.mesh_sizes == {"a": 2, "b": 1}
    assert (layout.table_axis, layout.data_axis) == (("a", "b"), ("b", "a"))


def test_sizes_follow_the_devices() -> None:
    layout = settings(["--mesh=a=2,b=3", "--table_axis=a", "--data_axis=a"]).layout
    assert (layout.tokens_per_batch, layout.emb_width, layout.num_unique) == (12, 12, 12)
    assert layout.num_devices_per_node == 6
    other = ["--mesh=a=2,b=3", "--table_axis=a", "--data_axis=a", "--tokens_per_batch=8"]
    layout = settings([*other, "--num_devices_per_node=2"]).layout
    assert (layout.tokens_per_batch, layout.num_unique) == (8, 8)
    assert layout.num_devices_per_node == 2


def test_a_disagreement_is_an_error_with_a_line_that_makes_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "is_listed_exception", lambda _: False)
    arguments = f"--mesh a=2,b=1 --table_axis a,b --data_axis a {COMMON}"
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check_suite.COMMAND.status(check_suite.main, arguments.split()) == 1
    told = capsys.readouterr().out
    assert "NO: accepted exactly when it trains correctly" in told
    assert "They DISAGREE, on\nimport jax" in told
    assert "\nLayout(mesh=Mesh(" in told


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ("--mesh=a", "'a' is not AXIS=SIZE"),
        ("--mesh=a=0", "--mesh=a=0: wanted sizes of at least 1"),
        ("--mesh=a=65", "--mesh=a=65: 65 devices are too many to simulate: at most 64"),
        ("--mesh=a=2,a=2", "axis 'a' is there twice"),
        ("--tokens_per_batch=-2", "--tokens_per_batch=-2: wanted an integer of at least 1"),
        ("--num_unique=0", "--num_unique=0: wanted an integer of at least 1"),
        ("--tokens_per_batch=1048577", "--tokens_per_batch=1048577: too many to simulate"),
        ("--emb_width=100000000", "--emb_width=100000000"),
        ("--examples=0", "--examples=0: wanted an integer from 1"),
        ("--tokens=8", "--tokens: there is no such flag"),
    ],
)
def test_a_wrong_command_line_is_told(
    changed: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--mesh=a=2 --table_axis=a --data_axis=a {changed}".split()
    assert check_suite.COMMAND.status(check_suite.main, arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("check_suite: ")
    assert problem in err
    assert err.count("\n") == 1


def test_the_mesh_cannot_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_suite.COMMAND.status(check_suite.main, ["--table_axis=a"]) == 2
    assert "missing --mesh" in capsys.readouterr().err
