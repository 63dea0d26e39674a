"""Delimited text files, such as CSV, read strictly: every refusal names the file and the line.

Apache Arrow parses; what it lets pass (an unfinished quote, a character behind a closing one, NUL)
is looked for first.
"""

import codecs
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from tools.common.command import UserError

_BYTE_ORDER_MARK = codecs.BOM_UTF8
_LARGEST_BLOCK = 2**31 - 1
_CHUNK = 2**20
_NUMBER = r"\A[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\z"
_LONGEST_SHOWN = 60
_LINE_END = rb"(?:\r\n?|\n)"
# Each distinct text once, however many rows have it and however long it is.
_DISTINCT_TEXTS = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class Dialect:
    """How fields are told apart.

    Attributes:
      delimiter: one ASCII character between fields.
      quoted: whether a field may stand in double quotes, with a double quote in it doubled.
    """

    delimiter: str
    quoted: bool

    @property
    def field(self) -> bytes:
        """The regular expression of one field."""
        delimiter = re.escape(self.delimiter.encode())
        if not self.quoted:
            return rb"[^%b\r\n]*+" % delimiter
        # A quote within a field that does not begin with one is a character like any other.
        return rb'(?:"[^"]*+(?:""[^"]*+)*+"|[^"%b\r\n][^%b\r\n]*+)?+' % (delimiter, delimiter)

    @property
    def row(self) -> re.Pattern[bytes]:
        """The regular expression of one row with its end."""
        delimiter = re.escape(self.delimiter.encode())
        return re.compile(
            rb"%b(?:%b%b)*+(?:%b|\Z)" % (self.field, delimiter, self.field, _LINE_END)
        )

    @property
    def rows(self) -> re.Pattern[bytes]:
        """The regular expression of a file; its match ends where a field is malformed."""
        delimiter = re.escape(self.delimiter.encode())
        return re.compile(rb"(?:%b(?:%b|%b))*+%b" % (self.field, delimiter, _LINE_END, self.field))


CSV = Dialect(",", quoted=True)
TAB_SEPARATED = Dialect("\t", quoted=False)


class Texts(NamedTuple):
    """A column of text.

    Attributes:
      codes: of each row, the place of its text in `values`.  # shape=(rows,), dtype=np.int32
      values: the distinct texts in the order of their code points.
    """

    codes: np.ndarray
    values: list[str]


@dataclass(frozen=True, eq=False)
class _File:
    """A file's bytes behind the byte order mark, and what its errors say."""

    path: Path
    data: bytes
    dialect: Dialect
    remedy: str

    def error_at(self, position: int, problem: str) -> UserError:
        """The error about what begins at a byte."""
        ends = [self.data.count(end, 0, position) for end in (b"\n", b"\r", b"\r\n")]
        line = 1 + ends[0] + ends[1] - ends[2]
        return UserError(f"{self.path}:{line}: {problem}; {self.remedy}")

    def error_in_row(self, row: int, problem: str) -> UserError:
        """The error about a row; the header is row -1."""
        found = itertools.islice(self.dialect.row.finditer(self.data), row + 1, None)
        return self.error_at(next(found).start(), problem)


@dataclass(frozen=True, eq=False)
class TextTable:
    """The wanted columns of a file. Made by `read_text_table`."""

    file: _File
    columns: Any

    def texts(self, name: str) -> Texts:
        """A column of text that has no empty field.

        Raises:
          UserError: a field is empty.
        """
        codes, values = self._distinct(name)
        self._check(pc.not_equal(values, ""), codes, lambda _: f"an empty {name}")
        order = pc.sort_indices(values).to_numpy()
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return Texts(place[codes], values.take(order).to_pylist())

    def numbers(self, name: str) -> np.ndarray:
        """A column of finite decimal numbers.  # shape=(rows,), dtype=np.float64

        Raises:
          UserError: a field is anything else, such as "", nan, 4_5, 0x10 or " 4".
        """
        codes, values = self._distinct(name)

        def problem(place: int) -> str:
            text = shown(values[place].as_py())
            return f"{name} {text} is not a finite decimal number, such as 4, 4.5 or 1e3"

        self._check(pc.match_substring_regex(values, _NUMBER), codes, problem)
        numbers = pc.cast(values, pa.float64())
        self._check(pc.is_finite(numbers), codes, problem)
        return numbers.to_numpy()[codes]

    def error(self, row: int, problem: str) -> UserError:
        """The error about a row, counted from 0 behind the header."""
        return self.file.error_in_row(row, problem)

    def _distinct(self, name: str) -> tuple[np.ndarray, Any]:
        """Each row's place among the distinct texts, and those, in the order of Arrow's table."""
        chunks = self.columns.column(name).unify_dictionaries().chunks
        codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks])
        return codes, chunks[0].dictionary

    def _check(self, good: Any, codes: np.ndarray, problem: Any) -> None:
        """Raises about the first row whose distinct text is not good."""
        bad = ~good.to_numpy(zero_copy_only=False)
        if bad.any():
            row = int(np.argmax(bad[codes]))
            raise self.error(row, problem(int(codes[row])))


def read_text_table(path: Path, columns: Sequence[str], dialect: Dialect, remedy: str) -> TextTable:
    """Reads the named columns of a file; others are passed over.

    Lines end in LF, CRLF or CR. The file may begin with a byte order mark. Fields are taken as they
    are, with their spaces, and words such as NA are text. Memory is in proportion to the file.

    Args:
      path: a UTF-8 text file whose first row names its columns.
      columns: the names that must be there.
      dialect: how fields are told apart.
      remedy: what to do about a bad file; ends every message.

    Raises:
      UserError: there is no file to read, its text is malformed, a column is missing or twice
        there, a row has another length than the header, or no row follows the header.
    """
    file = _File(path, _read_bytes(path), dialect, remedy)
    _check_characters(file)
    _check_quotes(file)
    _check_header(file, columns)
    wrong_rows: list[Any] = []
    table = _parse(file, file.data, columns, wrong_rows)
    if wrong_rows:
        # Arrow counts the header as row 1.
        found = wrong_rows[0]
        raise file.error_in_row(
            found.number - 2,
            f"{found.actual_columns} fields where the header has {found.expected_columns}",
        )
    return TextTable(file, table)


def shown(text: str) -> str:
    """A text for a message: quoted, and shortened where it is long."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    return data.removeprefix(_BYTE_ORDER_MARK)


def _check_characters(file: _File) -> None:
    if not file.data:
        raise file.error_at(0, "the file is empty")
    nul = file.data.find(b"\0")
    if nul >= 0:
        raise file.error_at(nul, "a NUL byte, which text does not have (is it UTF-16?)")
    # In parts: the text of a whole file can take four times its bytes.
    decoder = codecs.getincrementaldecoder("utf-8")()
    end = 0
    for part in _parts(file.data):
        end += len(part)
        try:
            decoder.decode(part, final=end == len(file.data))
        except UnicodeDecodeError as error:
            position = end - len(error.object) + error.start
            raise file.error_at(position, f"not UTF-8 ({error.reason})") from error


def _parts(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


def _check_quotes(file: _File) -> None:
    if not file.dialect.quoted or b'"' not in file.data:
        return
    match = file.dialect.rows.match(file.data)
    end = match.end() if match else 0
    if end == len(file.data):
        return
    if file.data[end : end + 1] == b'"':
        raise file.error_at(end, "a quote is opened and never closed")
    raise file.error_at(end, "a character follows the closing quote of a field")


def _check_header(file: _File, columns: Sequence[str]) -> None:
    match = file.dialect.row.match(file.data)
    line = match.group() if match else file.data
    header = _parse(file, line.rstrip(b"\r\n") + b"\n", None, []).column_names
    names = ", ".join(map(shown, header))
    names = names if len(names) <= 4 * _LONGEST_SHOWN else f"{names[: 4 * _LONGEST_SHOWN]}..."
    missing = [name for name in columns if name not in header]
    if missing:
        raise file.error_at(0, f"no column {', '.join(missing)} in the header [{names}]")
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise file.error_at(0, f"column {shown(twice[0])} more than once in the header [{names}]")
    if len(line) == len(file.data):
        raise file.error_at(0, "no row follows the header")


def _parse(file: _File, data: bytes, columns: Sequence[str] | None, wrong_rows: list[Any]) -> Any:
    """Arrow's table; rows of another length than the header are left out and listed."""

    def leave_out(row: Any) -> str:
        if not wrong_rows:
            wrong_rows.append(row)
        return "skip"

    try:
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            # One block, since no row may be longer than one; one thread, so that rows are counted.
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=min(len(data) + 1, _LARGEST_BLOCK)
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=file.dialect.delimiter,
                quote_char='"' if file.dialect.quoted else False,
                newlines_in_values=file.dialect.quoted,
                ignore_empty_lines=False,
                invalid_row_handler=leave_out,
            ),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns or (), _DISTINCT_TEXTS),
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowException as error:
        raise UserError(f"{file.path}: {error}; {file.remedy}") from error
