"""Click data: examples of tokens from one shared vocabulary, labelled and in time order."""

import csv
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PADDING = -1
"""The id of an empty slot: outside any table, so it embeds to zeros and gets no gradient."""

TEST_FRACTION = 0.1
LIKED_RATING = 4.0
MAX_LEVELS = 10


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the line and the remedy."""


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
    """

    name: str
    features: tuple[Feature, ...]
    token_ids: np.ndarray
    grades: np.ndarray
    label_level: int
    train_size: int

    @property
    def labels(self) -> np.ndarray:
        """1 for a click (a rating of at least 4), else 0.  # (examples,), dtype=np.float32."""
        return self.grades[:, self.label_level]

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


def column_of(name: str, values: Sequence[str]) -> Column:
    """Numbers distinct strings in sorted order, one slot an example."""
    distinct, inverse = np.unique(np.asarray(values), return_inverse=True)
    return Column(name, inverse.reshape(-1, 1), len(distinct))


def split_at(examples: int) -> int:
    """How many examples are for training: all but the last tenth, rounded up."""
    return examples - math.ceil(examples * TEST_FRACTION)


def make_click_data(
    name: str, columns: Sequence[Column], ratings: np.ndarray, timestamps: np.ndarray
) -> ClickData:
    """Sorts examples by time, splits them, and gives every value seen in training a token.

    A value that the training part lacks, such as a user who first comes in the test part, becomes
    PADDING: no row was trained for it, and zeros say so.

    Args:
      name: of the data.
      columns: the features; user and item first.
      ratings: (examples,) numbers; from 4 on, they count as a click.
      timestamps: (examples,) numbers; equal ones keep their order.

    Raises:
      DataError: too few examples, or all labels of one part are the same.
    """
    if len(ratings) < 2:
        raise DataError(f"{name}: {len(ratings)} examples; at least 2 are needed to train and test")
    order = np.argsort(timestamps, kind="stable")
    train_size = split_at(len(ratings))
    ratings = ratings[order]
    levels = _levels(ratings[:train_size])
    features, token_ids, offset = [], [], 0
    for column in columns:
        tokens, size = _tokens_of_training(column.values[order], column.size, train_size)
        features.append(Feature(column.name, offset, size, tokens.shape[1]))
        token_ids.append(np.where(tokens == PADDING, PADDING, tokens + offset))
        offset += size
    data = ClickData(
        name=name,
        features=tuple(features),
        token_ids=np.concatenate(token_ids, axis=1, dtype=np.int32),
        grades=(ratings[:, None] >= levels).astype(np.float32),
        label_level=int(np.searchsorted(levels, LIKED_RATING)),
        train_size=train_size,
    )
    check_labels(data)
    return data


def check_labels(data: ClickData) -> None:
    """Raises DataError unless both parts have clicks and non-clicks, which an AUC needs."""
    for part, labels in (
        ("training", data.labels[: data.train_size]),
        ("test", data.labels[data.train_size :]),
    ):
        if np.all(labels == labels[0]):
            raise DataError(
                f"{data.name}: all {len(labels)} labels of the {part} part are {labels[0]:.0f} "
                f"(1 is a rating of at least {LIKED_RATING:g}); give more, or more varied, examples"
            )


def _levels(ratings: np.ndarray) -> np.ndarray:
    """What ratings are compared with: every distinct one but the least, where they are few."""
    levels = np.union1d(np.unique(ratings)[1:], [LIKED_RATING])
    return levels if len(levels) <= MAX_LEVELS else np.asarray([LIKED_RATING])


def _tokens_of_training(values: np.ndarray, size: int, train_size: int) -> tuple[np.ndarray, int]:
    """Renumbers values without gaps, keeping only those of the training part."""
    # The last entry stands for PADDING, which is -1.
    seen = np.zeros(size + 1, bool)
    seen[values[:train_size]] = True
    seen[PADDING] = False
    token = np.where(seen, np.cumsum(seen) - 1, PADDING)
    return token[values], int(seen.sum())


def read_table(
    path: Path, columns: Sequence[str], *, delimiter: str, quoted: bool, remedy: str
) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, the named columns' fields) of each row behind the header.

    Args:
      path: a UTF-8 text file whose first line names its columns.
      columns: the names that must be there, in the order wanted; others are passed over.
      delimiter: between fields.
      quoted: whether fields may be quoted, as in CSV.
      remedy: what to do about a bad file; ends every message.

    Raises:
      DataError: no file to read, not UTF-8, a column missing, or a row of another length.
    """
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(
                file,
                delimiter=delimiter,
                quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
                strict=True,
            )
            header = next(reader, [])
            missing = [name for name in columns if name not in header]
            if missing:
                raise DataError(
                    f"{path}:1: no column {', '.join(missing)} in the header {header}; {remedy}"
                )
            wanted = [header.index(name) for name in columns]
            line = reader.line_num
            for fields in reader:
                line = reader.line_num
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}:{line}: {len(fields)} fields where the header has "
                        f"{len(header)}; {remedy}"
                    )
                yield line, [fields[i] for i in wanted]
    except csv.Error as error:
        raise DataError(f"{path}:{line + 1}: {error}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 after line {line}: {error}; {remedy}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check the path") from error


def parse_number(text: str, path: Path, line: int, name: str, remedy: str) -> float:
    """A finite number, or a DataError that says where there is none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{path}:{line}: {name} {text!r} is not a finite number; {remedy}")
    return number


def read_ratings_csv(path: Path) -> ClickData:
    """Reads a file with columns userId, movieId, rating and timestamp, as MovieLens has.

    Raises:
      DataError: a file that cannot be read, a malformed row, or too few of them.
    """
    remedy = "mend or delete the row (wanted: a CSV file with userId,movieId,rating,timestamp)"
    names = ("userId", "movieId", "rating", "timestamp")
    users, movies, ratings, timestamps = [], [], [], []
    for line, (user, movie, rating, timestamp) in read_table(
        path, names, delimiter=",", quoted=True, remedy=remedy
    ):
        if not user or not movie:
            raise DataError(f"{path}:{line}: an empty userId or movieId; {remedy}")
        users.append(user)
        movies.append(movie)
        ratings.append(parse_number(rating, path, line, "rating", remedy))
        timestamps.append(parse_number(timestamp, path, line, "timestamp", remedy))
    columns = [column_of("user", users), column_of("movie", movies)]
    return make_click_data(str(path), columns, np.asarray(ratings), np.asarray(timestamps))
