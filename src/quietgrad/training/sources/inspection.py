"""What the owner of a file sees of it before training: every row that cannot be read, with its
line, and how often each label occurs.

All of it may be private; ``quietgrad check`` says so, and nothing else calls this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quietgrad.checks import how_many
from quietgrad.training.sources.guess import (
    MOST_FRACTIONS,
    Column,
    counted,
    describe,
    fractional,
    measured,
    names_are_a_record,
)
from quietgrad.training.sources.rows import (
    FILES,
    NO_NAMES,
    NOT_UTF8,
    SEPARATORS,
    BadRow,
    Rows,
    UnreadableFile,
    read_rows,
)

RARE = 5  # records of a label among those that validate and test, on average
LOST = "no {0}: column {1!r} is empty"
UNOWNED = "no owner: column {0!r} says {1!r}, as tools write for an empty cell"


@dataclass(frozen=True)
class Inspection:
    """Of one file.

    Attributes:
        path: of the file.
        records: rows that can be read.
        broken: rows that cannot, which training refuses.
        gaps: rows without a text, answer or label, which validation refuses.
        columns: what is in each.
        label: the column they are in.
        labels: label -> records.
        rare: labels with few records.
        notes: what else their owner should know.
        unfit: why the labels cannot be classes, or the owners no people; "" where they can.
        ownerless: rows that are nobody's, where a column of owners is named.
        users: how many people the other rows are of; 0 where no such column is named.
        encoding, separator: of the file.
        failure: why the file as a whole cannot be read; "" where it can.
    """

    path: str
    records: int = 0
    broken: list[BadRow] = field(default_factory=list)
    gaps: list[BadRow] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    label: str = ""
    labels: dict[str, int] = field(default_factory=dict)
    rare: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfit: str = ""
    ownerless: list[BadRow] = field(default_factory=list)
    users: int = 0
    encoding: str = ""
    separator: str = ""
    failure: str = ""

    @property
    def refused(self) -> bool:
        """Whether training would refuse the file as it is."""
        return bool(self.failure or self.broken or self.gaps or self.ownerless or self.unfit)


def read_for_owner(path: Path) -> tuple[Inspection, Rows | None]:
    """The file's rows, and what there is to say of it before columns are chosen.

    Raises:
        ValueError: for a file that is not there, or of no known kind.
    """
    if not path.is_file():
        raise ValueError(f"FILE={str(path)!r}: no such file")
    if path.suffix.lower() not in FILES:
        raise ValueError(
            f"FILE={str(path)!r} cannot be read; use a {', '.join(FILES[:-1])} or {FILES[-1]} "
            "file, or a folder of images"
        )
    try:
        rows = read_rows(path)
    except UnreadableFile as error:
        where = f" ({error.place})" if error.place else ""
        return Inspection(str(path), failure=f"it {error}{where}"), None
    other = sum(row.reason == NOT_UTF8 for row in rows.bad)
    encoding = (
        "UTF-8" if not other else f"not UTF-8 in {how_many(other, 'row')} (save the file as UTF-8)"
    )
    mark = " with a byte order mark" if rows.marked else ""
    found = Inspection(
        str(path),
        len(rows.lines),
        rows.bad,
        columns=describe(rows),
        encoding="" if path.suffix.lower() == ".parquet" else encoding + mark,
        separator=SEPARATORS.get(rows.separator, ""),
    )
    return found, rows


def with_labels(
    found: Inspection,
    rows: Rows,
    texts: Sequence[str],
    labels: Sequence[str],
    classes: bool,
    held_out: float,
) -> Inspection:
    """The same with what the chosen columns hold.

    Args:
        found, rows: from ``read_for_owner``.
        texts: columns that have to be filled beside the label.
        labels: columns of the label, or of the answer.
        classes: whether labels are classes.
        held_out: share of the records that validate and test.
    """
    gaps = []
    for i, line in enumerate(rows.lines):
        lacking = [(name, "text") for name in texts if not _filled(rows.columns[name][i], True)]
        what = "label" if classes else "answer"
        lacking += [(name, what) for name in labels if not _filled(rows.columns[name][i], False)]
        if lacking:
            reason = "; ".join(LOST.format(what, name) for name, what in lacking)
            gaps.append(BadRow(line, line, reason))
    if not classes:
        return replace(found, gaps=gaps)
    label = labels[0]
    counts = counted(rows.columns[label])
    counts.pop("", None)
    known = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    rare = [word for word, count in known.items() if count * held_out < RARE]
    notes = []
    unfit = _no_classes(label, known, found.records)
    if any(isinstance(cell, list | dict) for cell in rows.columns[label]):
        unfit = f"labels in column {label!r} are lists or objects: write one word or number each"
    if Path(found.path).suffix.lower() in (".csv", ".tsv"):
        unfit = NO_NAMES if names_are_a_record(rows.columns, label) else unfit
    folded: dict[str, list[str]] = {}
    for word in known:
        folded.setdefault(word.casefold(), []).append(word)
    for words in folded.values():
        if len(words) > 1:
            notes.append(f"labels that differ in case alone: {', '.join(map(repr, words))}")
    notes = [*found.notes, *([unfit] if unfit else []), *notes]
    told = replace(found, gaps=gaps, label=label, labels=known, rare=rare)
    return replace(told, notes=notes, unfit=unfit)


def with_owners(found: Inspection, rows: Rows, user: str) -> Inspection:
    """The same with whose the rows are.

    Args:
        found, rows: from ``read_for_owner``.
        user: column of the owners.
    """
    # Beside numpy, which nothing else of a look at a file needs.
    from quietgrad.sampling.identities import identities_of, is_missing

    cells = rows.columns[user]
    ownerless = [
        BadRow(
            line, line, UNOWNED.format(user, cell) if _says(cell) else LOST.format("owner", user)
        )
        for line, cell in zip(rows.lines, cells, strict=True)
        if is_missing(cell)
    ]
    try:
        owners = identities_of([cell for cell in cells if not is_missing(cell)], f"column {user!r}")
    except TypeError as error:
        notes, unfit = [*found.notes, str(error)], found.unfit or str(error)
        return replace(found, ownerless=ownerless, notes=notes, unfit=unfit)
    return replace(found, ownerless=ownerless, users=len(set(owners)))


def _says(cell: Any) -> bool:
    """Whether there is something to be seen in a cell."""
    return isinstance(cell, str) and bool(cell.strip())


def _no_classes(label: str, known: Mapping[str, int], records: int) -> str:
    """Why labels (and how often each is there) are no classes to learn; "" where they are."""
    words = list(known)
    if len(words) == 1:
        return f"every record has the label {words[0]!r}: nothing can be learnt"
    each = (
        "each different number would be a class of its own; make classes of them (low, high), or "
        "learn them in a loop of your own (docs/loops.md)"
    )
    if len(words) > MOST_FRACTIONS and fractional(words):
        return f"the labels in column {label!r} are numbers with fractions: {each}"
    if measured(words):
        return f"the labels in column {label!r} are {len(words)} different numbers: {each}"
    if len(words) > max(20, records // 4):
        return (
            f"column {label!r} has {len(words)} different labels in {records} records: names or "
            "numbers, not classes"
        )
    return ""


def _filled(cell: Any, text: bool) -> bool:
    if isinstance(cell, str):
        return bool(cell.strip())
    return not text and cell is not None and cell == cell
