"""The commands of this folder that ``app`` registers as they stand; each imports what it needs when
it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli import accounting
from quietgrad.training.settings.overrides import read_toml
from quietgrad.training.sources.early import require_keys

Text = Annotated[str, typer.Option("--text", metavar="COLUMN", help="Column of the text.")]
Label = Annotated[str, typer.Option("--label", metavar="COLUMN", help="Column of the label.")]
User = Annotated[
    str,
    typer.Option(
        "--user",
        metavar="COLUMN",
        help="Column that says whose a row is: people with several rows are protected whole.",
    ),
]


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
    """A privacy statement that a reviewer can sign.

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
    """Lists runs: task, steps, epsilon spent, score, when.

    Example: quietgrad runs
    """
    from quietgrad.cli.beside.runs import run_runs

    run_runs(folder, as_json)


def export(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a finished run.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Ends in .pt2, or in .onnx.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="torch-export, or onnx (with quietgrad\\[onnx]); default: as the file ends.",
        ),
    ] = None,
    as_json: accounting.AsJson = False,
) -> None:
    """Writes a run's model as one file that runs without this library.

    It takes any batch size and length, and holds the label names. Costs no privacy.

    Example: quietgrad export runs/first -o model.pt2
    """
    from quietgrad.cli.beside.export import run_export

    run_export(run_dir, form, output, as_json)


def check(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE_OR_CONFIG",
            help="Your records (.csv, .tsv, .jsonl, .json, .parquet, a folder of images), or a "
            "configuration that names them.",
        ),
    ],
    text: Text = "",
    label: Label = "",
    user: User = "",
    as_json: accounting.AsJson = False,
) -> None:
    """Shows the owner of a file what training would refuse in it.

    Every broken row with its line, class counts, rare labels, encoding. Its output is private.

    Example: quietgrad check people.csv
    """
    if source.suffix.lower() == ".toml":
        require_keys(read_toml(source))
    from quietgrad.cli.beside.check import run_check

    run_check(source, text, label, user, as_json)


def init(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Your records (.csv, .tsv, .jsonl, .json, .parquet), or a folder of images.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.toml", help="Where it is written.")
    ] = Path("config.toml"),
    text: Text = "",
    label: Label = "",
    user: User = "",
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out broken rows, and those that lack a label."),
    ] = False,
    as_json: accounting.AsJson = False,
) -> None:
    """Writes a commented configuration for a file of records.

    Read it first. Overwrites nothing.

    Example: quietgrad init people.csv -o people.toml
    """
    from quietgrad.cli.beside.init import run_init

    run_init(source, output, text, label, user, skip_bad, as_json)


def settings(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="Such as noise.bands, bands or noise; all without."),
    ] = None,
    as_json: accounting.AsJson = False,
) -> None:
    """What the keys of a configuration mean, and their defaults.

    Example: quietgrad settings noise.bands
    """
    from quietgrad.cli.settings import run_settings

    run_settings(key, as_json)
