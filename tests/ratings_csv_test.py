"""Ratings in CSV files: what is read, in how much memory, and what each bad file is told."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.common.command import UserError
from tools.recommender.ratings_csv import read_ratings_csv
from tools.recommender.text_table import CSV, TAB_SEPARATED, read_text_table

ROOT = Path(__file__).resolve().parent.parent
HEADER = "userId,movieId,rating,timestamp\n"


def write(tmp_path, text):
    path = tmp_path / "ratings.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(n, start=0):
    return "".join(f"{i % 3},{i % 4},{1 + i % 5},{100 + i}\n" for i in range(start, start + n))


def read(tmp_path, text, columns=("id",), dialect=CSV):
    return read_text_table(write(tmp_path, text), columns, dialect, "fix it")


def ids(tmp_path, text):
    texts = read(tmp_path, text).texts("id")
    return [texts.values[code] for code in texts.codes]


def test_reads_quotes_other_columns_and_a_byte_order_mark(tmp_path):
    text = "".join(f'{100 + i},"{1 + i % 5}",x,"m,{i % 4}",u{i % 3}\n' for i in range(40))
    data = read_ratings_csv(write(tmp_path, "\ufefftimestamp,rating,tag,movieId,userId\n" + text))
    assert [f.size for f in data.features] == [3, 4]
    assert data.labels.tolist() == [float(i % 5 >= 3) for i in range(40)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_in_any_way_and_the_last_need_not(tmp_path, end, last):
    text = end.join(["id,x", "a,1", "b,2"]) + (end if last else "")
    assert ids(tmp_path, text) == ["a", "b"]


def test_ids_are_taken_as_they_are(tmp_path):
    fields = [
        "NA",
        "null",
        "nan",
        " a",
        "a",
        "a ",
        '"a,b"',
        '"a\nb"',
        '"say ""a"""',
        'a"b',
        "é",
        "用",
    ]
    wanted = ["NA", "null", "nan", " a", "a", "a ", "a,b", "a\nb", 'say "a"', 'a"b', "é", "用"]
    assert ids(tmp_path, "id,x\n" + "".join(f"{field},1\n" for field in fields)) == wanted


def test_the_vocabulary_is_in_the_order_of_code_points(tmp_path):
    values = ["b", "a", "é", "Z", "10", "9", "\U0001f600", "\uffff"]
    texts = read(tmp_path, "id,x\n" + "".join(f"{value},1\n" for value in values)).texts("id")
    assert texts.values == sorted(values)


FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)


@given(st.lists(FIELD, min_size=1, max_size=8))
def test_any_text_comes_back_when_it_is_quoted(tmp_path_factory, fields):
    quoted = ['"{}",1\n'.format(field.replace('"', '""')) for field in fields]
    assert ids(tmp_path_factory.mktemp("any"), "id,x\n" + "".join(quoted)) == fields


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("4.5", 4.5), (".5", 0.5), ("5.", 5), ("+4", 4), ("-0.25", -0.25), ("1e3", 1000)],
)
def test_reads_decimal_numbers(tmp_path, text, number):
    assert read(tmp_path, f"id,x\n{text},1\n").numbers("id").tolist() == [number]


NO_NUMBERS = [
    *("", "good", "nan", "NaN", "inf", "-Infinity", "1e400", "4_5", "0x10", " 4", "4 ", "\t4"),
    *("4,5", "1.2.3", "--4", "e3", ".", "1e", "٤", "NA", "null", "9" * 100_000),
]


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("column", ["rating", "timestamp"])
def test_what_is_no_number_is_named_with_its_line(tmp_path, text, column):
    row = {"rating": f'1,2,"{text}",7\n', "timestamp": f'1,2,3,"{text}"\n'}[column]
    path = write(tmp_path, HEADER + rows(4) + row + rows(4))
    with pytest.raises(UserError) as error:
        read_ratings_csv(path)
    message = str(error.value)
    assert message.startswith(f"{path}:6: {column} ")
    assert repr(text)[:50] in message
    assert "is not a finite decimal number" in message
    assert "fix or delete the row" in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (HEADER + rows(2) + "1,2,3\n" + rows(2), 4, "3 fields where the header has 4"),
        (HEADER + rows(2) + "1,2,3,4,5\n", 4, "5 fields where the header has 4"),
        (HEADER + rows(2) + "1,2,3,4,\n", 4, "5 fields where the header has 4"),
        (HEADER + rows(2) + "\n" + rows(2), 4, "an empty userId"),
        (HEADER + rows(2) + "\n", 4, "an empty userId"),
        (HEADER + rows(2) + ",2,3,4\n", 4, "an empty userId"),
        (HEADER + rows(2) + '1,"",3,4\n', 4, "an empty movieId"),
        (HEADER + '1,"a\nb\n",3,4\n' + rows(2) + "1,2,x,4\n", 7, "rating 'x'"),
        (HEADER + '1,"a\nb",3,4\n' + "1,2,3\n", 4, "3 fields where"),
        (HEADER.replace("\n", "\r\n") + "1,2,3,4\r\n1,2,x,4\r\n", 3, "rating 'x'"),
        (HEADER + rows(2) + '1,"2,3,4\n' + rows(3), 4, "a quote is opened and never closed"),
        (HEADER + rows(2) + '1,"2""\n,3,4\n', 4, "a quote is opened and never closed"),
        (HEADER + rows(2) + '1,"2"x,3,4\n', 4, "a character follows the closing quote"),
        (HEADER + rows(2) + '1,"2" ,3,4\n', 4, "a character follows the closing quote"),
        ('"userId,movieId,rating,timestamp\n1,2,3,4\n', 1, "a quote is opened and never closed"),
        (HEADER.encode() + b"1,1,1,1\n1,\xff,3,4\n", 3, "not UTF-8 (invalid start byte)"),
        (HEADER.encode() + "1,é,3,4\n".encode("latin-1"), 2, "not UTF-8"),
        (HEADER.encode() + b"1,\xed\xa0\x80,3,4\n", 2, "not UTF-8"),
        (HEADER.encode() + b"1,2,3,4\n1,\xc3", 3, "not UTF-8 (unexpected end of data)"),
        ((HEADER + rows(2)).encode("utf-16"), 1, "a NUL byte"),
        (HEADER + rows(2) + "1,\0,3,4\n", 4, "a NUL byte"),
        ("user,movieId,rating\n1,2,3\n", 1, "no column userId, timestamp in the header ['user'"),
        ("userId, movieId, rating, timestamp\n1,2,3,4\n", 1, "no column movieId, rating"),
        ("USERID,movieId,rating,timestamp\n1,2,3,4\n", 1, "no column userId"),
        ("userId;movieId;rating;timestamp\n1;2;3;4\n", 1, "no column userId"),
        ("userId,movieId,rating,timestamp,rating\n1,2,3,4,5\n", 1, "column 'rating' more than"),
        ('userId,movieId,"userId",rating,timestamp\n1,2,3,4,5\n', 1, "column 'userId' more than"),
        ("userId,movieId,rating,timestamp,x,x\n1,2,3,4,5,6\n", 1, "column 'x' more than once"),
        ("\n" + HEADER + rows(2), 1, "no column userId"),
        ("", 1, "the file is empty"),
        ("\ufeff", 1, "the file is empty"),
        (HEADER, 1, "no row follows the header"),
        (HEADER.strip(), 1, "no row follows the header"),
        ("x" * 100_000 + "\n1\n", 1, "no column userId"),
        ('"a""b\n', 1, "a quote is opened and never closed"),
    ],
)
def test_a_bad_file_names_the_file_the_line_and_the_remedy(tmp_path, text, line, what):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_ratings_csv(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: ")
    assert what in message
    assert "fix or delete the row (wanted: a CSV file with userId,movieId" in message
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize("place", [0, 1, 2**20 - 2, 2**20 - 1, 2**20, 2**20 + 1])
def test_a_wrong_byte_is_found_wherever_it_is(tmp_path, place):
    """Characters of several bytes go over the borders of the parts that are looked at."""
    text = ("é\n" * 400_000).encode()
    line = text[:place].count(b"\n") + 1
    bad = text[:place] + b"\xff" + text[place:]
    with pytest.raises(UserError, match=rf"ratings\.csv:{line}: not UTF-8"):
        read(tmp_path, bad)


def test_a_file_that_is_none_says_so(tmp_path):
    with pytest.raises(UserError, match=r"none\.csv: No such file.*check the path"):
        read_ratings_csv(tmp_path / "none.csv")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}: Is a directory.*check"):
        read_ratings_csv(tmp_path)
    with pytest.raises(UserError, match="File name too long"):
        read_ratings_csv(tmp_path / ("x" * 300 + ".csv"))


def test_tab_separated_fields_have_no_quotes(tmp_path):
    table = read(tmp_path, 'id\tx\n"a\t1\nb"c\t2\n', dialect=TAB_SEPARATED)
    assert table.texts("id").values == ['"a', 'b"c']
    with pytest.raises(UserError, match=r"ratings\.csv:3: 1 fields"):
        read(tmp_path, 'id\tx\n"a\t1\nb\n', dialect=TAB_SEPARATED)


MEASURE = """
import resource, sys
from pathlib import Path
import numpy as np
from tools.recommender.ratings_csv import read_ratings_csv
small, path = map(Path, sys.argv[1:])
read_ratings_csv(small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_ratings_csv(path)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("length", [20_000, 100_000])
@pytest.mark.parametrize("in_all_rows", [False, True])
def test_a_long_id_takes_memory_of_the_order_of_the_file(tmp_path, length, in_all_rows):
    long = "u" * length
    users = [long if in_all_rows or i == 7 else str(i % 9) for i in range(2_000)]
    small, path = tmp_path / "small.csv", tmp_path / "long.csv"
    small.write_text(HEADER + rows(100))
    path.write_text(
        HEADER + "".join(f"{user},{i % 7},{1 + i % 5},{i}\n" for i, user in enumerate(users))
    )
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, small, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    # The file, Arrow's copy, and what the allocators keep.
    assert int(result.stdout) < 3 * path.stat().st_size + 10_000_000


def test_one_file_gives_one_vocabulary(tmp_path):
    path = write(tmp_path, HEADER + rows(50))
    first, again = read_ratings_csv(path), read_ratings_csv(path)
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    order = "".join(reversed((HEADER + rows(50)).splitlines(keepends=True)[1:]))
    other = read_ratings_csv(write(tmp_path, HEADER + order))
    np.testing.assert_array_equal(first.token_ids, other.token_ids)
