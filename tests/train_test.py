"""Training runs from data to files, on the simulated devices of the suite."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from tools.common.command import UserError
from tools.common.devices import choose_mesh
from tools.recommender import click_model, experiment, report
from tools.recommender.clicks import PADDING
from tools.recommender.config import Experiment, SyntheticConfig, TrainConfig
from tools.recommender.experiment import run
from tools.recommender.synthetic import synthetic_clicks
from tools.recommender.training import TrainedModel, make_trainer, predict, train

REPOSITORY = Path(__file__).resolve().parent.parent
STREAM = SyntheticConfig(examples=6_000, users=40, items=60, categories=8, zipf=0.5)
# Without what holds a small and noisy data set back: the stream is large for its vocabulary.
TRAIN = TrainConfig(
    mesh=(2,),
    steps=120,
    batch_size=256,
    emb_width=16,
    learning_rate=0.1,
    dropout=0.0,
    hide_users=0.0,
    user_penalty=0.0,
    item_penalty=0.0,
    trait_penalty=0.0,
)


@pytest.fixture(scope="module", autouse=True)
def _standard_promotion():
    """Optax' Adam raises a float to an integer power, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _experiment(out, *, stream=STREAM, data="synthetic", fold=0, click_rating=None, **changed):
    config = dataclasses.replace(TRAIN, **changed)
    return Experiment(data, Path(out), Path(out) / "cache", click_rating, fold, config, stream)


def _csv(folder, rows, *, rating=lambda i: 5 if i % 5 in (0, 3) else 1):
    """A file of ratings in order of time; its last example is no click, the one before it is."""
    lines = [f"{i % 9},{i % 11},{rating(i - rows)},{i}\n" for i in range(rows)]
    path = folder / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    return str(path)


def _run(out, **changed):
    shown = io.StringIO()
    metrics = run(_experiment(out, **changed), Console(file=shown, width=100))
    return metrics, shown.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with staleness 1: its folder, its metrics and what it showed."""
    out = tmp_path_factory.mktemp("finished")
    return (out, *_run(out))


def test_a_run_learns_more_than_biases_and_leaves_two_whole_files_and_a_table(finished):
    out, metrics, shown = finished
    assert metrics["test_auc"] > metrics["baseline_auc"] + 0.01
    assert metrics["dropped_tokens"] == metrics["skipped_steps"] == 0
    assert sorted(path.name for path in out.iterdir()) == ["metrics.json", "training.png"]
    written = json.loads((out / "metrics.json").read_text())
    assert written == {**metrics, "mesh": [2]}
    wanted = {"devices", "staleness", "steps", "train_loss", "test_auc", "baseline_auc"}
    assert wanted | {"tokens_per_second", "dropped_tokens", "skipped_steps"} <= set(written)
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    for text in ("120/120", "tokens/s", f"{metrics['test_auc']:.4f}", "dropped tokens"):
        assert text in shown


def test_one_seed_gives_the_same_bits(finished, tmp_path):
    _, metrics, _ = finished
    again, _ = _run(tmp_path)
    assert {**again, "tokens_per_second": 0} == {**metrics, "tokens_per_second": 0}


def test_synchronous_training_comes_to_the_same_quality(finished, tmp_path):
    _, metrics, _ = finished
    synchronous, _ = _run(tmp_path, staleness=0)
    assert abs(synchronous["test_auc"] - metrics["test_auc"]) < 0.01


def test_a_validation_fold_on_a_grid_with_little_room(tmp_path):
    """The folds leave the test part out; tokens without room are counted; other dtypes train."""
    changed = {"fold": 1, "mesh": (2, 2), "num_unique": 32, "dtype": "bfloat16", "seed": 1}
    few = dataclasses.replace(STREAM, examples=600)
    metrics, _ = _run(tmp_path, **changed, stream=few, steps=2, staleness=0)
    assert metrics["examples"] == 540
    assert metrics["dropped_tokens"] > 0
    assert metrics["devices"] == 4


def test_the_first_bad_loss_does_not_end_a_run():
    """Steps with a loss that is not finite are counted, and change nothing."""
    data = synthetic_clicks(STREAM)
    config = dataclasses.replace(TRAIN, steps=3, staleness=0)
    grades = data.grades.copy()
    grades[:, 0] = np.nan
    trainer = make_trainer(data, config)
    before = np.asarray(trainer.state.table)
    reports = []
    trained = train(trainer, dataclasses.replace(data, grades=grades), config, reports.append)
    assert [step.skipped for step in reports] == [1, 2, 3]
    np.testing.assert_array_equal(np.asarray(trained.table), before)
    with pytest.raises(UserError, match="lower --learning_rate"):
        experiment.final_loss(reports)


def test_predictions_look_rows_up_in_the_sharded_table():
    """Of a model that is random everywhere: as one begins, some of its weights are zeros."""
    data = synthetic_clicks(STREAM)
    trainer = make_trainer(data, dataclasses.replace(TRAIN, mesh=(8,)))
    rng = np.random.default_rng(0)
    params, table = jax.tree.map(
        lambda leaf: jax.device_put(
            rng.normal(0, 0.5, leaf.shape).astype(leaf.dtype), leaf.sharding
        ),
        (trainer.state.dense_params, trainer.state.table),
    )
    trained = TrainedModel(trainer.handle, trainer.model, params, table)
    token_ids = data.token_ids[:700].copy()  # not a whole number of batches
    token_ids[::3, 0] = PADDING

    table = np.asarray(trained.table)
    rows = np.where((token_ids != PADDING)[..., None], table[token_ids], 0).reshape(-1, 16)
    params = jax.tree.map(jnp.asarray, jax.device_get(trained.params))
    expected = click_model.click_log_odds(
        params, jnp.asarray(rows), jnp.asarray(token_ids), trained.config
    )
    found = predict(trained, token_ids)
    assert found.shape == (700,)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 100}, "--batch_size=100: 8 devices do not divide it: use 96 or 104"),
        ({"batch_size": 5}, "--batch_size=5: 8 devices do not divide it: use 8"),
        ({"batch_size": 16_000}, "--batch_size=16000: there are 5,400 examples .* use 5400 or"),
        ({"batch_size": 16, "data": 11}, "--batch_size=16: there are 9 examples .* use 8 or"),
        ({"mesh": (16,), "data": 11}, "--devices=16: wanted at most the 9 examples to train on"),
        ({"emb_width": 20}, "--emb_width=20: 8 devices do not divide it: use 16 or 24"),
        ({"emb_width": 2**40}, "--emb_width=1099511627776 take .* bytes, and this machine has"),
        ({"eps": 0.0}, "eps=0.0 must be"),
        ({"half_life_steps": -1.0}, "half_life_steps=-1.0 must be"),
        ({"click_rating": 4.0}, "--click_rating=4: --data=synthetic has clicks and no ratings"),
        ({"data": "ratings.tsv"}, "wanted movielens, synthetic or a file named"),
    ],
)
def test_settings_that_cannot_be_are_named_and_lose_nothing(
    tmp_path, tmp_path_factory, changed, message
):
    (tmp_path / "metrics.json").write_text("of an earlier run")
    if isinstance(changed.get("data"), int):
        changed = {**changed, "data": _csv(tmp_path_factory.mktemp("csv"), changed["data"])}
    with pytest.raises(ValueError, match=message):
        _run(tmp_path, **{"mesh": (8,)} | changed)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert (tmp_path / "metrics.json").read_text() == "of an earlier run"


@pytest.mark.parametrize(
    ("mesh", "devices", "shape"),
    [(None, None, (8,)), (None, 3, (3,)), ("2x4", None, (2, 4)), ("2x2x2", 8, (2, 2, 2))],
)
def test_choose_mesh(mesh, devices, shape):
    assert choose_mesh(mesh, devices) == shape


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ("2x", None, "--mesh=2x: wanted sizes such as"),
        ("0x8", None, "--mesh=0x8: wanted sizes such as"),
        ("2x4", 4, "--mesh=2x4 has 8 devices, and --devices is 4"),
        (None, 9, "9 devices were asked for, and there are 8 of platform cpu"),
    ],
)
def test_choose_mesh_names_what_is_wrong(mesh, devices, message):
    with pytest.raises(UserError, match=message):
        choose_mesh(mesh, devices)


def test_an_interrupted_write_keeps_the_earlier_file(tmp_path):
    target = tmp_path / "metrics.json"
    target.write_text("earlier")

    def half(path):
        path.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.write_whole(target, half)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert target.read_text() == "earlier"


def _command(tmp_path, *flags):
    """Runs quickstart.sh with this interpreter in place of a venv, and no devices simulated yet."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    # Other versions than the pinned ones will do: nothing is to be installed here.
    whole = 'case "$2" in *probe_python.py) exit 0 ;; esac'
    python.write_text(f'#!/bin/sh\n{whole}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"XREX_VENV": str(venv), "XREX_PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # which take longer than the two steps
    return subprocess.run(
        ["bash", str(REPOSITORY / "tools" / "quickstart.sh"), *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_quickstart_passes_flags_on_and_simulates_devices(tmp_path):
    ratings = "".join(f"{i % 9},{i % 11},{1 + i * 7 % 5},{i}\n" for i in range(200))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + ratings)
    out = tmp_path / "out"
    result = _command(
        tmp_path,
        f"--data={tmp_path / 'ratings.csv'}",
        "--devices=2",
        "--steps=2",
        "--staleness=0",
        "--batch_size=64",
        "--emb_width=8",
        f"--out={out}",
    )
    assert result.returncode == 0, result.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["devices"], metrics["steps"], metrics["emb_width"]) == (2, 2, 8)
    assert result.stderr == ""


def test_quickstart_tells_a_mistake_in_one_message(tmp_path):
    few = ("--data=synthetic", "--examples=200", "--batch_size=64")
    result = _command(tmp_path, *few, "--emb_width=12", f"--out={tmp_path / 'out'}")
    assert result.returncode == 2
    assert result.stderr.startswith("train: --emb_width=12: 8 devices do not divide it")
    assert "Traceback" not in result.stderr
