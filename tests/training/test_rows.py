"""Rows of a file, each by itself: which are broken, and in which line, and that no row decides what
becomes of another.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quietgrad.training.sources.rows import Rows, UnreadableFile, read_rows
from quietgrad.training.tasks.answers.pairs import load_pairs
from quietgrad.training.tasks.splits import IGNORED, split, with_public_labels
from quietgrad.training.tasks.tables.data import Encoding, load_rows
from quietgrad.training.tasks.text.data import load_texts


def read(path: Path, content: bytes | str) -> Rows:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_rows(path)


def places(rows: Rows) -> list[tuple[int, int]]:
    return [(row.first, row.last) for row in rows.bad]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_those_of_the_file(end: str, tmp_path: Path) -> None:
    lines = ["text,label", '"two', 'lines, a comma and ""quotes""",a', "", "x,y,z", "plain,b",
             '"three', "", 'lines",b,c', "alone"]  # fmt: skip
    found = read(tmp_path / "a.csv", end.join(lines) + end)
    assert found.columns["text"] == [f'two{end}lines, a comma and "quotes"', "plain"]
    assert found.lines == [2, 6]
    assert places(found) == [(5, 5), (7, 9), (10, 10)]
    assert [row.reason for row in found.bad] == [
        f"{n} in place of 2" for n in ("3 cells", "3 cells", "1 cell")
    ]


def test_a_row_is_read_alike_in_any_company(tmp_path: Path) -> None:
    # Taking rows out, or putting them elsewhere, changes no other: broken ones included.
    rows = [b'"a, b",x\n', b"c,y\n", b"too,many,cells\n", b"few\n", b"caf\xe9,x\n", b'"d\ne",y\n',
            b'"f"" g",\n', b"h,x\n"]  # fmt: skip
    alone = {row: read(tmp_path / "a.csv", b"text,label\n" + row) for row in rows}
    generator = random.Random(0)
    for _ in range(60):
        chosen = generator.sample(rows, generator.randrange(1, len(rows) + 1))
        found = read(tmp_path / "a.csv", b"text,label\n" + b"".join(chosen))
        for name in ("text", "label"):
            assert found.columns[name] == [c for row in chosen for c in alone[row].columns[name]]
        assert len(found.bad) == sum(len(alone[row].bad) for row in chosen)


def test_rows_in_other_bytes_are_broken_by_themselves(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", b"\xef\xbb\xbftext,label\ncaf\xe9,a\ncaf\xc3\xa9,b\n")
    assert found.columns == {"text": ["café"], "label": ["b"]} and found.marked
    assert places(found) == [(2, 2)] and "UTF-8" in found.bad[0].reason
    found = read(tmp_path / "a.jsonl", b'{"text": "\xe9"}\n{"text": "\\ud800"}\n{"text": "ok"}\n')
    assert found.columns == {"text": ["ok"]} and found.lines == [3]
    assert places(found) == [(1, 1), (2, 2)]


def test_lines_of_json(tmp_path: Path) -> None:
    # A line separator inside a text (U+2028) is no end of a line.
    lines = ['{"text": "one\u2028line", "label": "a"}', "", '{"text": "b"', "[1, 2]", "3",
             '{"text": "c", "label": null}', "{'text': 'd'}"]  # fmt: skip
    found = read(tmp_path / "a.jsonl", "\n".join(lines))
    assert found.columns == {"text": ["one\u2028line", "c"], "label": ["a", None]}
    assert found.lines == [1, 6] and places(found) == [(n, n) for n in (3, 4, 5, 7)]
    assert "a list" in found.bad[1].reason and "a number" in found.bad[2].reason


def test_lists_of_json(tmp_path: Path) -> None:
    found = read(tmp_path / "a.json", json.dumps([{"a": 1}, "no", {"a": 2}, None]))
    assert found.columns == {"a": [1, 2]} and places(found) == [(2, 2), (4, 4)]


def test_long_cells_and_empty_names(tmp_path: Path) -> None:
    long = "word " * 40_000
    found = read(tmp_path / "a.csv", f",text\n1,{long}\n")
    assert found.columns == {"Unnamed: 0": ["1"], "text": [long]}


@pytest.mark.parametrize(
    ("name", "content", "separator", "cells"),
    [
        ("a.csv", "text;label\na,b;c\n", ";", ["a,b", "c"]),
        ("a.csv", '"my; text";label\n"a;b";c\n', ";", ["a;b", "c"]),
        ("a.csv", "\ntext\tlabel\na;b\tc\n", "\t", ["a;b", "c"]),
        ("a.tsv", "text,label\na\tb,c\n", ",", ["a\tb", "c"]),
        ("a.csv", "text|label\na|c\n", "|", ["a", "c"]),
        # Two names by the usual one are two, whatever else is in them, and whatever rows look like.
        ("a.csv", "text;x;y,label\na;b;c,d\n", ",", ["a;b;c", "d"]),
        ("a.csv", "text,label\na;b,c;d\n", ",", ["a;b", "c;d"]),
        ("a.csv", "text\na;b\n", ",", ["a;b"]),
        ("a.csv", '"text;label"\na;b\n', ",", ["a;b"]),
    ],
)
def test_column_names_say_what_stands_between_cells(
    name: str, content: str, separator: str, cells: list[str], tmp_path: Path
) -> None:
    found = read(tmp_path / name, content)
    assert found.separator == separator and not found.bad
    assert [values[0] for values in found.columns.values()] == cells


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "it is empty"),
        ("a.csv", b"\n\n", "it is empty"),
        ("a.csv", "text,label\nä,b\n".encode("utf-16"), "UTF-16"),
        ("a.csv", "text,label\nä,b\n".encode("utf-16-le"), "zero bytes"),
        ("a.csv", b"PK\x03\x04rest", "a workbook"),
        ("a.jsonl", b"\x1f\x8brest", "gzip"),
        ("a.csv", b"PAR1rest", "name it .parquet"),
        ("a.csv", b"t\xe9xt,label\na,b\n", "column names"),
        ("a.csv", b"text,label\n", "column names, and none below"),
        ("a.csv", b"text;label\n\n", "column names, and none below"),
        ("a.csv", b"text,text\na,b\n", "two columns of one name"),
        ("a.csv", b'text,label\na,b\n"c,d\ne,f\n', "not closed"),
        ("a.csv", b'text,label\na,b\n"c,d\n', "not closed"),
        ("a.csv", b'"text,label\na,b\n', "column names"),
        ("a.jsonl", b'[\n{"a": 1}\n]\n', "name it .json"),
        ("a.jsonl", b"", "it is empty"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "name it .jsonl"),
        ("a.json", b'{"a": 1}', "a list of objects is expected"),
        ("a.json", b'[{"a": 1},]', "not valid JSON"),
        ("a.json", b"[" * 100_000, "JSON"),
        ("a.json", b"[]", "it is empty"),
        ("a.parquet", b"no parquet", "not a Parquet file"),
    ],
)
def test_files_that_are_no_tables(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=message):
        read(tmp_path / name, content)


def test_the_place_of_an_open_quotation_mark_is_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(UnreadableFile) as refused:
        read(path, 'text,label\n"a\nb",c\nd,"e\nf,g\n')
    assert refused.value.place == "the row that begins in line 4"
    with pytest.raises(ValueError, match=r"quietgrad check.*says where") as said:
        load_texts(str(path), "text", "label", skip_bad=True)
    assert "4" not in str(said.value).replace(str(tmp_path), "")


BAD = "text,label\ngood film,a\ntoo,many,cells\n,a\nno label,\ndull film,b\n"


def test_skip_bad_leaves_out_what_cannot_be_read_or_learnt(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(BAD)
    with pytest.raises(ValueError, match=r"rows of it are broken.*data\.skip_bad=true"):
        load_texts(str(path), "text", "label")
    assert load_texts(str(path), "text", "label", skip_bad=True).texts == ("good film", "dull film")
    assert load_pairs(str(path), "{text}", "{label}", skip_bad=True).answers == ("a", "b")
    assert len(load_rows(str(path), "label", skip_bad=True)) == 3  # a feature may be missing
    path.write_text(BAD.replace("too,many,cells\n", ""))
    kept = load_texts(str(path), "text", "label")
    assert len(kept) == 4 and (kept.labels == IGNORED).sum() == 2  # as before: they stay records


def test_skip_bad_leaves_out_texts_that_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a", "label": 0}, {"text": 5, "label": 1}, {"text": "b", "label": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_texts(str(path), "text", "label", skip_bad=True)
    assert found.texts == ("a", "b") and found.label_names == ("0", "1")


@pytest.mark.filterwarnings("ignore:column 'a' of:quietgrad.checks.SettingsWarning")  # all differ
def test_a_key_of_one_private_row_changes_no_other(tmp_path: Path) -> None:
    rows = [{"b": i % 7, "a": f"w{i}", "label": "xy"[i % 2]} for i in range(200)]
    found = []
    for name, first in (("a.jsonl", []), ("b.jsonl", [{"secret": 1, "a": "w999", "label": "x"}])):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in [*first, *rows]))
        whole = load_rows(str(path), "label")
        parts = with_public_labels(split(whole, 0.2, 0.2))
        found.append((whole, parts, Encoding.of([parts.validation, parts.test])))
    (alone, parts, encoding), (beside, mixed, other) = found
    assert mixed.train.texts[0].startswith("w999")  # it is private
    assert beside.record_ids[1:] == alone.record_ids
    assert encoding == other and encoding.sizes == other.sizes
    for name in ("validation", "test"):
        assert getattr(parts, name).record_ids == getattr(mixed, name).record_ids
    assert parts.train.record_ids == mixed.train.record_ids[1:]
    assert (other.encode(mixed.train).codes[1:] == encoding.encode(parts.train).codes).all()


@pytest.mark.parametrize("name", ["lab1", "stage of", "zzzz"])
@pytest.mark.parametrize(
    "load",
    [
        lambda path, name: load_texts(path, "text", name),
        lambda path, name: load_texts(path, "text", "label", "", name),
        lambda path, name: load_rows(path, name),
        lambda path, name: load_pairs(path, "{text}", f"{{{name}}}"),
    ],
    ids=["label", "user", "table", "answer"],
)
def test_a_key_of_one_private_row_is_in_no_message(load: Any, name: str, tmp_path: Path) -> None:
    """Before: a column's name that was mistyped listed the keys of every row, or took such a key
    for what was meant.
    """
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"w{i}", "label": "xy"[i % 2]} for i in range(20)]
    private = {"text": "w", "label": "x", "stage of bob": 1, "labl": 2}
    path.write_text("".join(json.dumps(row) + "\n" for row in [private, *rows]))
    with pytest.raises(ValueError, match="is not a column of") as refused:
        load(str(path), name)
    assert "bob" not in str(refused.value) and "'labl'" not in str(refused.value)
    assert "label" in str(refused.value)


def test_a_key_of_one_private_row_divides_no_others(tmp_path: Path) -> None:
    """Before: of rows of signs alone, all were divided anew by one cell more in each."""
    signs = ["+", "-", "++", "--", "?", "+-", "-+", "/"]
    rows = [
        {"a": one, "b": two, "c": three, "label": "x"}
        for one in signs
        for two in signs
        for three in signs
    ]
    found = []
    for name, first in (("a.jsonl", []), ("b.jsonl", [{"bb": 1, "a": "w9", "label": "x"}])):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in [*first, *rows]))
        found.append(split(load_rows(str(path), "label"), 0.2, 0.2))
    alone, beside = found
    assert set(beside.train.record_ids) ^ set(alone.train.record_ids) <= set(
        load_rows(str(tmp_path / "b.jsonl"), "label").record_ids[:1]
    )


def test_lists_in_a_parquet_file_are_cells_as_in_json(tmp_path: Path) -> None:
    """Before: a list of two in one private row was a traceback of numpy's."""
    pandas = pytest.importorskip("pandas")
    lists = [["a"], ["a", "b"], [], None]
    path = tmp_path / "a.parquet"
    pandas.DataFrame({"word": lists, "label": list("xyxy")}).to_parquet(path)
    found = load_rows(str(path), "label")
    assert found.columns["word"] == ("['a']", "['a', 'b']", "[]", "")


def test_what_is_left_out_takes_its_owner_along(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label,who\nx,,ann\ny,b,bob\nz,c,eve\n")
    named: Any = {"skip_bad": True}
    owners = [
        load_pairs(str(path), "{text}", "{label}", "who", **named).owners,
        load_texts(str(path), "text", "label", "", "who", **named).owners,
        load_rows(str(path), "label", "who", **named).owners,
    ]
    alone = tmp_path / "b.csv"
    alone.write_text("text,label,who\ny,b,bob\nz,c,eve\n")
    expected = load_texts(str(alone), "text", "label", "", "who").owners
    assert owners == [expected] * 3 and expected is not None and len(expected) == 2
