"""The AUC against its definition, and the baseline against what it must find and ignore."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.common.command import UserError
from tools.recommender.baseline import MIDDLE_PENALTIES, fit_baseline, fit_biases
from tools.recommender.clicks import Column, make_click_data
from tools.recommender.folds import choose_fold, usable_folds, validation_folds
from tools.recommender.metrics import auc, roc_curve

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
    baseline = fit_baseline(data, usable_folds(data))
    found = auc(data.labels[test], baseline.scores(data.token_ids[test]))
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
    data, other = (
        fit_baseline(part, usable_folds(part))
        for part in (data, dataclasses.replace(data, grades=grades))
    )
    assert (other.biases == data.biases).all()


def _labelled(labels, **changed):
    """Examples with given labels in order of time."""
    users = Column("user", np.arange(len(labels))[:, None] % 3, 3)
    movies = Column("movie", np.arange(len(labels))[:, None] % 5, 5)
    ratings = np.where(labels, 5.0, 1.0)
    return make_click_data("some.csv", [users, movies], ratings, np.arange(len(labels)), **changed)


def test_folds_that_lack_a_class_are_left_out_of_the_choice():
    labels = np.arange(5_000) % 3 == 0
    labels[4_050:4_500] = True
    data = _labelled(labels)
    assert [len(fold.labels) for fold in usable_folds(data)] == [4_050, 3_645]
    assert np.isfinite(fit_baseline(data, usable_folds(data)).biases).all()


def test_without_any_fold_the_baseline_takes_the_penalties_in_the_middle():
    labels = np.arange(1_000) % 3 == 0
    labels[600:900] = True
    data = _labelled(labels)
    assert usable_folds(data) == []
    wanted = fit_biases(data, *MIDDLE_PENALTIES)
    assert (fit_baseline(data, []).biases == wanted.biases).all()


@pytest.mark.parametrize(
    ("same", "fold", "words"),
    [
        (slice(4_500, 5_000), 0, "the test part (examples 4,501 to 5,000 of 5,000, by time)"),
        (slice(0, 4_500), 0, "the training part (examples 1 to 4,500 of 5,000, by time)"),
        (slice(0, 5_000), 0, "the training part (examples 1 to 4,500 of 5,000, by time)"),
        (slice(4_050, 4_500), 1, "the test part (examples 4,051 to 4,500 of 4,500, by time)"),
        (slice(3_645, 4_050), 2, "the test part (examples 3,646 to 4,050 of 4,050, by time)"),
        (slice(0, 4_050), 1, "the training part (examples 1 to 4,050 of 4,500, by time)"),
    ],
)
@pytest.mark.parametrize("clicks", [True, False])
def test_a_part_of_one_class_is_named_with_what_to_do(same, fold, words, clicks):
    labels = np.arange(5_000) % 3 == 0
    labels[same] = clicks
    data = _labelled(labels, click_rating=4.0)
    with pytest.raises(UserError) as error:
        choose_fold(data, fold)
    message = str(error.value)
    assert message.startswith(f"some.csv: {words} has {'clicks' if clicks else 'non-clicks'} only")
    assert "a click is a rating of at least 4: choose another --click_rating" in message
    assert ("--fold" in message) == (fold > 0)
    others = {0, 1, 2, 3} - {fold} if same.stop - same.start < 1_000 else ()
    for other in others:
        assert choose_fold(data, other).train_size


@pytest.mark.parametrize(("examples", "fold"), [(1, 0), (2, 1), (3, 3), (2, 3)])
def test_too_few_examples_for_a_fold_are_said(examples, fold):
    data = _labelled(np.arange(examples) % 2 == 0)
    with pytest.raises(UserError, match=r"some\.csv: the (training|test) part is empty.*give more"):
        choose_fold(data, fold)


def test_the_roc_curve_encloses_the_auc():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(2, size=200), rng.integers(9, size=200).astype(float)
    false_positives, true_positives = roc_curve(labels, scores)
    area = np.trapezoid(true_positives, false_positives)
    np.testing.assert_allclose(area, auc(labels, scores), rtol=1e-12)
