"""MovieLens-100K: fetched with pip, verified, cached and read.

The data set's licence forbids redistribution, so it is taken at run time from the wheel of RecBole,
which carries it as an example.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.recommender.clicks import (
    PADDING,
    ClickData,
    Column,
    DataError,
    column_of,
    make_click_data,
    parse_number,
    read_table,
)

_STAGING = ".partial-"
_STALE_SECONDS = 3600
_PIP_SECONDS = 300


@dataclass(frozen=True)
class Source:
    """Where the files come from.

    Attributes:
      requirement: what pip downloads.
      folder: of the files in the wheel.
      sums: each file's name and SHA-256.
    """

    requirement: str
    folder: str
    sums: Mapping[str, str]


ML_100K = Source(
    requirement="recbole==1.2.1",
    folder="recbole/dataset_example/ml-100k",
    sums={
        "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
        "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    },
)


def default_cache() -> Path:
    """The folder for downloads: below XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "xrex" / "ml-100k"


def load_movielens(cache: Path) -> ClickData:
    """Fetches the data set unless the cache has it, and reads it.

    Raises:
      DataError: it could not be downloaded, or is not what it should be.
    """
    fetch(cache)
    return read_movielens(cache)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Downloads one wheel with pip, and nothing that it depends on.

    Raises:
      DataError: pip failed; its own words are in the message.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS)
        problem = result.stderr.strip() if result.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_PIP_SECONDS} seconds"
    wheels = list(folder.glob("*.whl"))
    if problem or len(wheels) != 1:
        raise DataError(f"pip could not download {requirement}: {problem or 'no wheel came'}")
    return wheels[0]


def fetch(
    cache: Path,
    source: Source = ML_100K,
    download: Callable[[str, Path], Path] = download_wheel,
) -> None:
    """Sees to it that the cache holds the source's files, whole and verified.

    A file that is there with the right sum is kept; otherwise all are fetched anew. A file comes
    under its name only when it is complete, so that an interrupted run leaves nothing half-written.

    Raises:
      DataError: the download failed, or brought something else; the cache is as it was.
    """
    if all(_sum_of(cache / name) == expected for name, expected in source.sums.items()):
        return
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache)
    # Beside the final names: a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=cache) as staging:
        try:
            wheel = download(source.requirement, Path(staging))
            _extract(wheel, source, Path(staging))
        except DataError as error:
            names = ", ".join(source.sums)
            raise DataError(
                f"{error}\nNothing of it was kept. Check the network (pip's settings for a proxy "
                f"or an index apply) and run this again; or put {names} of {source.requirement} "
                f"into {cache} by hand; or use --data synthetic, which needs no network."
            ) from error
        for name in source.sums:
            os.replace(Path(staging) / name, cache / name)


def _sum_of(path: Path) -> str | None:
    """A file's SHA-256; None where there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _remove_stale(cache: Path) -> None:
    """Removes what a killed run left; a folder of the last hour may be another run's."""
    for folder in cache.glob(f"{_STAGING}*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _extract(wheel: Path, source: Source, folder: Path) -> None:
    """Takes the source's files out of the wheel, and verifies them."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            contents = {name: archive.read(f"{source.folder}/{name}") for name in source.sums}
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DataError(
            f"{wheel.name} is damaged or not the wheel it should be: {error}"
        ) from error
    for name, expected in source.sums.items():
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != expected:
            raise DataError(
                f"{wheel.name}: {source.folder}/{name} has SHA-256 {actual}, and not {expected}"
            )
        (folder / name).write_bytes(contents[name])


def read_movielens(folder: Path) -> ClickData:
    """Reads the three files of ML-100K, tab-separated with a header each.

    Features: user, movie, genre (several a movie), age (in steps of five years), gender and
    occupation.

    Raises:
      DataError: a malformed row, or a rating of a user or movie that is in no list.
    """
    remedy = f"delete {folder} and run this again: it will be downloaded anew"
    movies, genres = _read_movies(folder / "ml-100k.item", remedy)
    users, traits = _read_users(folder / "ml-100k.user", remedy)
    path = folder / "ml-100k.inter"
    names = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
    rows, ratings, timestamps = [], [], []
    for line, (user, movie, rating, timestamp) in _read(path, names, remedy):
        if user not in users or movie not in movies:
            raise DataError(f"{path}:{line}: unknown user {user!r} or movie {movie!r}; {remedy}")
        rows.append((users[user], movies[movie]))
        ratings.append(parse_number(rating, path, line, "rating", remedy))
        timestamps.append(parse_number(timestamp, path, line, "timestamp", remedy))
    user_of, movie_of = np.asarray(rows, np.int64).reshape(-1, 2).T
    columns = [
        Column("user", user_of[:, None], len(users)),
        Column("movie", movie_of[:, None], len(movies)),
        Column("genre", genres.values[movie_of], genres.size),
        *(Column(trait.name, trait.values[user_of], trait.size) for trait in traits),
    ]
    return make_click_data("ml-100k", columns, np.asarray(ratings), np.asarray(timestamps))


def _read(path: Path, names: tuple[str, ...], remedy: str) -> Iterator[tuple[int, list[str]]]:
    return read_table(path, names, delimiter="\t", quoted=False, remedy=remedy)


def _read_movies(path: Path, remedy: str) -> tuple[dict[str, int], Column]:
    """Each movie's number, and the genres of each number."""
    number_of: dict[str, int] = {}
    genres: list[list[str]] = []
    for _, (movie, classes) in _read(path, ("item_id:token", "class:token_seq"), remedy):
        number_of[movie] = len(genres)
        genres.append(classes.split())
    genre_of = {genre: i for i, genre in enumerate(sorted({g for row in genres for g in row}))}
    slots = max((len(row) for row in genres), default=0)
    values = np.full((len(genres), slots), PADDING)
    for row, names in zip(values, genres, strict=True):
        row[: len(names)] = [genre_of[name] for name in names]
    return number_of, Column("genre", values, len(genre_of))


def _read_users(path: Path, remedy: str) -> tuple[dict[str, int], list[Column]]:
    """Each user's number, and the age, gender and occupation of each number."""
    names = ("user_id:token", "age:token", "gender:token", "occupation:token")
    number_of: dict[str, int] = {}
    ages: list[str] = []
    genders: list[str] = []
    occupations: list[str] = []
    for line, (user, age, gender, occupation) in _read(path, names, remedy):
        number_of[user] = len(ages)
        ages.append(f"{parse_number(age, path, line, 'age', remedy) // 5:03.0f}")
        genders.append(gender)
        occupations.append(occupation)
    return number_of, [
        column_of("age", ages),
        column_of("gender", genders),
        column_of("occupation", occupations),
    ]
