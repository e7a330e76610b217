"""Rows of a file of records, each by itself: which can be read, and why others cannot.

A row is what stands between two line ends outside of quotes (CSV), or on one line (JSONL). Taking
one out leaves every other row as it was, so what becomes of a row is decided by the row alone.
What is found here of single rows is for their owner (``quietgrad check``); training says only
whether there are such rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quietgrad.checks import how_many
from quietgrad.training.sources.quoting import any_length, is_told_apart

FILES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# First bytes of files that are no tables of text, and what they are.
OTHER_FILES = {
    b"\xff\xfe\x00\x00": "is UTF-32 text; save it as UTF-8",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
    b"PK\x03\x04": "is a zip archive or a workbook; unpack it, or save the sheet as CSV in UTF-8",
    b"\x1f\x8b": "is compressed with gzip; unpack it",
    b"\xd0\xcf\x11\xe0": "is an old workbook; save the sheet as CSV in UTF-8",
    b"PAR1": "is a Parquet file; name it .parquet",
    b"%PDF": "is a PDF file",
}
NO_NAMES = (
    "its first line looks like a record, not like the names of columns: put a line of names above "
    "it (text,label)"
)
NOT_UTF8, UNCLOSED = "bytes that are not UTF-8", "a quotation mark that is not closed"
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
SPAN = 1 << 20  # bytes looked at to tell a file of zero bytes from text


class UnreadableFile(ValueError):
    """A file that is no table of its kind as a whole.

    Attributes:
        place: where, for the owner of the file alone; "" where the file as a whole is meant.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read.

    Attributes:
        first, last: its lines in the file, from 1; entries of the list in a .json file.
        reason: what is wrong with it, without its content.
    """

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Rows:
    """A file's rows.

    Attributes:
        columns: name -> cells of the readable rows; None where a JSON record lacks the key.
        lines: of each readable row, where it begins.
        bad: the others.
        separator: between cells; "" where there is none.
        marked: whether the file begins with a byte order mark.
    """

    columns: dict[str, list[Any]]
    lines: list[int]
    bad: list[BadRow] = field(default_factory=list)
    separator: str = ""
    marked: bool = False


def read_rows(path: Path) -> Rows:
    """Reads a file row by row.

    Args:
        path: one of ``FILES``; it exists.

    Raises:
        UnreadableFile: if the file as a whole cannot be divided into rows and columns.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}") from None
    for start, what in OTHER_FILES.items():
        if data.startswith(start):
            raise UnreadableFile(what)
    if b"\0" in data[:SPAN]:
        raise UnreadableFile("holds zero bytes: it is no text, or UTF-16; save it as UTF-8")
    marked = data.startswith(BYTE_ORDER_MARK)
    data = data.removeprefix(BYTE_ORDER_MARK)
    if suffix in (".csv", ".tsv"):
        found = _table(data, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".jsonl":
        found = _json_lines(data)
    else:
        found = _json_list(data)
    return Rows(found.columns, found.lines, found.bad, found.separator, marked)


def _table(data: bytes, usual: str) -> Rows:
    # What is not UTF-8 becomes lone surrogates, which no UTF-8 text holds.
    text = data.decode("utf-8", "surrogateescape")
    separator, lines = _separator(text, usual), _Lines(text)
    names: list[str] = []
    cells: list[list[str]] = []
    starts: list[int] = []
    bad: list[BadRow] = []
    with any_length():
        reader = csv.reader(lines, delimiter=separator)
        while True:
            lines.taken.clear()
            first = reader.line_num + 1
            row = next(reader, None)
            if row is None:
                break
            if _is_empty_line(row, lines.taken, names):
                continue
            wrong = _wrong_with(row, lines.taken, separator)
            if not names:
                if wrong:
                    raise UnreadableFile(f"has {wrong} in its line of column names")
                names = _names(row)
            elif wrong == UNCLOSED:
                raise UnreadableFile(
                    "has a quotation mark that is not closed, so its rows cannot be told apart",
                    f"the row that begins in line {first}",
                )
            elif wrong or len(row) != len(names):
                reason = wrong or f"{how_many(len(row), 'cell')} in place of {len(names)}"
                bad.append(BadRow(first, reader.line_num, reason))
            else:
                cells.append(row)
                starts.append(first)
    if not names:
        raise UnreadableFile("holds no records: it is empty")
    if not cells and not bad:
        raise UnreadableFile("holds no records: it has a line of column names, and none below it")
    columns = {name: [row[i] for row in cells] for i, name in enumerate(names)}
    return Rows(columns, starts, bad, separator)


class _Lines:
    """Lines with their ends, and those taken since ``taken`` was emptied."""

    def __init__(self, text: str) -> None:
        self._lines = io.StringIO(text, newline="")
        self.taken: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.taken.append(line)
        return line


def _is_empty_line(row: list[str], lines: list[str], names: list[str]) -> bool:
    """An empty line is no row; a quoted empty cell is one, where there is a single column."""
    if not row or len(row) > 1 or row[0].strip():
        return not row
    return len(names) != 1 or '"' not in "".join(lines)


def _wrong_with(row: list[str], lines: list[str], separator: str) -> str:
    """What is wrong with a row by itself: a quotation mark that is left open, or its bytes."""
    if not is_told_apart(lines, separator):
        return UNCLOSED  # first: such a row may hold others, and they are not left out with it
    rotten = any(not cell.isascii() and _has_surrogates(cell) for cell in row)
    return NOT_UTF8 if rotten else ""


def _has_surrogates(cell: str) -> bool:
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _separator(text: str, usual: str) -> str:
    """What stands between cells: what the file's name says, or where its column names would be a
    single one so, what makes the most of them. No row has a say in it.
    """
    lines = _Lines(text)
    with any_length():
        for row in csv.reader(lines, delimiter=usual):
            if row and "".join(row).strip():
                break
            lines.taken.clear()
        if len(next(csv.reader(lines.taken, delimiter=usual), [])) > 1:
            return usual
        columns = {
            separator: len(next(csv.reader(lines.taken, delimiter=separator), []))
            for separator in (usual, *SEPARATORS)
        }
    return max(columns, key=columns.__getitem__)


def _names(header: list[str]) -> list[str]:
    names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        told = "has two columns of one name; give each a name of its own"
        raise UnreadableFile(told, f"both are named {twice!r}")  # which may be a record's cell
    return names


def _json_lines(data: bytes) -> Rows:
    records: list[dict[str, Any]] = []
    starts: list[int] = []
    bad: list[BadRow] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        found, reason = _object(line)
        if found is None:
            bad.append(BadRow(number, number, reason))
        else:
            records.append(found)
            starts.append(number)
    if bad and _is_list(data):
        raise UnreadableFile("holds a list, where each line has one object; name it .json")
    if not records and not bad:
        raise UnreadableFile("holds no records: it is empty")
    return Rows(_columns(records), starts, bad)


def _object(line: bytes) -> tuple[dict[str, Any] | None, str]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return None, NOT_UTF8
    except json.JSONDecodeError as error:
        return None, f"no JSON: {error.msg} at letter {error.colno}"
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return None, "no JSON that can be read"
    wrong = _wrong_entry(found, b"\\u" in line)
    return (None, wrong) if wrong else (found, "")


def _wrong_entry(found: Any, escapes: bool) -> str:
    """What is wrong with a JSON record by itself; half a letter can be written by an escape."""
    if not isinstance(found, dict):
        return f"{_kind(found)}, not an object with columns"
    half = escapes and _has_surrogates(json.dumps(found, ensure_ascii=False))
    return "half a letter (a lone surrogate)" if half else ""


def _is_list(data: bytes) -> bool:
    """Whether the whole is one list, whatever its single lines are."""
    try:
        return data.lstrip().startswith(b"[") and isinstance(json.loads(data), list)
    except (ValueError, RecursionError):
        return False


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _json_list(data: bytes) -> Rows:
    try:
        found = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise UnreadableFile(f"has {NOT_UTF8}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        several = error.msg == "Extra data" and data.lstrip().startswith(b"{")
        hint = " (one object a line? name it .jsonl)" if several else ""
        place = f"{error.msg} in line {error.lineno}, letter {error.colno}"
        raise UnreadableFile(f"is not valid JSON{hint}", place) from None
    except (RecursionError, ValueError):
        raise UnreadableFile("is not JSON that can be read") from None
    if not isinstance(found, list):
        raise UnreadableFile(f"holds {'an object' if isinstance(found, dict) else _kind(found)}, "
                             "where a list of objects is expected")  # fmt: skip
    if not found:
        raise UnreadableFile("holds no records: it is empty")
    wrong = [_wrong_entry(entry, b"\\u" in data) for entry in found]
    bad = [BadRow(i, i, reason) for i, reason in enumerate(wrong, start=1) if reason]
    good = [i for i, reason in enumerate(wrong, start=1) if not reason]
    return Rows(_columns([found[i - 1] for i in good]), good, bad)


def _columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _parquet(path: Path) -> Rows:
    try:
        import pandas as pd

        frame = pd.read_parquet(path)
    except ImportError:
        raise UnreadableFile("needs pandas and pyarrow: pip install 'quietgrad[hf]'") from None
    except Exception:  # of many kinds, and their own words may quote what was read
        raise UnreadableFile("is not a Parquet file that can be read") from None
    if not len(frame):
        raise UnreadableFile("holds no records: it has names of columns alone")
    columns = {str(name): list(map(_plain, frame[name].tolist())) for name in frame.columns}
    return Rows(columns, list(range(1, len(frame) + 1)))


def _plain(cell: Any) -> Any:
    """A list and a gap as JSON has them: arrays and NA cannot be asked whether they are empty."""
    if type(cell).__name__ in ("NAType", "NaTType"):
        return None
    return cell.tolist() if type(cell).__name__ == "ndarray" else cell
