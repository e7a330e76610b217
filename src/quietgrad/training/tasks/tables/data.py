"""Rows of a table: read, and encoded as numbers by what public rows say.

Which columns hold numbers, their mean and spread, and which categories there are follow from
validation and test rows, which are public. So a training row is encoded by itself and by what is
public: no row decides how another is read.
Shape legend: n rows, f numeric columns, c columns of categories.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.checks import how_many
from quietgrad.training.sources.numerals import Commas, number_of
from quietgrad.training.tasks.columns import (
    label_word,
    missing,
    no_column,
    owners_in,
    read_columns,
    require_words,
    without_gaps,
)
from quietgrad.training.tasks.records import InOrder
from quietgrad.training.tasks.splits import IGNORED, normalised
from quietgrad.training.tasks.tables.doubts import tell_doubts

COMMA = re.compile(r"[+-]?\d+,\d+")
SHOWN_LETTERS = 60  # of a cell
FARTHEST = 10.0  # standard deviations; one cell must not swamp all others of its row
# What ``Encoding.encode`` does, for those who run an exported model.
ENCODED = {
    "numbers": "of each column in order (value - mean) / deviation, between "
    f"{-FARTHEST:g} and {FARTHEST:g}, and 0; 0 and 1 for a cell that is empty or no number. Of "
    "columns in the list commas 3,14 is the number and 3.14 none (1.234,5 is one where it says "
    "true)",
    "codes": "of each column in order the place of the cell in its list, counted from 1; 0 for a "
    "cell that is not in it",
}


@dataclass(frozen=True)
class LabelledRows:
    """Rows as they stand in the file.

    Attributes:
        columns: name -> [n] cells as words, "" where a cell is empty; the label's column is not
            among them.
        labels: [n], indices into ``label_names``; ``IGNORED`` for a row without a label.
        label_names: sorted names.
        source: where they came from.
        owners: [n] what each row's user is known by; None where nobody asks. The user's column is
            not among the columns: nothing is learnt from it.
    """

    columns: Mapping[str, tuple[str, ...]]
    labels: NDArray[np.int64]
    label_names: tuple[str, ...]
    source: str
    owners: tuple[bytes, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """[n] each row as one text, by which rows are divided into parts. Of cells that are filled:
        a column that only another row fills changes nothing.
        """
        rows = zip(*self.columns.values(), strict=True)
        return tuple("\x1f ".join(filter(None, cells)) for cells in rows)

    def known_by(self, names: Sequence[str]) -> list[str]:
        """[n] each row by its cells of some columns, whatever stands beside them in its file, in
        which order, and with how many zeros behind a point.
        """
        none = ("",) * len(self)
        columns = [map(_known_cell, self.columns.get(name, none)) for name in names]
        return ["\x1f".join(cells) for cells in zip(*columns, strict=True)]

    @cached_property
    def record_ids(self) -> tuple[bytes, ...]:
        """[n] what identifies each row: its cells without the label, by their columns' names. A
        column that only another row fills changes nothing.
        """
        names = sorted(self.columns)
        rows = zip(*(self.columns[name] for name in names), strict=True)
        whole = (
            "\x1e".join(
                f"{name}\x1f{cell}" for name, cell in zip(names, cells, strict=True) if cell
            )
            for cells in rows
        )
        return tuple(hashlib.sha256(t.encode("utf-8", "surrogatepass")).digest() for t in whole)

    def subset(self, indices: NDArray[np.int64]) -> LabelledRows:
        chosen = {name: tuple(cells[i] for i in indices) for name, cells in self.columns.items()}
        owners = None if self.owners is None else tuple(self.owners[i] for i in indices)
        return LabelledRows(chosen, self.labels[indices], self.label_names, self.source, owners)


def load_rows(
    source: str,
    label_column: str,
    user_column: str = "",
    skip_bad: bool = False,
    option: str = "data.source",
) -> LabelledRows:
    """Reads a table; its list of labels is that of all rows, and private until
    ``with_public_labels`` has replaced it.

    Args:
        source: a CSV, TSV, JSONL, JSON or Parquet file, or a Hugging Face data set.
        label_column: name of the column to predict; all others are read.
        user_column: says whose a row is, where users are protected; it is not read otherwise.
        skip_bad: leave out rows that cannot be read, or lack a label.
        option: what named the source, for messages.

    Raises:
        ValueError: missing file or column, no rows, no other column.
    """
    found: dict[str, Sequence[Any]] = dict(read_columns(source, skip_bad))
    if label_column not in found:
        raise ValueError(
            f"data.label={label_column!r} is not a column of "
            f"{source!r}{no_column(label_column, found)}"
        )
    found = without_gaps(found, [label_column], skip_bad)
    owners = owners_in(found, user_column, option, source, label_column)
    found.pop(user_column, None)
    labels = found.pop(label_column)
    if not labels:
        raise ValueError(f"data.source={source!r} holds no records")
    if not found:
        raise ValueError(
            f"data.source={source!r} has no column beside the label {label_column!r}; add some to "
            "learn from"
        )
    require_words(labels, source)
    words = [None if missing(label) else label_word(label) for label in labels]
    names = tuple(sorted({word for word in words if word is not None}))
    index = {name: i for i, name in enumerate(names)}
    numbers = np.array([IGNORED if word is None else index[word] for word in words], dtype=np.int64)
    columns = {name: tuple(_word(cell) for cell in cells) for name, cells in found.items()}
    if are_from_rows(source):  # and their order from the first ones
        columns = dict(sorted(columns.items()))
    return LabelledRows(columns, numbers, names, source, owners)


def are_from_rows(source: str) -> bool:
    """Whether the columns are what rows bring with them, and no header says which there are."""
    return Path(source).suffix.lower() in (".json", ".jsonl")


def unlabelled_rows(
    columns: Mapping[str, Sequence[Any]], names: Sequence[str], source: str
) -> LabelledRows:
    """New rows, of the columns ``names``; their labels are all 0 and mean nothing."""
    cells = {name: tuple(_word(cell) for cell in columns[name]) for name in names}
    rows = len(next(iter(columns.values())))
    return LabelledRows(cells, np.zeros(rows, dtype=np.int64), (), source)


def _word(cell: Any) -> str:
    return "" if missing(cell) else label_word(cell).strip()


@dataclass(frozen=True)
class Encoding:
    """How cells become numbers; of public rows alone, so it may be published.

    Attributes:
        numbers: numeric column -> (mean, standard deviation).
        categories: other column -> its categories; any other cell is number 0.
        commas: those numeric columns whose public cells are written with a decimal comma.
    """

    numbers: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    commas: Mapping[str, Commas] = field(default_factory=dict)

    @classmethod
    def of(cls, public: Sequence[LabelledRows]) -> Encoding:
        """From public rows."""
        numbers: dict[str, tuple[float, float]] = {}
        categories: dict[str, tuple[str, ...]] = {}
        commas: dict[str, Commas] = {}
        known: dict[str, list[str]] = {}
        for name in public[0].columns:
            cells = [cell for rows in public for cell in rows.columns[name] if cell]
            if not cells:  # in JSON, a private row alone may have brought the column
                continue
            with_commas = Commas.of(cells)
            values = [(with_commas.number_of if with_commas else number_of)(c) for c in cells]
            found = np.array([value for value in values if value is not None])
            if len(found) == len(values):
                numbers[name] = (float(found.mean()), float(found.std()) or 1.0)
                if with_commas:
                    commas[name] = with_commas
            else:
                categories[name] = tuple(sorted(set(cells)))
                known[name] = cells
        tell_doubts(list(commas), known, public[0].source)
        if not numbers and not categories:
            raise ValueError(
                f"data.source={public[0].source!r}: validation and test rows have no cell beside "
                "the label, so there is nothing to learn from; add columns"
            )
        return cls(numbers, categories, commas)

    @property
    def sizes(self) -> tuple[int, ...]:
        """[c] categories of each column, and one for all others."""
        return tuple(len(known) + 1 for known in self.categories.values())

    @property
    def width(self) -> int:
        """Numbers a row: of each numeric column its value, and whether there is none."""
        return 2 * len(self.numbers)

    def encode(self, rows: LabelledRows) -> EncodedRows:
        """Each row by itself."""
        n = len(rows)
        values = np.zeros((n, self.width), dtype=np.float32)
        for i, (name, (mean, deviation)) in enumerate(self.numbers.items()):
            for row, cell in enumerate(rows.columns[name]):
                value = self._number(name, cell)
                if value is None:
                    values[row, 2 * i + 1] = 1.0
                else:
                    values[row, 2 * i] = np.clip((value - mean) / deviation, -FARTHEST, FARTHEST)
        codes = np.zeros((n, len(self.categories)), dtype=np.int64)
        for i, (name, known) in enumerate(self.categories.items()):
            place = {word: code for code, word in enumerate(known, 1)}
            codes[:, i] = [place.get(cell, 0) for cell in rows.columns[name]]
        return EncodedRows(values, codes, rows.labels)

    def strange(self, rows: LabelledRows) -> list[str]:
        """What cells are to the model where that is less than they say: one sentence a column, the
        column with most such cells first. Of new rows, which are the caller's own; never of
        training rows.
        """
        found: list[tuple[int, str]] = []
        for name, cells in rows.columns.items():
            if name in self.numbers:
                odd = [cell for cell in cells if cell and self._number(name, cell) is None]
                what, instead = "no number", "as an empty cell"
                if odd and name in self.commas and all(number_of(cell) is not None for cell in odd):
                    instead += ": write 3,14 in place of 3.14"
                elif odd and all(COMMA.fullmatch(cell) for cell in odd):
                    instead += ": write 3.14 in place of 3,14"
            else:
                known = set(self.categories[name])
                odd = [cell for cell in cells if cell and cell not in known]
                what, instead = "no category that the model knows", 'as "others"'
            if odd:
                such = odd[0] if len(odd[0]) <= SHOWN_LETTERS else f"{odd[0][:SHOWN_LETTERS]}..."
                told = (
                    f"column {name!r}: {how_many(len(odd), 'cell')} with {what}, such as "
                    f"{such!r}, read {instead}"
                )
                found.append((len(odd), told))
        return [told for _, told in sorted(found, key=lambda pair: -pair[0])]

    def _number(self, name: str, cell: str) -> float | None:
        return (self.commas[name].number_of if name in self.commas else number_of)(cell)

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "numbers": {k: list(v) for k, v in self.numbers.items()},
            "categories": dict(self.categories),
        }
        if self.commas:  # a model without such columns reads as it ever did
            told["commas"] = {name: way.grouped for name, way in self.commas.items()}
        return told

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Encoding:
        numbers = {
            name: (float(mean), float(deviation))
            for name, (mean, deviation) in record["numbers"].items()
        }
        categories = {name: tuple(known) for name, known in record["categories"].items()}
        commas = {name: Commas(grouped) for name, grouped in record.get("commas", {}).items()}
        return cls(numbers, categories, commas)


def _known_cell(cell: str) -> str:
    """A number as Python writes it; any other cell as texts are known by."""
    value = number_of(cell)
    return normalised(cell) if value is None else repr(value)


@dataclass(frozen=True)
class EncodedRows(InOrder):
    """Rows as the model reads them.

    Attributes:
        numbers: [n, 2 f] standardised values and marks of empty cells.
        codes: [n, c] categories.
        labels: [n].
    """

    numbers: NDArray[np.float32]
    codes: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: NDArray[np.int64]) -> EncodedRows:
        return EncodedRows(self.numbers[indices], self.codes[indices], self.labels[indices])

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """numbers [examples, 2 f], codes [examples, c], labels [examples]."""
        parts: dict[str, NDArray[Any]] = {
            "numbers": self.numbers,
            "codes": self.codes,
            "labels": self.labels,
        }
        return {name: torch.from_numpy(part[indices]).to(device) for name, part in parts.items()}
