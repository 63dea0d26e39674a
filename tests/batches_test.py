"""The order of training batches, and what is hidden in them."""

import numpy as np
import pytest

from tools.recommender.batches import padded_parts, row_penalties, training_batches
from tools.recommender.clicks import PADDING
from tools.recommender.config import SyntheticConfig
from tools.recommender.synthetic import synthetic_clicks

DATA = synthetic_clicks(SyntheticConfig(examples=100, users=7, items=50))


def _batches(**changed):
    arguments = {
        "batch_size": 20,
        "steps": 9,
        "seed": 0,
        "hide_users": 0.0,
        "penalties": (0.0,) * len(DATA.features),
    }
    return list(training_batches(DATA, **(arguments | changed)))


def test_each_pass_takes_training_examples_at_most_once():
    known = {
        (*row, grade)
        for row, grade in zip(
            DATA.token_ids[:90].tolist(), DATA.grades[:90, 0].tolist(), strict=True
        )
    }
    batches = _batches()
    assert [int(batch.step) for batch in batches] == list(range(9))
    for start in (0, 4, 8):  # 90 examples fill four batches of 20
        rows = np.concatenate(
            [np.column_stack([b.token_ids, b.grades]) for b in batches[start : start + 4]]
        ).tolist()
        assert {tuple(row) for row in rows} <= known
    seen = np.concatenate([b.token_ids for b in batches[:4]])
    counts = np.bincount(seen[:, 1], minlength=DATA.vocab)
    assert (counts <= np.bincount(DATA.token_ids[:90, 1], minlength=DATA.vocab)).all()


def test_the_order_depends_on_the_seed_alone():
    first, again, other = _batches(), _batches(), _batches(seed=1)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(first, again, strict=True))
    assert any((a.token_ids != b.token_ids).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_hides_a_share_of_users_and_nothing_else(share):
    batches = _batches(steps=200, hide_users=share)
    token_ids = np.concatenate([batch.token_ids for batch in batches])
    assert abs((token_ids[:, 0] == PADDING).mean() - share) < 0.05
    assert (token_ids[:, 1:] != PADDING).all()
    assert (DATA.token_ids != PADDING).all()  # the data itself stays whole


def test_penalties_add_up_to_the_features_over_one_pass():
    penalties = [3.0, 0.5, *[2.0] * (len(DATA.features) - 2)]
    (batch,) = _batches(batch_size=90, steps=1, penalties=penalties)
    total = np.zeros(DATA.vocab)
    np.add.at(total, batch.token_ids, batch.penalties)
    seen = np.bincount(DATA.token_ids[:90].ravel(), minlength=DATA.vocab) > 0
    wanted = np.repeat(penalties, [feature.size for feature in DATA.features])
    np.testing.assert_allclose(total, np.where(seen, wanted, 0), rtol=1e-5)


def test_padding_has_no_penalty():
    penalties = (3.0,) * len(DATA.features)
    assert row_penalties(DATA, penalties)[PADDING] == 0
    (batch,) = _batches(steps=1, hide_users=0.5, penalties=penalties)
    assert ((batch.penalties == 0) == (batch.token_ids == PADDING)).all()


def test_parts_are_padded_to_one_size():
    token_ids = np.arange(14, dtype=np.int32).reshape(7, 2)
    parts = list(padded_parts(token_ids, 3))
    assert [part.shape for part in parts] == [(3, 2)] * 3
    assert (np.concatenate(parts)[:7] == token_ids).all()
    assert (parts[2][1:] == PADDING).all()
