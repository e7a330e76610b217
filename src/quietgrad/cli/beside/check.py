"""``quietgrad check``: the owner of a file looks at it. All of its output is private."""

from __future__ import annotations

import dataclasses
import shlex
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from quietgrad.checks import how_many
from quietgrad.cli.output import console, one_line, print_json, print_table
from quietgrad.training.sources.guess import guess
from quietgrad.training.sources.inspection import (
    RARE,
    Inspection,
    read_for_owner,
    with_labels,
    with_owners,
)
from quietgrad.training.sources.pictures import (
    FolderInspection,
    inspect_folder,
    is_picture_folder,
)
from quietgrad.training.sources.rows import BadRow

if TYPE_CHECKING:
    from quietgrad.training.settings.config import TrainConfig

PRIVATE = (
    "This output is private: it shows rows, labels and counts of your own records. Do not put it "
    "into logs, reports or tickets."
)
SHOWN_LABELS = 5
ALONE = 20  # rows that are broken in the same way have a line of output each; more share one
HELD_OUT = 0.2  # share that validates and tests, where no configuration says


@one_line
def run_check(path: Path, text: str, label: str, user: str, as_json: bool) -> None:
    """See ``quietgrad check --help``."""
    target = console(as_json)
    if user and (path.suffix.lower() == ".toml" or path.is_dir()):
        raise ValueError(
            f"--user={user!r} is for a file of records; a configuration says data.user, and images "
            "have no owners: leave --user out"
        )
    if path.suffix.lower() == ".toml":
        found = _of_config(path)
    elif path.is_dir():
        if not is_picture_folder(path):
            raise ValueError(
                f"FILE={str(path)!r} is a folder without train/ or train.csv; name a file, or a "
                "folder of images"
            )
        found = [inspect_folder(path)]
    else:
        found = [_of_file(path, text, label, user)]
    if as_json:
        files = [dataclasses.asdict(one) | {"refused": one.refused} for one in found]
        print_json({"private": PRIVATE, "files": files})
    else:
        target.print(f"[bold]{PRIVATE}[/bold]\n", soft_wrap=True)
        for one in found:
            if isinstance(one, FolderInspection):
                _print_folder(target, one)
            else:
                _print_file(target, one)
    if any(one.refused for one in found):
        sys.exit(1)


def _of_file(path: Path, text: str, label: str, user: str) -> Inspection:
    found, rows = read_for_owner(path)
    if rows is None or not found.records:  # of nothing that can be read, nothing is guessed
        return found
    try:
        guessed = guess(found.columns, text, label, str(path), user)
    except ValueError as error:
        if text or label or user:
            raise
        return dataclasses.replace(found, notes=[str(error)])
    texts = [n for n in (guessed.text, guessed.pair) if n and guessed.task == "text"]
    classes = guessed.task != "answers"
    found = with_labels(found, rows, texts, [guessed.label], classes, HELD_OUT)
    return with_owners(found, rows, user) if user else found


def _of_config(path: Path) -> list[Inspection | FolderInspection]:
    """The sources of a configuration, with its columns."""
    from quietgrad.training.settings.config import load_config

    config = load_config(path, ())
    sources = [s for s in (config.data.source, config.data.test_source) if s]
    found: list[Inspection | FolderInspection] = []
    for source in sources:
        place = Path(source)
        if place.is_dir() and is_picture_folder(place):
            named = (config.data.text, config.data.label)
            columns = ("file", "label") if named == ("text", "label") else named
            one_label = not (config.data.labels or config.data.label_separator)
            found.append(inspect_folder(place, *columns, one_label=one_label))
        elif place.suffix.lower() or place.exists():
            found.append(_with_columns_of(config, place))
    if not found:
        raise ValueError(
            f"data.source={config.data.source!r} is no file and no folder of images; there is "
            "nothing to check"
        )
    return found


def _with_columns_of(config: TrainConfig, path: Path) -> Inspection:
    found, rows = read_for_owner(path)
    if rows is None:
        return found
    data, classes, texts = config.data, config.task.kind == "classify", []
    labels = [data.label]
    if not classes:
        labels = [f for _, f, _, _ in string.Formatter().parse(config.task.answer) if f]
    elif not config.model.name.startswith("table:"):
        texts = [name for name in (data.text, data.text_pair) if name]
    wanted = [*texts, *labels, *([data.user] if data.user else [])]
    absent = [name for name in wanted if name not in rows.columns]
    if absent or not labels:
        named = f"has no column {absent[0]!r}" if absent else "has no column of answers"
        columns = ", ".join(rows.columns)
        task = not classes and (not absent or absent[0] in labels)
        note = f"{named}, which {'task.answer' if task else 'the configuration'} names; "
        return dataclasses.replace(found, notes=[f"{note}its columns are {columns}"])
    held_out = data.validation_fraction + (0 if data.test_source else data.test_fraction)
    found = with_labels(found, rows, texts, labels, classes, held_out)
    return with_owners(found, rows, data.user) if data.user else found


def _print_file(target: Console, found: Inspection) -> None:
    facts = {
        "rows that can be read": str(found.records),
        "rows that cannot": str(len(found.broken)),
    }
    if found.users:
        facts["users whose they are"] = str(found.users)
    if found.encoding:
        facts["encoding"] = found.encoding
    if found.separator:
        facts["separator"] = found.separator
    if found.failure:
        facts = {"cannot be read": found.failure}
    print_table(target, _plain(found.path), {k: _plain(v) for k, v in facts.items()})
    if found.columns:
        _print_columns(target, found)
    if found.labels:
        title = f"labels: column {_plain(found.label)}"
        _print_labels(target, title, found.labels, found.rare)
    _print_rows(target, "", "that cannot be read", found.broken)
    _print_rows(target, "", "without something", found.gaps)
    _print_rows(target, "", "without an owner", found.ownerless)
    _print_notes(target, found.notes)
    if found.broken and not found.records:
        target.print(
            "No row can be read: mend the file; data.skip_bad = true would leave nothing.",
            soft_wrap=True,
        )
    elif found.broken or found.gaps:
        if (found.encoding or "").startswith("not UTF-8"):
            target.print(
                "If the whole file has its letters as Windows once wrote them, "
                f"`iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(found.path)} > NEW_FILE` makes it "
                "UTF-8.",
                markup=False,
                soft_wrap=True,
            )
        target.print(
            "Mend these rows, or set data.skip_bad = true, which leaves out every such row.",
            soft_wrap=True,
        )
    elif not (found.failure or found.ownerless):
        target.print("Every row can be read.")
    if found.ownerless:
        target.print(
            "Fill in whose rows those without an owner are, or take them out yourself: "
            "data.skip_bad leaves out none of them.",
            soft_wrap=True,
        )


def _print_columns(target: Console, found: Inspection) -> None:
    table = Table(title="columns", title_justify="left", pad_edge=False)
    table.add_column("name", style="bold", overflow="fold")
    for name in ("looks like", "filled", "different", "words a cell"):
        table.add_column(name, justify="right")
    for column in found.columns.values():
        words = f"{column.words:.1f}"
        counts = (str(column.filled), str(column.distinct), words)
        table.add_row(_plain(column.name), column.told, *counts)
    target.print(table)


def _print_labels(target: Console, title: str, labels: dict[str, int], rare: Sequence[str]) -> None:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("label", style="bold", overflow="fold")
    table.add_column("records", justify="right")
    table.add_column("")
    for word, count in labels.items():
        few = f"rare: on average fewer than {RARE} validate and test" if word in rare else ""
        table.add_row(_plain(word), str(count), few)
    target.print(table)


def _print_rows(target: Console, of: str, which: str, rows: Sequence[BadRow]) -> None:
    if rows:
        target.print(f"{how_many(len(rows), 'row')}{of} {which}:")
    alike: dict[str, list[BadRow]] = {}
    for row in rows:
        alike.setdefault(row.reason, []).append(row)
    for row in rows:
        same = alike[row.reason]
        if len(same) <= ALONE:
            lines = _lines([row])
        elif row is same[0]:
            lines = _lines(same)
        else:
            continue
        target.print(f"  {lines}: {_plain(row.reason)}", soft_wrap=True)


def _lines(rows: Sequence[BadRow]) -> str:
    """Where rows are, neighbours together: "lines 2 to 5, 9"."""
    spans: list[tuple[int, int]] = []
    for row in rows:
        if spans and row.first == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], row.last)
        else:
            spans.append((row.first, row.last))
    several = len(spans) > 1 or spans[0][0] < spans[0][1]
    told = (f"{first} to {last}" if first < last else str(first) for first, last in spans)
    return f"line{'s' if several else ''} {', '.join(told)}"


def _print_notes(target: Console, notes: Sequence[str]) -> None:
    for note in notes:
        target.print(f"[yellow]note:[/yellow] {_plain(note)}", soft_wrap=True)


def _print_folder(target: Console, found: FolderInspection) -> None:
    counts: dict[str, Any] = {
        part: f"{how_many(sum(labels.values()), 'image')}, {how_many(len(labels), 'label')}"
        for part, labels in found.labels.items()
    }
    print_table(target, _plain(found.path), counts)
    for part, labels in found.labels.items():
        _print_labels(target, f"{part}: labels", labels, ())
    for part, rows in found.broken.items():
        _print_rows(target, f" of {part}.csv", "that cannot be read", rows)
    if found.damaged:
        target.print(f"{how_many(len(found.damaged), 'image')} that cannot be opened:")
    for name in found.damaged:
        target.print(f"  {_plain(name)}", soft_wrap=True)
    _print_notes(target, found.notes)
    if found.unlearnt:
        few = ", ".join(map(repr, found.unlearnt[:SHOWN_LABELS]))
        more = len(found.unlearnt) - SHOWN_LABELS
        rest = f" and {more} more" if more > 0 else ""
        note = (
            f"no test image has the label {few}{rest}: training images with it contribute nothing"
        )
        _print_notes(target, [note])
    if not found.refused:
        target.print("Every image can be opened.")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
