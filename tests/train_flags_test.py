"""tools/train.py as a command: wrong values of every flag, wrong files, and names with brackets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tools.recommender import experiment
from tools.recommender.config import Experiment, SyntheticConfig, TrainConfig
from tools.recommender.training import StepReport
from tools.train import COMMAND, main

ROOT = Path(__file__).resolve().parent.parent
HEADER = "userId,movieId,rating,timestamp\n"
SHORT = ("--data=synthetic", "--examples=200", "--users=9", "--items=9", "--batch_size=64")
# One device and a synchronous step compile soonest.
SMALL = ("--batch_size=64", "--emb_width=8", "--steps=2", "--devices=1", "--staleness=0")


@pytest.fixture(scope="module", autouse=True)
def _standard_promotion():
    """Optax' Adam raises a float to an integer power, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def nothing_is_learned(monkeypatch):
    """Leaves training and prediction out of a run: what it tells of its data is the same."""

    def train_with_bar(console, trainer, data, config):
        console.print("training")
        return trainer, [StepReport(1, 0.5, 0, 0, 1.0)]

    def score_test_part(trained, baseline, data):
        scores = np.arange(len(data.labels) - data.train_size, dtype=np.float64)
        return {"model": scores, "biases": scores}

    monkeypatch.setattr(experiment, "train_with_bar", train_with_bar)
    monkeypatch.setattr(experiment, "score_test_part", score_test_part)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the tool in a folder of its own, without a network: its status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    def command(*arguments):
        status = COMMAND.status(main, arguments)
        return (status, *capsys.readouterr())

    return command


def write(path, ratings):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{i % 9},{i % 11},{rating},{i}\n" for i, rating in enumerate(ratings)]
    path.write_text(HEADER + "".join(lines))
    return path


HUGE = ["9223372036854775807", "9" * 400]
# One parser reads all flags of a kind: command_test.py has more of such values.
NO_INTEGERS = ["", "abc", "nan", "1.5", "4_5", "-1", *HUGE]
NO_NUMBERS = ["", "nan", "inf", "1e999", "4_5", "-1"]
WRONG = {
    "staleness": [*NO_INTEGERS, "2"],
    "steps": [*NO_INTEGERS, "0"],
    "batch_size": [*NO_INTEGERS, "0", "7", "201", "192"],
    "emb_width": [*NO_INTEGERS, "0", "7"],
    "num_unique": [*NO_INTEGERS, "0", "193"],
    "devices": [*NO_INTEGERS, "0", "9", "1000"],
    "mesh": ["", "x", "2x", "0x2", "2x-4", "nan", "2x4x", "1e3", "9", "3x3", "8x999999", "2,4"],
    "fold": [*NO_INTEGERS, "4"],
    "seed": [*NO_INTEGERS, "4294967296"],
    "examples": [*NO_INTEGERS, "0", "1", "2"],
    "users": [*NO_INTEGERS, "0"],
    "items": [*NO_INTEGERS, "0"],
    "dtype": ["", "float16", "FLOAT32", "1"],
    "lazy_decay": ["", "maybe", "2"],
    "learning_rate": [*NO_NUMBERS, "1e39", "1e300"],
    "dense_learning_rate": [*NO_NUMBERS, "1e39"],
    "eps": [*NO_NUMBERS, "0", "1e-46", "1e-320", "1e39"],
    "half_life_steps": [*NO_NUMBERS, "0", "1e39"],
    "weight_decay": [*NO_NUMBERS, "1e39"],
    "dropout": [*NO_NUMBERS, "1", "1.5"],
    "hide_users": [*NO_NUMBERS, "1", "2"],
    "user_penalty": [*NO_NUMBERS, "1e39"],
    "item_penalty": [*NO_NUMBERS, "1e39"],
    "trait_penalty": [*NO_NUMBERS, "1e39"],
    "click_rating": [*NO_NUMBERS[:-1], "4"],
    "data": ["", " ", "nan", "ratings.tsv", "folder", "."],
    "out": ["", "a file", "a file/out", "a folder of folders"],
    "cache": ["", "a file", "a file/cache"],
}


def test_every_flag_has_wrong_values():
    assert sorted(WRONG) == sorted(COMMAND.names)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_gets_one_message_that_names_the_flag(run, name, value):
    Path("a file").touch()
    Path("a folder of folders/metrics.json").mkdir(parents=True)
    Path("folder").mkdir()
    small = ["--data=movielens"] if name == "cache" else [*SHORT, "--emb_width=8", "--steps=1"]
    status, out, err = run(*small, f"--{name}={value}")
    assert status == 2
    assert out == ""
    assert err.startswith("train: ")
    assert f"--{name}" in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("--data=no.csv", "no.csv: No such file or directory; check the path"),
        ("--data=folder.csv", "folder.csv: Is a directory; check the path"),
        ("--data=empty.csv", "empty.csv:1: the file is empty"),
        ("--data=bad.csv", "bad.csv:3: rating '4_5' is not a finite decimal number"),
        ("--data=" + "x" * 300 + ".csv", "File name too long"),
        ("--batch=64", "--batch: there is no such flag"),
        ("--width=64", "--width: there is no such flag"),
        ("stray", "'stray' belongs to no flag"),
    ],
)
def test_a_wrong_file_or_argument_gets_one_message(run, flag, what):
    Path("folder.csv").mkdir()
    Path("empty.csv").touch()
    Path("bad.csv").write_text(HEADER + "1,2,3,4\n1,2,4_5,5\n")
    status, out, err = run(flag)
    assert (status, out) == (2, "")
    assert what in err
    assert err.count("\n") == 1


ALL_CLICKS = [5 if 4_050 <= i < 4_500 else 1 + i * 7 % 5 for i in range(5_000)]


@pytest.mark.parametrize(
    ("ratings", "flags", "what"),
    [
        (ALL_CLICKS, ["--fold=1"], "examples 4,051 to 4,500 of 4,500, by time) has clicks only"),
        ([5] * 200, [], "the training part (examples 1 to 180 of 200, by time) has clicks only"),
        ([1, 5] * 90 + [5] * 20, [], "test part (examples 181 to 200 of 200, by time) has clicks"),
        ([1, 5] * 90 + [1] * 20, [], "test part (examples 181 to 200 of 200, by time) has non-"),
        ([1, 2] * 100, ["--click_rating=3"], "a click is a rating of at least 3: choose another"),
        ([1], [], "the training part is empty"),
    ],
)
def test_too_little_of_one_class_is_told_before_any_training(
    run, monkeypatch, ratings, flags, what
):
    write(Path("ratings.csv"), ratings)
    monkeypatch.setattr("tools.recommender.experiment.make_trainer", None)
    status, out, err = run("--data=ratings.csv", *flags)
    assert (status, out) == (2, "")
    assert err.startswith("train: ratings.csv: ")
    assert what in err
    assert "--click_rating" in err
    assert err.count("\n") == 1


def test_a_whole_run_prints_names_as_they_are_and_has_the_folds_of_both_classes(run):
    """The one run here that trains."""
    data, out = "[new] data/r.csv", "[exp] out"
    write(Path(data), ALL_CLICKS)
    status, printed, err = run(f"--data={data}", f"--out={out}", *SMALL)
    assert (status, err) == (0, "")
    assert "only 2 of 3 validation folds have both clicks and non-clicks; those choose" in printed
    assert printed.startswith(f"{data}: 4,500 examples to train on, 500 to test\n")
    assert "2/2" in printed
    assert f"{data} on 1 devices:\n" in printed
    assert printed.endswith(f"wrote {out}/metrics.json and {out}/training.png\n")
    metrics = json.loads((Path(out) / "metrics.json").read_text())
    assert (metrics["data"], metrics["baseline_folds"], metrics["steps"]) == (data, 2, 2)
    assert metrics["click_rating"] == 4


@pytest.mark.parametrize(
    ("ratings", "flags", "least", "share"),
    [
        ([i * 7 % 10 % 2 for i in range(200)], [], 1, 0.5),
        ([1 + i * 7 % 10 for i in range(200)], [], 8, 0.3),
        ([1 + i * 7 % 5 for i in range(200)], ["--click_rating=4.5"], 4.5, 0.2),
    ],
)
@pytest.mark.usefixtures("nothing_is_learned")
def test_what_counts_as_a_click_is_told(run, ratings, flags, least, share):
    write(Path("ratings.csv"), ratings)
    status, out, err = run("--data=ratings.csv", *SMALL, *flags)
    assert (status, err) == (0, "")
    told = f"a click is a rating of at least {least:g} (--click_rating changes that): {share:.1%} "
    assert told in out
    assert out.index(told) < out.index("training")
    metrics = json.loads(Path("out/metrics.json").read_text())
    assert (metrics["click_rating"], metrics["click_share"]) == (least, share)


def test_help_says_what_counts_as_a_click(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "4 where the highest rating is from 4 to 5; 1 where all" in " ".join(out.split())


@pytest.mark.parametrize(
    ("data", "out"),
    [
        ("[bold]x[/bold] :smile:.csv", "$a_1$ [/] out"),
        ("[/red] {0} %s " + "long " * 20 + ".csv", "\\[out] " * 10),
    ],
)
@pytest.mark.usefixtures("nothing_is_learned")
def test_names_are_printed_as_they_are(run, data, out):
    write(Path(data), [1 + i * 7 % 5 for i in range(200)])
    status, printed, err = run(f"--data={data}", f"--out={out}", *SMALL)
    assert (status, err) == (0, "")
    assert printed.startswith(f"{data}: 180 examples to train on, 20 to test\n")
    assert f"{data} on 1 devices:\n" in printed
    assert printed.endswith(f"wrote {out}/metrics.json and {out}/training.png\n")
    assert json.loads((Path(out) / "metrics.json").read_text())["data"] == data


def test_what_goes_wrong_names_it_as_it_is(run):
    assert run("--data=[new] data/[/r].csv")[2].startswith("train: [new] data/[/r].csv: No such")


def test_help_loads_neither_jax_nor_what_draws():
    program = (
        "import sys, tools.train\n"
        "tools.train.COMMAND.status(tools.train.main, ['--help'])\n"
        "print([n for n in ('jax', 'matplotlib', 'pyarrow', 'rich', 'scipy') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.endswith("\n[]\n"), result.stderr


def test_the_defaults_are_those_of_the_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    seen = []
    monkeypatch.setattr(
        "tools.recommender.experiment.run", lambda experiment, _: seen.append(experiment)
    )
    assert COMMAND.status(main, []) == 0
    train, synthetic = TrainConfig(mesh=(8,)), SyntheticConfig()
    assert seen == [Experiment("movielens", Path("out"), None, None, 0, train, synthetic)]
