"""The AUC against its definition, and the baseline against what it must find and ignore."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.recommender.clicks import Column, make_click_data
from tools.recommender.metrics import auc, fit_baseline, fit_biases, validation_folds

LABELLED_SCORES = st.lists(
    st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40
).filter(lambda rows: len({label for label, _ in rows}) == 2)


@given(LABELLED_SCORES)
def test_auc_is_the_share_of_pairs_in_order_with_ties_one_half(rows):
    positive = [score for label, score in rows if label]
    negative = [score for label, score in rows if not label]
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    labels, scores = map(np.asarray, zip(*rows, strict=True))
    # Sums of halves are exact, so both sides are one division of the same numbers.
    assert auc(labels, scores) == wins / (len(positive) * len(negative))


def test_auc_of_a_worked_example():
    assert auc(np.array([0, 1, 1]), np.array([0.2, 0.2, 0.7])) == 0.75


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1], [0.5], r"labels \(2,\) and scores \(1,\)"),
        ([0, 1], [0.5, np.nan], "1 of 2 scores are not finite"),
        ([1, 1], [0.5, 0.1], "labels of both kinds: 2 ones of 2"),
    ],
)
def test_auc_refuses_what_has_none(labels, scores, message):
    with pytest.raises(ValueError, match=message):
        auc(np.array(labels), np.array(scores))


def _planted(examples, *, users=30, items=40, seed=0):
    """Clicks whose log-odds are exactly a user's bias plus an item's, and those log-odds."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(users, size=examples), rng.integers(items, size=examples)
    log_odds = rng.standard_normal(users)[user] + rng.standard_normal(items)[item]
    clicked = rng.random(examples) < 1 / (1 + np.exp(-log_odds))
    columns = [Column("user", user[:, None], users), Column("movie", item[:, None], items)]
    data = make_click_data("planted", columns, np.where(clicked, 5.0, 1.0), np.arange(examples))
    return data, log_odds


def test_the_fit_is_at_the_minimum_of_its_objective():
    data, _ = _planted(2_000)
    model = fit_biases(data, 3.0, 0.5)
    tokens, labels = data.token_ids[: data.train_size], data.labels[: data.train_size]
    residual = 1 / (1 + np.exp(-model.scores(tokens))) - labels
    user, item = data.features
    for side, feature, penalty in ((0, user, 3.0), (1, item, 0.5)):
        slopes = np.bincount(tokens[:, side], residual, data.vocab)
        own = slice(feature.offset, feature.offset + feature.size)
        np.testing.assert_allclose(slopes[own] + penalty * model.biases[:-1][own], 0, atol=0.05)
    assert abs(residual.sum()) < 0.05


def test_the_baseline_comes_near_the_planted_log_odds():
    data, log_odds = _planted(6_000)
    test = slice(data.train_size, None)
    best = auc(data.labels[test], log_odds[test])
    found = auc(data.labels[test], fit_baseline(data).scores(data.token_ids[test]))
    assert best - 0.02 < found < best + 0.01


def test_an_unseen_user_and_item_score_the_intercept():
    data, _ = _planted(500)
    model = fit_biases(data, 1.0, 1.0)
    assert model.scores(np.array([[-1, -1]])) == model.intercept


def test_validation_folds_lie_in_the_training_part_and_do_not_overlap():
    data, _ = _planted(1_000)
    folds = validation_folds(data)
    assert [(fold.train_size, len(fold.labels)) for fold in folds] == [
        (810, 900),
        (729, 810),
        (656, 729),
    ]


def test_the_baseline_chooses_without_a_look_at_the_test_part():
    data, _ = _planted(500)
    grades = data.grades.copy()
    grades[data.train_size :] = 1 - grades[data.train_size :]
    other = fit_baseline(dataclasses.replace(data, grades=grades))
    assert (other.biases == fit_baseline(data).biases).all()
