"""Records that come after training: a file read without its labels, and what a model says of each
record.

They are the caller's own, so an error may name a column or a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from quietgrad.checks import nearest
from quietgrad.training.tasks.columns import FILE_OPTION, read_file

SEPARATOR = "|"  # between the labels of one record, where the run's data had no such sign
FEW_CLASSES = 10


@dataclass(frozen=True)
class Predictions:
    """What is known of each record now.

    Attributes:
        given: column -> [n] cells of the input.
        found: column -> [n] what the model says; None where a record could not be read.
        probabilities: label -> [n]; empty where there are none.
        unread: records that could not be read: empty texts, damaged images.
        notes: what of the input says less to the model than it says to a reader.
    """

    given: Mapping[str, Sequence[Any]]
    found: Mapping[str, Sequence[Any]]
    probabilities: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unread: int = 0
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(next(iter(self.found.values())))

    def columns(self, each: bool | None = None) -> dict[str, Sequence[Any]]:
        """The input's columns and then the model's; a name that the input has already gets the
        prefix ``predicted_``.

        Args:
            each: a column for every label's probability; None: for at most ``FEW_CLASSES`` labels.
        """
        if each is None:
            each = len(self.probabilities) <= FEW_CLASSES
        table = dict(self.given)
        added = dict(self.found)
        if each:
            added |= {f"probability_{name}": p for name, p in self.probabilities.items()}
        for name, cells in added.items():
            while name in table:
                name = f"predicted_{name}"
            table[name] = cells
        return table


def read_new(file: Path, wanted: Mapping[str, str]) -> dict[str, list[Any]]:
    """Columns of a file of new records.

    Args:
        file: CSV, TSV, JSONL, JSON or Parquet.
        wanted: column that has to be there -> what asks for it, such as ``data.text``.

    Raises:
        ValueError: no such file, no records, a column that is missing.
    """
    if file.is_dir():
        raise ValueError(f"FILE={str(file)!r} is a folder; this run reads a table of records")
    if file.is_file() and not file.stat().st_size:
        raise ValueError(f"FILE={str(file)!r} is empty; it needs one record or more")
    columns = read_file(file, FILE_OPTION)
    for column, option in wanted.items():
        if column not in columns:
            raise ValueError(
                f"FILE={str(file)!r} has no column {column!r}, which the run reads "
                f"({option}){nearest(column, columns)}"
            )
    if not any(columns.values()):
        raise ValueError(f"FILE={str(file)!r} holds no records; it needs one or more")
    return columns


def classified(
    given: Mapping[str, Sequence[Any]],
    labels: Sequence[str],
    logits: NDArray[np.float32],
    several: str | None = None,
    usable: NDArray[np.bool_] | None = None,
) -> Predictions:
    """Predictions of a classifier.

    Args:
        given: columns of the input.
        labels: names, in the order of the outputs.
        logits: [n, labels].
        several: where a record has any number of labels, what stands between them; None: it has
            one.
        usable: [n] whether a record could be read; None: all.
    """
    known = np.ones(len(logits), dtype=np.bool_) if usable is None else usable
    wide = logits.astype(np.float64)

    def cells(values: Sequence[Any]) -> list[Any]:
        return [value if use else None for value, use in zip(values, known, strict=True)]

    if several is None:
        each = softmax(wide, axis=1)
        best = wide.argmax(1)
        found = {
            "predicted": cells([labels[i] for i in best]),
            "probability": cells(each[np.arange(len(each)), best].tolist()),
        }
    else:
        each = expit(wide)
        has = [[name for name, p in zip(labels, row, strict=True) if p > 0.5] for row in each]
        found = {"predicted": cells([several.join(names) for names in has])}
    probabilities = {name: cells(each[:, i].tolist()) for i, name in enumerate(labels)}
    return Predictions(given, found, probabilities, int((~known).sum()))
