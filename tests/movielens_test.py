"""The download, its sums and its cache, and the reading; all without a network."""

import hashlib
import os
import time
import zipfile

import pytest

from tools.common.command import UserError
from tools.recommender import movielens
from tools.recommender.clicks import PADDING
from tools.recommender.movielens import ML_100K, Source, download_wheel, fetch, read_movielens

FOLDER = "recbole/dataset_example/ml-100k"
WHEEL = "recbole-1.2.1-py3-none-any.whl"
FILES = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    + "".join(f"{1 + i % 3}\t{1 + i % 2}\t{1 + i % 5}\t{900 - i}\n" for i in range(40)),
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "1\t\"Quoted\t1995\tAnimation Children's Comedy\n"
    "2\tOther\t1996\tComedy\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "1\t24\tM\twriter\t1\n2\t7\tF\twriter\t2\n3\t23\tF\tnone\t3\n",
}


def _source(files=FILES):
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    return Source("recbole==1.2.1", FOLDER, sums)


def _make_wheel(path, files=FILES):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            wheel.writestr(f"{FOLDER}/{name}", text)
        wheel.writestr("recbole-1.2.1.dist-info/METADATA", "Name: recbole\nVersion: 1.2.1\n")
        wheel.writestr("recbole-1.2.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return path


def _serves(files=FILES, edit=lambda data: data):
    """A download that makes the wheel where pip would have put it."""

    def download(_requirement, folder):
        wheel = _make_wheel(folder / WHEEL, files)
        wheel.write_bytes(edit(wheel.read_bytes()))
        return wheel

    return download


def _no_download(_requirement, _folder):
    raise UserError("the network was asked")


def _write(folder, **changed):
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        text = changed.get(name.removeprefix("ml-100k."), text)
        (folder / name).write_text(text)
    return folder


def test_fetches_three_files_once(tmp_path):
    cache = tmp_path / "deep" / "cache"
    fetch(cache, _source(), _serves())
    assert {path.name: path.read_text() for path in cache.iterdir()} == FILES
    fetch(cache, _source(), _no_download)


def test_a_damaged_or_missing_file_of_the_cache_is_fetched_anew(tmp_path):
    fetch(tmp_path, _source(), _serves())
    (tmp_path / "ml-100k.user").write_text("1\t24")
    (tmp_path / "ml-100k.item").unlink()
    fetch(tmp_path, _source(), _serves())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize(
    ("download", "message"),
    [
        (
            _serves({**FILES, "ml-100k.item": "other"}),
            f"{WHEEL}: {FOLDER}/ml-100k.item has SHA-256 d9298a10d1b0735837dc4bd85dac641b",
        ),
        (_serves(edit=lambda data: data[: len(data) // 2]), f"{WHEEL} is damaged"),
        (_serves(edit=lambda data: data[:90] + b"\0\0\0" + data[93:]), f"{WHEEL} is damaged"),
        (_serves(edit=lambda _: b""), f"{WHEEL} is damaged"),
        (_serves({"ml-100k.item": "x"}), f"no item named '{FOLDER}/ml-100k.inter'"),
        (_no_download, "the network was asked"),
    ],
    ids=["wrong sum", "truncated", "corrupt", "empty", "file missing", "failed"],
)
def test_a_bad_download_says_what_to_do_and_leaves_the_cache_as_it_was(tmp_path, download, message):
    (tmp_path / "ml-100k.user").write_text("mine")
    with pytest.raises(UserError) as error:
        fetch(tmp_path, _source(), download)
    assert message in str(error.value)
    for remedy in ("Nothing of it was kept", str(tmp_path), "--data synthetic"):
        assert remedy in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ml-100k.user"]
    assert (tmp_path / "ml-100k.user").read_text() == "mine"


def test_an_interrupted_download_leaves_nothing(tmp_path):
    def interrupted(_requirement, folder):
        (folder / WHEEL).write_bytes(b"PK half a wheel")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, _source(), interrupted)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_only_whole_files(tmp_path, monkeypatch):
    replace, done = os.replace, []

    def full_disk(source, target):
        if done:
            raise OSError(28, "No space left on device", str(target))
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(movielens.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fetch(tmp_path, _source(), _serves())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        done[0].name: FILES[done[0].name]
    }


def test_what_a_killed_run_left_goes_after_an_hour(tmp_path):
    old, young = tmp_path / ".partial-old", tmp_path / ".partial-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "ml-100k.item").write_text("ha")
    os.utime(old, (time.time() - 4000,) * 2)
    fetch(tmp_path, _source(), _serves())
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, *sorted(FILES)]


def test_pip_serves_a_wheel(tmp_path, monkeypatch):
    shelf, target = tmp_path / "shelf", tmp_path / "target"
    shelf.mkdir()
    target.mkdir()
    made = _make_wheel(shelf / WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    wheel = download_wheel(ML_100K.requirement, target)
    assert wheel == target / WHEEL
    assert wheel.read_bytes() == made.read_bytes()


def test_pips_own_words_are_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"could not download recbole==1\.2\.1: (?s:.)*No matching"):
        download_wheel(ML_100K.requirement, tmp_path)


def test_reads_users_movies_and_their_traits(tmp_path):
    data = read_movielens(_write(tmp_path))
    names = ["user", "movie", "genre", "age", "gender", "occupation"]
    assert [feature.name for feature in data.features] == names
    assert [feature.slots for feature in data.features] == [1, 1, 3, 1, 1, 1]
    assert [feature.size for feature in data.features] == [3, 2, 3, 2, 2, 2]
    # Times fall, so the file's last row comes first: user 1, movie 2, rating 5. Genres and traits
    # are numbered in sorted order: Animation, Children's, Comedy; 5-9, 20-24; F, M; none, writer.
    assert data.token_ids[0].tolist() == [0, 4, 7, PADDING, PADDING, 9, 11, 13]
    assert data.labels[0] == 1
    # The row before it: user 3, movie 1, rating 4.
    assert data.token_ids[1].tolist() == [2, 3, 5, 6, 7, 9, 10, 12]


INTER_HEADER = FILES["ml-100k.inter"].splitlines()[0] + "\n"


@pytest.mark.parametrize(
    ("changed", "where", "what"),
    [
        ({"inter": INTER_HEADER + "1\t1\t4\t9\n1\t1\t4\n"}, "inter:3:", "3 fields where the"),
        ({"inter": INTER_HEADER + "1\t1\tfour\t9\n"}, "inter:2:", "rating:float 'four' is not"),
        ({"inter": INTER_HEADER + "1\t1\t4\tinf\n"}, "inter:2:", "timestamp:float 'inf' is not"),
        ({"inter": INTER_HEADER + "9\t1\t4\t9\n"}, "inter:2:", "unknown user_id:token '9'"),
        ({"inter": "user_id:token\n1\n"}, "inter:1:", "no column item_id:token"),
        (
            {"user": FILES["ml-100k.user"] + "4\told\tM\tx\t1\n"},
            "user:5:",
            "age:token 'old' is",
        ),
        ({"inter": INTER_HEADER + "1\t9\t4\t9\n"}, "inter:2:", "unknown item_id:token '9'"),
        ({"user": FILES["ml-100k.user"] + "1\t9\tM\tx\t1\n"}, "user:5:", "'1' for the second"),
        ({"item": FILES["ml-100k.item"] + "2\tx\t1\tA\n"}, "item:4:", "'2' for the second"),
        ({"user": FILES["ml-100k.user"].splitlines()[0]}, "user:1:", "no row follows"),
        ({"item": FILES["ml-100k.item"] + "3\n"}, "item:4:", "1 fields where the header has 4"),
    ],
)
def test_a_malformed_row_names_file_line_and_remedy(tmp_path, changed, where, what):
    folder = _write(tmp_path, **changed)
    with pytest.raises(UserError) as error:
        read_movielens(folder)
    message = str(error.value)
    assert message.startswith(f"{folder}/ml-100k.{where}")
    assert what in message
    assert f"delete {folder} and run this again" in message
