"""Click data: examples of tokens from one shared vocabulary, labelled and in time order."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.recommender.click_rating import default_click_rating, levels_of
from tools.recommender.text_table import Texts

PADDING = -1
"""The id of an empty slot: outside any table, so it embeds to zeros and gets no gradient."""

TEST_FRACTION = 0.1


@dataclass(frozen=True)
class Feature:
    """One feature's place in the shared vocabulary.

    Attributes:
      name: such as "user".
      offset: its first token id.
      size: how many distinct token ids it has: offset to offset + size - 1.
      slots: how many tokens an example holds of it, padding included.
    """

    name: str
    offset: int
    size: int
    slots: int


@dataclass(frozen=True, eq=False)
class ClickData:
    """Examples in time order; the last ones are the test part.

    Attributes:
      name: of the data, for reports.
      features: in the order of their slots; the first is the user, the second the item.
      token_ids: each feature's slots side by side; PADDING where a slot is empty.
        # shape=(examples, slots), dtype=np.int32
      grades: 1 where the rating reaches a level, else 0; clicks have one level.
        # shape=(examples, levels), dtype=np.float32
      label_level: which column of `grades` is the label, the one to predict.
      train_size: examples before this one are for training, the rest for the test.
      click_rating: the least rating that is a click; None where there are no ratings.
    """

    name: str
    features: tuple[Feature, ...]
    token_ids: np.ndarray
    grades: np.ndarray
    label_level: int
    train_size: int
    click_rating: float | None = None

    @property
    def labels(self) -> np.ndarray:
        """1 for a click, else 0.  # shape=(examples,), dtype=np.float32."""
        return self.grades[:, self.label_level]

    @property
    def click_share(self) -> float:
        """The share of clicks among all examples."""
        return float(np.mean(self.labels, dtype=np.float64))

    @property
    def vocab(self) -> int:
        """Token ids in all, which is how many rows the table needs."""
        return sum(feature.size for feature in self.features)

    @property
    def slots(self) -> int:
        """Tokens an example holds, padding included."""
        return sum(feature.slots for feature in self.features)

    def before(self, end: int) -> "ClickData":
        """The first `end` examples as data of their own, whose last tenth is the test part.

        With end=train_size this is what choices are made on, without a look at the real test part.
        The vocabulary stays; tokens that the new training part lacks become PADDING.
        """
        train_size, token_ids = split_at(end), self.token_ids[:end]
        seen = np.zeros(self.vocab + 1, bool)
        seen[token_ids[:train_size]] = True
        return dataclasses.replace(
            self,
            token_ids=np.where(seen[token_ids], token_ids, np.int32(PADDING)),
            grades=self.grades[:end],
            train_size=train_size,
        )


@dataclass(frozen=True, eq=False)
class Column:
    """One feature's values before they are given tokens.

    Attributes:
      name: of the feature.
      values: numbers from 0, or PADDING.  # shape=(examples, slots), an integer dtype
      size: the values are below this.
    """

    name: str
    values: np.ndarray
    size: int


def column_of(name: str, texts: Texts) -> Column:
    """The column of one text per example, numbered in sorted order."""
    return Column(name, texts.codes.reshape(-1, 1), len(texts.values))


def split_at(examples: int) -> int:
    """How many examples are for training: all but the last tenth, rounded up."""
    return examples - math.ceil(examples * TEST_FRACTION)


def make_click_data(
    name: str,
    columns: Sequence[Column],
    ratings: np.ndarray,
    timestamps: np.ndarray,
    click_rating: float | None = None,
) -> ClickData:
    """Sorts examples by time, splits them, and gives every value seen in training a token.

    A value that the training part lacks, such as a user who first comes in the test part, becomes
    PADDING: no row was trained for it, and zeros say so.

    Args:
      name: of the data.
      columns: the features; user and item first.
      ratings: (examples,) numbers.
      timestamps: (examples,) numbers; equal ones keep their order.
      click_rating: the least rating that is a click; None for `default_click_rating`.
    """
    if click_rating is None:
        click_rating = default_click_rating(ratings)
    order = np.argsort(timestamps, kind="stable")
    train_size = split_at(len(ratings))
    ratings = ratings[order]
    levels = levels_of(ratings[:train_size], click_rating)
    features, token_ids, offset = [], [], 0
    for column in columns:
        tokens, size = _tokens_of_training(column.values[order], column.size, train_size)
        features.append(Feature(column.name, offset, size, tokens.shape[1]))
        token_ids.append(np.where(tokens == PADDING, PADDING, tokens + offset))
        offset += size
    return ClickData(
        name=name,
        features=tuple(features),
        token_ids=np.concatenate(token_ids, axis=1, dtype=np.int32),
        grades=(ratings[:, None] >= levels).astype(np.float32),
        label_level=int(np.searchsorted(levels, click_rating)),
        train_size=train_size,
        click_rating=click_rating,
    )


def _tokens_of_training(values: np.ndarray, size: int, train_size: int) -> tuple[np.ndarray, int]:
    """Renumbers values without gaps, keeping only those of the training part."""
    # The last entry stands for PADDING, which is -1.
    seen = np.zeros(size + 1, bool)
    seen[values[:train_size]] = True
    seen[PADDING] = False
    token = np.where(seen, np.cumsum(seen) - 1, PADDING)
    return token[values], int(seen.sum())
