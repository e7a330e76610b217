"""``quietgrad predict``."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from quietgrad.checks import how_many
from quietgrad.cli.output import console, fail, one_line, print_json
from quietgrad.cli.progress.stages import stages
from quietgrad.durable import replacing, require_open_folder
from quietgrad.training.files.named import require_folder_of_a_run

if TYPE_CHECKING:
    from quietgrad.training.tasks.predictions import Predictions

SHOWN_ROWS = 10
SHOWN_LETTERS = 60
SHOWN_NOTES = 5
LEAST_LETTERS = 14  # of a column that is shown


@one_line
def run_predict(
    run_dir: Path, file: Path, output: Path | None, each: bool | None, as_json: bool
) -> None:
    """See ``quietgrad predict --help``."""
    if output is not None:
        _require_writable(output, file)
    if not file.exists():
        fail(f"FILE={str(file)!r}: no such file or folder", 2)
    require_folder_of_a_run(run_dir)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    target = console(as_json)
    with stages(target) as say:
        say(f"reading {file} with the model of {run_dir}")
        from quietgrad.training.prediction import predict

        with warnings.catch_warnings():  # those of libraries are not for the user
            warnings.simplefilter("ignore")
            found = predict(run_dir, file)
    columns = found.columns(each)
    if output is not None:
        write_csv(output, columns)
    if as_json:
        print_json(_record(found, columns, output))
        return
    if output is None:
        _print_rows(target, found.columns(bool(each)), len(found.given))
        target.print(
            f"{min(SHOWN_ROWS, len(found))} of {how_many(len(found), 'record')}; all of them, with "
            f"every column: quietgrad predict {run_dir} {file} --output predictions.csv",
            soft_wrap=True,
            markup=False,
        )
    else:
        target.print(
            f"{how_many(len(found), 'record')} written to {output}", soft_wrap=True, markup=False
        )
    for note in found.notes[:SHOWN_NOTES]:
        target.print(f"[yellow]note:[/yellow] {_escaped(note)}", soft_wrap=True)
    if (more := len(found.notes) - SHOWN_NOTES) > 0:
        target.print(
            f"[yellow]note:[/yellow] and {how_many(more, 'column')} more with such cells; --json "
            "lists them all",
            soft_wrap=True,
        )
    if found.unread:
        target.print(
            f"Without a label: {found.unread} that could not be read (an empty text, a damaged "
            "image)."
        )


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes a table whole or not at all (a part of it would look like one of fewer records); an
    empty cell is nothing.
    """
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        text.detach()  # flushed; the file is closed where it was opened


def _require_writable(output: Path, file: Path) -> None:
    """Before any work: that the predictions can be written."""
    if output.suffix.lower() != ".csv":
        fail(f"--output={str(output)!r} must end in .csv", 2)
    if not output.absolute().parent.is_dir():
        fail(f"--output={str(output)!r}: no such folder; make it, or name a file in another", 2)
    require_open_folder("--output", output)
    if output.exists() and file.exists() and output.samefile(file):
        fail(f"--output={str(output)!r} is FILE itself; name another file", 2)
    if output.exists():  # it may be records, or predictions that somebody has worked on
        fail(f"--output={str(output)!r} is there already; name another file, or remove it", 2)


def _record(
    found: Predictions, columns: Mapping[str, Sequence[Any]], output: Path | None
) -> dict[str, Any]:
    record: dict[str, Any] = {"records": len(found), "unread": found.unread}
    record["notes"] = list(found.notes)
    if output is not None:
        return record | {"output": str(output), "columns": list(columns)}
    rows = zip(*columns.values(), strict=True)
    return record | {
        "predictions": [dict(zip(columns, map(_plain, row), strict=True)) for row in rows]
    }


def _plain(cell: Any) -> Any:
    """A cell as JSON can hold it."""
    cell = cell.item() if hasattr(cell, "item") else cell
    return cell if cell is None or isinstance(cell, str | int | float | bool) else str(cell)


def _print_rows(target: Console, columns: Mapping[str, Sequence[Any]], given: int) -> None:
    """The first rows: of the ``given`` columns of the input those that find room, from the first
    on, and all of the model's.
    """
    shown = {
        name: [_short(name), *map(_short, cells[:SHOWN_ROWS])] for name, cells in columns.items()
    }
    room = {name: min(max(map(len, cells)), LEAST_LETTERS) + 3 for name, cells in shown.items()}
    left = target.width - 1 - sum(list(room.values())[given:])
    for i, name in enumerate(list(columns)[:given]):
        left -= room[name]
        if left < 0 and i:  # one of them says which record it is
            del shown[name]
    table = Table(pad_edge=False)
    for name, *_ in shown.values():
        table.add_column(name, overflow="ellipsis")
    for row in list(zip(*shown.values(), strict=True))[1:]:
        table.add_row(*row)
    target.print(table)
    if absent := len(columns) - len(shown):
        target.print(f"{absent} of the {given} columns of FILE found no room here.")


def _short(cell: Any) -> str:
    text = f"{cell:.3f}" if isinstance(cell, float) else "" if cell is None else str(cell)
    text = " ".join(text.split())
    cut = text if len(text) <= SHOWN_LETTERS else text[: SHOWN_LETTERS - 3] + "..."
    return _escaped(cut)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
