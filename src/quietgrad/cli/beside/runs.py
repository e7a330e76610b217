"""``quietgrad runs``: the runs below a folder, and what each has spent. It never imports torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quietgrad.accounting import epsilon_report
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.cli.output import console, one_line, print_json
from quietgrad.durable import whole_lines
from quietgrad.events import per_unit
from quietgrad.ledger import LEDGER_NAME, planned_course, read_ledger

COLUMNS = ("run", "task", "status", "steps", "epsilon", "delta", "score", "written")
ROOM = {"run": 15, "epsilon": 8}  # letters of these that are not folded: a date and time are 15
DEEPEST = 3  # folders below the one that is named
CONFIG, RESULT, METRICS, CHECKPOINT = "config.toml", "result.json", "metrics.jsonl", "checkpoint.pt"
FINISHED, UNFINISHED, DAMAGED = "finished", "unfinished", "ledger damaged"


@dataclass(frozen=True)
class Run:
    """What a run's directory says of it: public facts alone.

    Attributes:
        name: of the directory, below the folder that was asked for.
        task: "texts", "tables", "images", "answers".
        status: "finished", "unfinished" (stopped, or still running), or "ledger damaged".
        steps: made; of a private run, releases that its ledger counts.
        planned: steps in all; None where nothing says.
        private: whether it is a private run.
        epsilon, delta: spent so far, an upper bound; None where there is none.
        neighbouring: what epsilon is about, "add-remove-user" for one; "" where nothing says.
        data_declared_public: whether the records were declared to need no protection.
        started_from_runs: whether it began with weights of earlier runs, whose epsilons add.
        score: of the test records, or of validation records while it is unfinished.
        metric: what the score is.
        when: seconds since 1970 at which it was last written to.
    """

    name: str
    task: str
    status: str
    steps: int
    planned: int | None
    private: bool
    epsilon: float | None
    delta: float | None
    neighbouring: str
    data_declared_public: bool
    started_from_runs: bool
    score: float | None
    metric: str
    when: float


@one_line
def run_runs(folder: Path, as_json: bool) -> None:
    """See ``quietgrad runs --help``."""
    if not folder.is_dir():
        raise ValueError(f"DIR={str(folder)!r}: no such folder; runs go to runs/ unless "
                         "training.run_dir says otherwise")  # fmt: skip
    found, unread = runs_in(folder)
    if as_json:
        print_json({"runs": [asdict(run) for run in found], "unreadable": unread})
        return
    target = console(False)
    if not found:
        target.print(f"no runs in {folder}", markup=False)
    else:
        print_runs(target, found)
    if unread:  # what is left out has spent something too
        target.print(
            f"Cannot be read, and not in the list: {', '.join(unread)}",
            markup=False,
            soft_wrap=True,
        )
    if any(run.status == UNFINISHED for run in found):
        target.print(
            "Go on with one: quietgrad train --resume --set training.run_dir=RUN", markup=False
        )


def runs_in(folder: Path) -> tuple[list[Run], list[str]]:
    """Runs below a folder, by when they were written to, and what of it may not be read."""
    found: list[Run] = []
    unread: list[str] = []
    for path in run_folders(folder, unread):
        try:
            found.append(run_of(path, folder))
        except OSError:
            unread.append(str(path))
    return sorted(found, key=lambda run: run.when), sorted(unread)


def print_runs(target: Console, found: Sequence[Run]) -> None:
    """A table of runs. Where it is too wide, when they were written to goes, then what they learn;
    names keep their room.
    """
    rows = [tuple(_cells(run)) for run in found]
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    least = {name: min(width, ROOM.get(name, width)) for name, width in widths.items()}
    for name, room in (("written", widths), ("task", least)):
        if sum(room[kept] + 3 for kept in columns) > target.width:
            del columns[name]
    table = Table(pad_edge=False)
    for name in columns:
        table.add_column(
            name,
            style="bold" if name == "run" else None,
            justify="right" if name in ("steps", "epsilon", "delta", "score") else "left",
            no_wrap=name not in ROOM,
            overflow="fold",
            min_width=least[name],
        )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    target.print(table)


def run_folders(folder: Path, unread: list[str]) -> Iterator[Path]:
    """Directories of runs in a folder and below it; the folder itself if it is one. What cannot be
    looked into goes to ``unread``.
    """
    start = len(folder.parts)

    def note(error: OSError) -> None:
        unread.append(str(error.filename))

    for place, below, files in os.walk(folder, onerror=note):
        path = Path(place)
        if CONFIG in files and {LEDGER_NAME, RESULT, CHECKPOINT} & set(files):
            below.clear()
            yield path
        elif len(path.parts) - start >= DEEPEST:
            below.clear()
        else:
            below.sort()


def run_of(path: Path, folder: Path) -> Run:
    """What a run's directory says."""
    settings = _settings(path / CONFIG)
    result = _json(path / RESULT)
    ledger = path / LEDGER_NAME
    private = ledger.exists() or bool(result.get("private"))
    if ledger.exists():
        ledger.open("rb").close()  # one that may not be read is not damaged
    status = FINISHED if result else UNFINISHED
    steps, planned = int(result.get("steps") or 0), result.get("planned_steps")
    spent, delta, said = result.get("epsilon"), result.get("delta"), result
    begins = bool(result.get("started_from"))
    if private and "selection" not in result:  # the best of several runs keeps no ledger
        try:
            contents = read_ledger(path)
            said = contents.header or result
            begins = begins or bool(contents.started_from)
            made, delta = contents.releases, contents.header.get("delta", delta)
            if contents.header:
                planned = planned_course(contents)[0].steps
            if contents.not_private is not None:
                spent = None
            elif contents.event is None:
                spent = 0.0
            elif delta is None:
                spent = None
            elif made != steps or spent is None:
                spent = epsilon_report(contents.event, delta).epsilon
            steps = made
        except (ValueError, TypeError):
            status, spent = DAMAGED, None
    metric, score = _score(path, result)
    if not private and not result:
        steps = _last_step(path)
    return Run(
        path.relative_to(folder).as_posix() if path != folder else path.name or str(path),
        _task(settings),
        status,
        steps,
        planned or settings.get("training.steps"),
        private,
        spent if private else None,
        delta if private else None,
        str(said.get("neighbouring", "")) if private else "",
        bool(said.get("data_declared_public")),
        begins,
        score,
        metric,
        max(p.stat().st_mtime for p in path.iterdir() if p.is_file()),
    )


def _cells(run: Run) -> Iterator[str]:
    yield run.name
    yield run.task
    yield run.status
    yield f"{run.steps}/{run.planned}" if run.planned else str(run.steps)
    if not run.private:
        yield "no privacy"
    else:
        of = per_unit(run.neighbouring) + (" (data public)" if run.data_declared_public else "")
        more = " + that of its start" if run.started_from_runs else ""
        yield "unknown" if run.epsilon is None else round_up(run.epsilon, 4) + of + more
    yield "" if run.delta is None else round_up_to(run.delta, 3)
    public = " val." if run.metric.startswith("validation") else ""
    yield "" if run.score is None else f"{run.score:.3f}{public}"
    yield time.strftime("%m-%d %H:%M", time.localtime(run.when))


def _score(path: Path, result: dict[str, Any]) -> tuple[str, float | None]:
    """Of test records at the end, of validation records before it."""
    metric = str(result.get("metric", "accuracy"))
    final = result.get("metrics", {}).get(metric)
    if isinstance(final, int | float):
        return metric.replace("_", " "), float(final)
    last: dict[str, Any] = next(iter(reversed(whole_lines(path / METRICS))), {})
    key = next((k for k in last if k.startswith("validation_") and k != "validation_records"), "")
    return key.replace("_", " "), float(last[key]) if key else None


def _last_step(path: Path) -> int:
    return max((int(line.get("step", 0)) for line in whole_lines(path / METRICS)), default=0)


def _task(settings: dict[str, Any]) -> str:
    if settings.get("task.kind") == "generate":
        return "answers"
    name, source = str(settings.get("model.name", "")), str(settings.get("data.source", ""))
    if name.startswith("table:"):
        return "tables"
    pictures = ("image:", "torchvision:", "cnn:", "vgg:", "features:")
    return "images" if name.startswith(pictures) or "mnist" in source else "texts"


def _settings(path: Path) -> dict[str, Any]:
    """Keys of a run's own config.toml, whose values are written as JSON has them."""
    found: dict[str, Any] = {}
    table = ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("["):
            table = line.strip().strip("[]")
        elif " = " in line:
            key, _, value = line.partition(" = ")
            try:
                found[f"{table}.{key}"] = json.loads(value)
            except ValueError:
                continue  # an inline table; none of them is asked for
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
