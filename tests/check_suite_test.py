"""The command that checks one layout: what it says, and its exit status."""

import pytest

from tests import judge
from tools import check_suite

pytestmark = pytest.mark.property

COMMON = "--tokens 8 --width 8 --examples 3"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("--mesh data=2,model=4 --table-axis model --data-axis model", ["accepted", "oracle"]),
        ("--mesh model=2 --table-axis model --data-axis model --explicit", ["works"]),
        (
            "--mesh data=2,model=2 --table-axis model --data-axis data,model",
            ["rejected by one_shard_per_rank: async_emb requires exactly one", "fails: "],
        ),
        ("--mesh a=2,b=1 --table-axis a,b --data-axis a", ["rejected on purpose"]),
        ("--mesh a=3 --table-axis a --data-axis a", ["tokens_per_batch=8 does not shard evenly"]),
        ("--mesh a=2 --table-axis z --data-axis a", ["'z' is not a mesh axis"]),
        (
            "--mesh a=2 --table-axis axis0 --data-axis axis0",
            ["'axis0' is not a mesh axis", "fails: "],
        ),
    ],
)
def test_agreement_in_words(axes: str, words: list[str]) -> None:
    agree, text = check_suite.check(check_suite.parse(f"{axes} {COMMON}".split()))
    assert agree, text
    for word in [*words, "They agree."]:
        assert word in text


def test_a_batch_of_real_size() -> None:
    line = "--mesh a=2 --table-axis a --data-axis a --tokens 4096 --width 16 --examples 2"
    agree, text = check_suite.check(check_suite.parse(line.split()))
    assert agree, text
    assert "NO:" not in text


def test_spaces_in_lists_are_no_part_of_names() -> None:
    request = check_suite.parse(
        ["--mesh", "a=2, b=1", "--table-axis", "a, b", "--data-axis", "b ,a"]
    )
    assert request.axes == (("a", 2), ("b", 1))
    assert (request.table_axis, request.data_axis) == (("a", "b"), ("b", "a"))


def test_a_disagreement_is_an_error_with_a_line_that_makes_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "is_listed_exception", lambda _: False)
    arguments = f"--mesh a=2,b=1 --table-axis a,b --data-axis a {COMMON}"
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check_suite.main(arguments.split()) == 1
    told = capsys.readouterr().out
    assert "NO: accepted exactly when it trains correctly" in told
    assert "They DISAGREE, on\nimport jax" in told
    assert "\nLayout(mesh=Mesh(" in told


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ("--mesh a", "not of the form name=size"),
        ("--mesh a=0", "not of the form name=size"),
        ("--mesh a=65", "too many to simulate"),
        ("--mesh a=2,a=2", "names axis 'a' twice"),
        ("--tokens -2", "not a positive integer"),
    ],
)
def test_a_wrong_command_line_is_told(
    changed: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check_suite.parse(f"--mesh a=2 --table-axis a --data-axis a {changed}".split())
    assert problem in capsys.readouterr().err
