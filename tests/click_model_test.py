"""The dense model against plain loops, and its loss against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.recommender import click_model
from tools.recommender.click_model import ClickInputs, ClickModelConfig
from tools.recommender.clicks import PADDING, Column, make_click_data
from tools.recommender.config import SyntheticConfig
from tools.recommender.synthetic import synthetic_clicks

CONFIG = ClickModelConfig(
    slots=(1, 1, 3, 1), emb_width=4, levels=3, label_level=1, hidden=5, dropout=0.5
)
SLOTS = sum(CONFIG.slots)


def _example(seed=0, batch=6):
    """Random parameters, and tokens, rows and grades of a batch, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape, np.float32),
        click_model.init_params(jax.random.key(seed), CONFIG, np.zeros(CONFIG.levels, np.float32)),
    )
    token_ids = rng.integers(-1, 20, size=(batch, SLOTS)).astype(np.int32)
    token_ids[0] = PADDING
    rows = rng.standard_normal((batch, SLOTS, CONFIG.emb_width), np.float32)
    rows[token_ids == PADDING] = 0
    grades = (rng.random((batch, CONFIG.levels)) < 0.5).astype(np.float32)
    return params, token_ids, rows.reshape(-1, CONFIG.emb_width), grades


def _score_by_loops(params, rows, token_ids):
    """One example's score; rows are (slots, emb_width)."""
    fields, start = [], 0
    for slots in CONFIG.slots:
        real = [rows[i] for i in range(start, start + slots) if token_ids[i] != PADDING]
        fields.append(np.mean(real, axis=0) if real else np.zeros(CONFIG.emb_width, np.float32))
        start += slots
    score = sum(fields[i] @ params.bias_kernels[i] for i in range(2))
    dots = np.array([fields[i] @ fields[j] for i in range(4) for j in range(i + 1, 4)])
    hidden = np.maximum(dots @ params.hidden_kernel + params.hidden_bias, 0)
    return score + dots @ params.dot_weights + hidden @ params.output_kernel


def test_scores_equal_the_loops():
    params, token_ids, rows, _ = _example()
    scores = click_model.scores(params, jnp.asarray(rows), jnp.asarray(token_ids), CONFIG)
    each = rows.reshape(len(token_ids), SLOTS, -1)
    expected = [_score_by_loops(params, *example) for example in zip(each, token_ids, strict=True)]
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_the_log_odds_of_a_click_are_those_of_its_level():
    params, token_ids, rows, _ = _example()
    arguments = params, jnp.asarray(rows), jnp.asarray(token_ids), CONFIG
    log_odds = click_model.click_log_odds(*arguments)
    expected = click_model.scores(*arguments) + params.thresholds[CONFIG.label_level]
    np.testing.assert_array_equal(log_odds, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_are_float32_whatever_the_tables_dtype(dtype):
    params, token_ids, rows, _ = _example()
    scores = click_model.scores(params, jnp.asarray(rows, dtype), jnp.asarray(token_ids), CONFIG)
    assert scores.dtype == jnp.float32
    assert scores.shape == (len(token_ids),)


def test_the_loss_is_the_log_loss_of_all_levels_and_the_penalties():
    config = ClickModelConfig(**{**vars(CONFIG), "dropout": 0.0})
    params, token_ids, rows, grades = _example()
    penalties = np.random.default_rng(1).random(token_ids.shape, np.float32)
    inputs = ClickInputs(token_ids, grades, penalties, np.asarray(0, np.int32))
    loss = click_model.loss(params, jnp.asarray(rows), inputs, config)
    scores = np.asarray(click_model.scores(params, jnp.asarray(rows), token_ids, config))
    chance = 1 / (1 + np.exp(-(scores[:, None] + params.thresholds)))
    likelihood = np.where(grades > 0.5, chance, 1 - chance)
    penalty = 0.5 * np.sum(penalties.ravel() * np.sum(rows**2, axis=1))
    wanted = (penalty - np.log(likelihood).sum()) / len(scores)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert loss.shape == ()


def test_dropout_depends_on_seed_and_step_alone_and_keeps_the_mean():
    params, token_ids, rows, grades = _example()

    def loss(step, seed=0):
        config = ClickModelConfig(**{**vars(CONFIG), "seed": seed})
        no_penalties = np.zeros(token_ids.shape, np.float32)
        inputs = ClickInputs(token_ids, grades, no_penalties, np.asarray(step, np.int32))
        return float(click_model.loss(params, jnp.asarray(rows), inputs, config))

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    assert loss(1) != loss(1, seed=1)

    # With dot products switched off the score is linear, so that the mean over many draws is known.
    linear = params._replace(
        dot_weights=jnp.zeros_like(params.dot_weights),
        output_kernel=jnp.zeros_like(params.output_kernel),
    )
    arguments = linear, jnp.asarray(rows), jnp.asarray(token_ids), CONFIG
    draws = jax.vmap(lambda key: click_model.scores(*arguments, dropout_key=key))(
        jax.random.split(jax.random.key(0), 4_000)
    )
    error = np.abs(np.mean(draws, axis=0) - click_model.scores(*arguments))
    assert (error < 5 * np.std(draws, axis=0) / np.sqrt(4_000) + 1e-6).all()
    assert np.std(draws, axis=0)[1:].min() > 0.1


def test_fresh_parameters_have_the_documented_shapes():
    thresholds = np.arange(CONFIG.levels, dtype=np.float32)
    params = click_model.init_params(jax.random.key(0), CONFIG, thresholds)
    np.testing.assert_array_equal(params.thresholds, thresholds)
    assert jax.tree.map(jnp.shape, params) == click_model.ClickModelParams(
        bias_kernels=(2, 4),
        dot_weights=(6,),
        hidden_kernel=(6, 5),
        hidden_bias=(5,),
        output_kernel=(5,),
        thresholds=(3,),
    )
    assert {leaf.dtype for leaf in params} == {jnp.dtype("float32")}


def test_thresholds_start_at_the_log_odds_of_the_training_part():
    data = synthetic_clicks(SyntheticConfig(examples=1000, users=7, items=50))
    chance = 1 / (1 + np.exp(-click_model.level_log_odds(data)))
    np.testing.assert_allclose(chance, data.grades[:900].mean(axis=0), atol=0.01)


def test_config_follows_the_data():
    columns = [
        Column("user", np.arange(40)[:, None] % 4, 4),
        Column("movie", np.arange(40)[:, None] % 5, 5),
        Column("genre", np.arange(80).reshape(40, 2) % 3, 3),
    ]
    data = make_click_data("x", columns, 1 + np.arange(40) * 3 % 5, np.arange(40))
    config = click_model.config_for(data, 8, dropout=0.1, seed=7)
    assert (config.slots, config.emb_width) == ((1, 1, 2), 8)
    assert (config.dropout, config.seed) == (0.1, 7)
    assert (config.levels, config.label_level) == (4, 2)
