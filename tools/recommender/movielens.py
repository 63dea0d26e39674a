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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.common.command import UserError, wrong_value
from tools.recommender.clicks import PADDING, ClickData, Column, column_of, make_click_data
from tools.recommender.text_table import TAB_SEPARATED, TextTable, read_text_table, shown

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
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "xrex" / "ml-100k"


def load_movielens(cache: Path | None, click_rating: float | None = None) -> ClickData:
    """Fetches the data set unless the cache has it, and reads it.

    Args:
      cache: folder for downloads; None for `default_cache`.
      click_rating: the least rating that is a click; None for `default_click_rating`.

    Raises:
      UserError: it could not be downloaded, or is not what it should be.
    """
    try:
        folder = default_cache() if cache is None else cache
        fetch(folder)
    except OSError as error:
        raise wrong_value("cache", folder, f"cannot be used: {error.strerror}") from error
    return read_movielens(folder, click_rating)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Downloads one wheel with pip, and nothing that it depends on.

    Raises:
      UserError: pip failed; its own words are in the message.
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
        raise UserError(f"pip could not download {requirement}: {problem or 'no wheel came'}")
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
      UserError: the download failed, or brought something else; the cache is as it was.
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
        except UserError as error:
            names = ", ".join(source.sums)
            raise UserError(
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
        raise UserError(
            f"{wheel.name} is damaged or not the wheel it should be: {error}"
        ) from error
    for name, expected in source.sums.items():
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != expected:
            raise UserError(
                f"{wheel.name}: {source.folder}/{name} has SHA-256 {actual}, and not {expected}"
            )
        (folder / name).write_bytes(contents[name])


def read_movielens(folder: Path, click_rating: float | None = None) -> ClickData:
    """Reads the three files of ML-100K, tab-separated with a header each.

    Features: user, movie, genre (several per movie), age (in steps of five years), gender and
    occupation.

    Args:
      folder: of the files.
      click_rating: the least rating that is a click; None for `default_click_rating`.

    Raises:
      UserError: a malformed row, or a rating of a user or movie that is in no list.
    """
    remedy = f"delete {folder} and run this again: it will be downloaded anew"
    movies, genres = _read_movies(folder / "ml-100k.item", remedy)
    users, traits = _read_users(folder / "ml-100k.user", remedy)
    names = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
    ratings = read_text_table(folder / "ml-100k.inter", names, TAB_SEPARATED, remedy)
    user_of = _numbers_of(ratings, "user_id:token", users)
    movie_of = _numbers_of(ratings, "item_id:token", movies)
    columns = [
        Column("user", user_of[:, None], len(users)),
        Column("movie", movie_of[:, None], len(movies)),
        Column("genre", genres.values[movie_of], genres.size),
        *(Column(trait.name, trait.values[user_of], trait.size) for trait in traits),
    ]
    return make_click_data(
        "ml-100k",
        columns,
        ratings.numbers("rating:float"),
        ratings.numbers("timestamp:float"),
        click_rating,
    )


def _numbers_of(table: TextTable, name: str, number_of: Mapping[str, int]) -> np.ndarray:
    """The numbers of a column's ids, (rows,)."""
    texts = table.texts(name)
    numbers = np.asarray([number_of.get(text, -1) for text in texts.values])[texts.codes]
    if np.any(numbers < 0):
        row = int(np.argmax(numbers < 0))
        raise table.error(row, f"unknown {name} {shown(texts.values[texts.codes[row]])}")
    return numbers


def _number_rows(table: TextTable, name: str) -> dict[str, int]:
    """Each id's row."""
    number_of: dict[str, int] = {}
    texts = table.texts(name)
    for row, code in enumerate(texts.codes):
        if number_of.setdefault(texts.values[code], row) != row:
            raise table.error(row, f"{name} {shown(texts.values[code])} for the second time")
    return number_of


def _read_movies(path: Path, remedy: str) -> tuple[dict[str, int], Column]:
    """Each movie's number, and the genres of each number."""
    table = read_text_table(path, ("item_id:token", "class:token_seq"), TAB_SEPARATED, remedy)
    classes = table.texts("class:token_seq")
    genres_of = [text.split() for text in classes.values]
    genre_of = {genre: i for i, genre in enumerate(sorted({g for row in genres_of for g in row}))}
    slots = max(len(row) for row in genres_of)
    values = np.full((len(genres_of), slots), PADDING)
    for row, names in zip(values, genres_of, strict=True):
        row[: len(names)] = [genre_of[name] for name in names]
    return _number_rows(table, "item_id:token"), Column(
        "genre", values[classes.codes], len(genre_of)
    )


def _read_users(path: Path, remedy: str) -> tuple[dict[str, int], list[Column]]:
    """Each user's number, and the age, gender and occupation of each number."""
    names = ("user_id:token", "age:token", "gender:token", "occupation:token")
    table = read_text_table(path, names, TAB_SEPARATED, remedy)
    lustrums, ages = np.unique(table.numbers("age:token") // 5, return_inverse=True)
    return _number_rows(table, "user_id:token"), [
        Column("age", ages.reshape(-1, 1), len(lustrums)),
        column_of("gender", table.texts("gender:token")),
        column_of("occupation", table.texts("occupation:token")),
    ]
