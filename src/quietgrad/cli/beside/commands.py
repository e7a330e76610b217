"""The commands of this folder that ``app`` registers as they stand; each imports what it needs when
it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli import accounting


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, finished or not.")
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE.html", help="Write one page, with figures."),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option("--card", metavar="FILE.md", help="Write the model card with the statement."),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            "--audit",
            metavar="FILE.json",
            help="What `quietgrad audit --json` printed of this configuration.",
        ),
    ] = None,
    as_json: accounting.AsJson = False,
) -> None:
    """Says what a run reached and what it claims: a privacy statement that a reviewer can sign.

    Example: quietgrad report runs/first --html report.html
    """
    from quietgrad.cli.beside.report import run_report

    run_report(run_dir, html, card, audit, as_json)


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to look, three folders deep.")
    ] = Path("runs"),
    as_json: accounting.AsJson = False,
) -> None:
    """Lists runs: task, steps, epsilon spent by the ledger, score of public records, when."""
    from quietgrad.cli.beside.runs import run_runs

    run_runs(folder, as_json)
