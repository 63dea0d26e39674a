"""The click data: tokens of one vocabulary, split by time; clicks; the synthetic stream."""

import dataclasses

import numpy as np
import pytest

from tools.recommender.click_rating import default_click_rating
from tools.recommender.clicks import PADDING, Column, make_click_data
from tools.recommender.config import SyntheticConfig
from tools.recommender.synthetic import synthetic_clicks


def test_features_share_one_vocabulary_and_keep_their_slots():
    rng = np.random.default_rng(0)
    columns = [
        Column("user", rng.integers(5, size=(40, 1)), 5),
        Column("movie", rng.integers(7, size=(40, 1)), 7),
        Column("genre", rng.integers(-1, 3, size=(40, 2)), 3),
    ]
    data = make_click_data("x", columns, rng.integers(1, 6, size=40), np.arange(40))

    assert data.slots == 4
    assert data.token_ids.shape == (40, 4)
    assert data.token_ids.dtype == np.int32
    start = 0
    for feature in data.features:
        tokens = data.token_ids[:, start : start + feature.slots]
        real = tokens[tokens != PADDING]
        assert feature.offset <= real.min()
        assert real.max() < feature.offset + feature.size
        start += feature.slots
    assert [f.offset for f in data.features] == list(
        np.cumsum([0] + [f.size for f in data.features[:-1]])
    )
    assert data.vocab == data.features[-1].offset + data.features[-1].size


def test_tokens_stand_for_the_values_one_to_one():
    values = np.array([[4], [2], [4], [9], [2], [9], [4], [2], [9], [4]] * 2)
    column = Column("user", values, 10)
    data = make_click_data("x", [column], np.array([5, 1] * 10), np.arange(20))
    pairs = set(zip(values.ravel().tolist(), data.token_ids.ravel().tolist(), strict=True))
    assert pairs == {(2, 0), (4, 1), (9, 2)}


def test_the_latest_tenth_is_the_test_part_and_equal_times_keep_their_order():
    times = np.array([5, 1, 5, 0, 9, 2, 8, 8, 3, 7, 6])
    users = Column("user", np.arange(11)[:, None] % 2, 2)
    ratings = np.array([4, 1, 5, 1, 3, 2, 5, 4, 2, 1, 1])
    data = make_click_data("x", [users], ratings, times)
    assert data.train_size == 9  # ceil(1.1) = 2 for the test
    assert data.labels.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0]


def test_values_that_training_lacks_become_padding():
    users = np.array([[0]] * 9 + [[1]] * 2)
    movies = np.array([[i % 3] for i in range(11)])
    columns = [Column("user", users, 2), Column("movie", movies, 3)]
    ratings = np.array([1, 5] * 5 + [1])
    data = make_click_data("x", columns, ratings, np.arange(11))
    assert data.features[0].size == 1
    assert data.token_ids[:9, 0].tolist() == [0] * 9
    assert data.token_ids[9:, 0].tolist() == [PADDING] * 2
    assert (data.token_ids[:, 1] == 1 + np.arange(11) % 3).all()


def test_grades_compare_ratings_with_every_level():
    users = Column("user", np.zeros((20, 1), int), 1)
    ratings = np.tile([1, 2, 3, 4, 5, 4, 3, 2, 5, 1], 2)
    data = make_click_data("x", [users], ratings, np.arange(20))
    assert data.grades.shape == (20, 4)
    assert data.grades[2].tolist() == [1, 1, 0, 0]  # 3 reaches 2 and 3, not 4 or 5
    assert data.labels[:5].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("ratings", "least"),
    [
        ([1, 2, 3, 4, 5], 4),
        ([0.5, 4.5, 2], 4),
        ([1, 4, 2], 4),
        ([4, 5], 4),
        ([0, 1, 1], 1),
        ([1, 1], 1),
        ([1, 10, 5], 8),
        ([1, 7], 5.6),
        ([0, 100, 37], 80),
        ([1, 2, 3], 2.4),
        ([0, 0.5, 1], 0.8),
        ([-1, 1], 0.8),
        ([0, 0], 0),
    ],
)
def test_what_a_click_is_fits_the_ratings(ratings, least):
    assert default_click_rating(np.asarray(ratings, float)) == least


@pytest.mark.parametrize(("least", "level"), [(None, 2), (2, 0), (3.5, 2), (5, 3), (0, 0), (9, 4)])
def test_the_rating_of_a_click_can_be_chosen(least, level):
    users = Column("user", np.zeros((20, 1), int), 1)
    ratings = np.tile([1, 2, 3, 4, 5, 4, 3, 2, 5, 1], 2)
    data = make_click_data("x", [users], ratings, np.arange(20), least)
    assert data.click_rating == (4 if least is None else least)
    assert data.label_level == level
    np.testing.assert_array_equal(data.labels, ratings >= data.click_rating)
    assert data.click_share == np.mean(ratings >= data.click_rating)


def test_many_distinct_ratings_leave_only_the_label():
    users = Column("user", np.zeros((100, 1), int), 1)
    ratings = np.random.default_rng(0).uniform(0, 8, size=100)
    data = make_click_data("x", [users], ratings, np.arange(100))
    assert data.grades.shape == (100, 1)
    assert (data.labels == (ratings >= data.click_rating)).all()
    assert data.click_rating == ratings.max() * 4 / 5


def test_before_forgets_all_behind_its_end():
    """User 3 comes in examples 160 to 169 only."""
    time = np.arange(200)
    users = np.where((time >= 160) & (time < 170), 3, time % 3)
    columns = [Column("user", users[:, None], 4), Column("movie", time[:, None] % 4, 4)]
    data = make_click_data("x", columns, 1 + time % 5, time)
    earlier = data.before(data.train_size)
    assert data.train_size == 180
    assert len(earlier.labels) == 180
    assert earlier.train_size == 162
    newcomer = data.token_ids[160, 0]
    assert (data.token_ids[160:170, 0] == newcomer).all()
    assert (earlier.token_ids[160:170, 0] == newcomer).all()  # two of them are in training
    earliest = earlier.before(160 * 10 // 9)
    assert earliest.train_size < 160
    assert (earliest.token_ids[160:170, 0] == PADDING).all()
    assert (earliest.token_ids[:160] == data.token_ids[:160]).all()


def test_the_synthetic_stream_depends_on_its_config_alone():
    config = SyntheticConfig(examples=500, users=50, items=60)
    first, again = synthetic_clicks(config), synthetic_clicks(config)
    other = synthetic_clicks(dataclasses.replace(config, seed=1))
    assert (first.token_ids == again.token_ids).all()
    assert (first.grades == again.grades).all()
    assert (first.token_ids != other.token_ids).any()


def test_synthetic_popularity_follows_zipf():
    config = SyntheticConfig(examples=200_000, users=100, items=1_000, zipf=1.2)
    items = synthetic_clicks(config).token_ids[:, 1]
    counts = np.sort(np.bincount(items - config.users, minlength=1_000))[::-1]
    expected = np.arange(1, 1_001) ** -1.2
    expected *= config.examples / expected.sum()
    # Five standard deviations of a Poisson count, for the twenty most frequent.
    assert (np.abs(counts - expected)[:20] < 5 * np.sqrt(expected[:20])).all()


def test_synthetic_tastes_are_planted():
    """A user's clicks on a category in one half of the stream tell those in the other."""
    config = SyntheticConfig(examples=100_000, users=4, items=40, categories=4, zipf=0)
    data = synthetic_clicks(config)
    cell = data.token_ids[:, 0] * 40 + data.token_ids[:, 1] - 4

    def rates(part):
        clicks = np.bincount(cell[part], data.labels[part], minlength=160)
        return (clicks / np.bincount(cell[part], minlength=160)).reshape(4, 40)

    halves = rates(slice(0, 50_000)), rates(slice(50_000, None))
    # What is left when the biases are taken out is the taste.
    tastes = [r - r.mean(0) - r.mean(1, keepdims=True) + r.mean() for r in halves]
    assert np.corrcoef(tastes[0].ravel(), tastes[1].ravel())[0, 1] > 0.8
