"""Tables for people on standard error or output, one JSON object for programs
on standard output.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from rich.console import Console
from rich.table import Table

from quietgrad import __version__
from quietgrad.checks import SettingsWarning
from quietgrad.durable import require_open_folder
from quietgrad.report.png import require_figure_place

P = ParamSpec("P")
R = TypeVar("R")
# Command -> what an interruption leaves; the others leave nothing.
LEFT = {
    "train": "; what a private run released until then is in its ledger",
    "compare": "; runs that ended are kept, and the same command goes on",
}
CLASS_ROWS = 30
MATRIX_COLUMNS = 8
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


def console(as_json: bool) -> Console:
    """Where tables and progress go: standard error if standard output is for JSON."""
    return Console(stderr=as_json, highlight=False)


def print_json(record: dict[str, Any]) -> None:
    """One JSON object; infinite numbers, which JSON lacks, become null (the record's ``reason``
    says why).
    """
    json.dump(_finite(record), sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(target: Console, title: str, rows: Mapping[str, str]) -> None:
    """A two-column table of facts."""
    table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    target.print(table)


def print_classes(target: Console, result: Mapping[str, Any]) -> None:
    """Scores of each class of the test records, and where there are few the confusion matrix.

    Args:
        target: where to.
        result: of a run, with ``class_scores``.
    """
    scores = result["class_scores"]["test"]
    scored, of = result["scored_records"]["test"], result["records"]["test"]
    fewer = f" ({scored} of {of}: equal texts count once)" if scored < of else ""
    classes = scores["classes"]
    matrix = scores.get("confusion") if len(classes) <= MATRIX_COLUMNS else None
    table = Table(title=f"Classes of the test records{fewer}", title_justify="left", pad_edge=False)
    table.add_column("class", style="bold", overflow="fold")
    for name in ("records", "precision", "recall", "F1"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for name in classes if matrix else ():
        table.add_column(f"said {name}".replace("[", r"\["), justify="right", overflow="fold")
    for i, (name, found) in enumerate(list(classes.items())[:CLASS_ROWS]):
        shares = (f"{found[key]:.3f}" for key in ("precision", "recall", "f1"))
        counts = map(str, matrix[i]) if matrix else ()
        table.add_row(name.replace("[", r"\["), str(found["records"]), *shares, *counts)
    target.print(table)
    if len(classes) > CLASS_ROWS:
        target.print(f"{CLASS_ROWS} of {len(classes)} classes; all of them are in result.json.")


def announce(command: str, as_json: bool) -> None:
    """The first line, before anything large is loaded; none for programs, nor from the second of
    several processes on.
    """
    if not as_json and os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"quietgrad {__version__}: {command}\n")
        sys.stdout.flush()


def hush_libraries() -> None:
    """Before other libraries are loaded: without their progress bars and notes, by their own
    switches; what the environment says already stays.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def quiet_libraries(target: Console) -> Iterator[None]:
    """Warnings of other libraries are not for the user; those about settings are a line each."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        target.print(f"[yellow]warning:[/yellow] {_escaped(str(message))}", soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", SettingsWarning)
        warnings.showwarning = show
        yield


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and the exit code."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(code)


def require_place(figure: Path) -> None:
    """Before any work: that a figure can be written.

    Raises:
        ValueError: where a picture of somebody else's is there.
    """
    if figure.suffix.lower() != ".png":
        fail(f"--figure={str(figure)!r} must end in .png: the figure is a PNG file", 2)
    if not figure.absolute().parent.is_dir():
        fail(
            f"--figure={str(figure)!r}: no such folder; make it, or name a file in one that is "
            "there",
            2,
        )
    require_open_folder("--figure", figure)
    require_figure_place(figure, "--figure")


def one_line(command: Callable[P, R]) -> Callable[P, R]:
    """Makes an interruption, or an error of the system (a full disk, a file that went away), one
    line that says what it was, before the command-line library makes "Aborted." of it.
    """
    left = LEFT.get(command.__name__.removeprefix("run_"), "")

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            fail(f"interrupted{left}", code=130)
        except BrokenPipeError as error:
            if left:  # what goes on behind the output has ended with it
                fail(f"{type(error).__name__}: {error}{left}", code=1)
            # `| head` has read enough; nothing is flushed to it on the way out.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except (OSError, EOFError) as error:
            fail(f"{type(error).__name__}: {error}", code=1)

    return run


def paragraphs(text: str) -> str:
    """One line a paragraph: the list of commands breaks lines itself, beside those of the text."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
