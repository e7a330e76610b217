"""Numbers with a decimal comma, and columns that say little as categories: what public rows say
decides how each row is read, and the user is told.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.checks import SettingsWarning
from quietgrad.training.sources.guess import describe
from quietgrad.training.sources.rows import Rows
from quietgrad.training.tasks.tables.data import Encoding, LabelledRows


def rows_of(**columns: Sequence[str]) -> LabelledRows:
    cells = {name: tuple(column) for name, column in columns.items()}
    n = len(next(iter(cells.values())))
    return LabelledRows(cells, np.zeros(n, np.int64), ("a",), "x.csv")


def encoding_of(**columns: Sequence[str]) -> tuple[Encoding, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", SettingsWarning)
        found = Encoding.of([rows_of(**columns)])
    return found, [str(one.message) for one in told]


@pytest.mark.parametrize(
    ("written", "mean"),
    [
        (("1,5", "2,5", "-1"), 1.0),
        (("1.000,5", "2.000,5", "3.000"), 2000 + 1 / 3),
        (("0,125", "0,375"), 0.25),
        (("1", "2"), 1.5),
    ],
)
def test_columns_whose_every_public_cell_is_a_number(written: tuple[str, ...], mean: float) -> None:
    found, told = encoding_of(n=written)
    assert found.numbers["n"][0] == pytest.approx(mean)
    assert bool(found.commas) == (written != ("1", "2")) == bool(told)
    again = Encoding.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found


@pytest.mark.parametrize("written", [("1,234", "950"), ("1,5", "2.5"), ("1,234.5", "1,5")])
def test_commas_that_say_no_one_thing_are_told_of(written: tuple[str, ...]) -> None:
    found, told = encoding_of(n=written)
    assert not found.numbers
    assert not any("decimal" in one for one in told)
    if written != ("1,234.5", "1,5"):
        assert "write 1234.5 in place of" in told[0]


def test_a_private_cell_is_read_by_what_public_ones_say_and_by_itself() -> None:
    found, _ = encoding_of(n=("1,5", "2,5"))
    one, other = (found.encode(rows_of(n=("2,5", odd))) for odd in ("2.500", "3,5"))
    assert (one.numbers[0] == other.numbers[0]).all() and one.numbers[0, 0] == pytest.approx(1)
    assert list(one.numbers[1]) == [0, 1]  # no number in this column, as an empty cell
    assert "write 3,14 in place of 3.14" in found.strange(rows_of(n=("2.5",)))[0]
    grouped, _ = encoding_of(n=("1.000,5", "2.000,5"))
    assert grouped.encode(rows_of(n=("1.500,5",))).numbers[0, 0] == pytest.approx(0)


def test_columns_in_which_each_row_has_a_category_of_its_own_are_told_of() -> None:
    days = [f"{day:02}.03.2024" for day in range(1, 29)]
    names = [f"K{i}" for i in range(28)]
    _, told = encoding_of(day=days, customer=names, job=["nurse", "smith"] * 14)
    assert len(told) == 2
    assert told[0].startswith("column 'day' of 'x.csv' holds dates, read as categories")
    assert told[1].startswith("column 'customer' of 'x.csv' is read as categories")


def test_check_says_numbers_and_dates() -> None:
    days = [f"2024-03-{day:02} 10:00" for day in range(1, 31)]
    cells = {"price": ["12,50", "1.012,75"] * 15, "day": days, "code": ["1,234", "950"] * 15}
    kinds = {name: one.kind for name, one in describe(Rows(cells, [])).items()}
    assert kinds == {"price": "numbers", "day": "dates", "code": "words"}


def test_check_lists_many_rows_that_are_broken_alike_together(
    quietgrad: Any, tmp_path: Path
) -> None:
    file = tmp_path / "windows.csv"
    rows = [f"{i},{'Köln' if 4 <= i < 30 or i == 35 else 'Ulm'}" for i in range(40)]
    file.write_bytes("\n".join(["number,city", *rows]).encode("cp1252"))
    code, out, _ = quietgrad("check", file)
    assert code == 1 and "lines 6 to 31, 37: bytes that are not UTF-8" in " ".join(out.split())
    assert f"iconv -f WINDOWS-1252 -t UTF-8 {file} > NEW_FILE" in " ".join(out.split())
