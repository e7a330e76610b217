"""The commands and their options; each imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad import __version__
from quietgrad.cli import accounting
from quietgrad.cli.beside.commands import check, export, init, report, runs, settings
from quietgrad.cli.beside.planning import (
    ConfigPath,
    ExtendEpochs,
    ExtendSteps,
    ExtendTo,
    Overrides,
    plan,
)
from quietgrad.cli.output import announce, hush_libraries, one_line, paragraphs
from quietgrad.training.settings.overrides import OF_COMPARISONS
from quietgrad.training.sources.early import look_early

app = typer.Typer(
    help="Differentially private training in PyTorch, with every epsilon an upper bound.\n\n"
    "Example: quietgrad init people.csv && quietgrad train config.toml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Processes = Annotated[
    int,
    typer.Option(
        "--nproc", metavar="N", help="Processes on this machine, one GPU each where there are some."
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quietgrad {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Differentially private training in PyTorch, with every epsilon an upper bound."""
    hush_libraries()


@one_line
def train(
    config: ConfigPath = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in training.run_dir.")
    ] = False,
    extend_steps: ExtendSteps = None,
    extend_epochs: ExtendEpochs = None,
    extend_to: ExtendTo = None,
    processes: Processes = 1,
    as_json: accounting.AsJson = False,
) -> None:
    """Trains privately: texts, tables, images, or answers.

    Without CONFIG, a classifier on MiniLM and 38 thousand tweets.

    Example: quietgrad train people.toml --set target_epsilon=3
    """
    announce("train", as_json)
    look_early(config, overrides or [])
    from quietgrad.cli.training import run_train

    extend = extend_steps, extend_epochs, extend_to
    run_train(config, overrides or [], resume, as_json, extend, processes)


@one_line
def predict(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a finished run.")
    ],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="New records of the run's kind (.csv, .tsv, .jsonl, .json, .parquet), or a folder "
            "of images; no labels are needed.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE.csv",
            help="Write all records with predictions; without it ten are shown.",
        ),
    ] = None,
    each: Annotated[
        bool | None,
        typer.Option(
            "--probabilities/--no-probabilities",
            help="A column for every label's probability (without it: for at most 10 labels).",
        ),
    ] = None,
    as_json: accounting.AsJson = False,
) -> None:
    """Labels or answers for new records; costs no privacy.

    Example: quietgrad predict runs/first new.csv --output predictions.csv
    """
    if (run_dir / "config.toml").is_file():
        look_early(run_dir / "config.toml", data=False)
    from quietgrad.cli.predict import run_predict

    run_predict(run_dir, file, output, each, as_json)


@one_line
def spectrum(
    config: ConfigPath = None, overrides: Overrides = None, as_json: accounting.AsJson = False
) -> None:
    """From public images, the curvature that shapes noise.

    Pretrains on them, and writes the initial weights too.

    Example: quietgrad spectrum recipes/noisecurve.toml
    """
    announce("spectrum", as_json)
    look_early(config, overrides or [], ignored=OF_COMPARISONS)
    from quietgrad.cli.spectrum import run_spectrum

    run_spectrum(config, overrides or [], as_json)


@one_line
def compare(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG.toml", help="A comparison, such as recipes/denoising.toml."),
    ],
    only_report: Annotated[
        bool,
        typer.Option("--report", help="Table and figure of the runs that are there; run nothing."),
    ] = False,
    shard: Annotated[
        str,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Make every N-th run from the I-th: for several processes.",
        ),
    ] = "0/1",
    accounted: Annotated[
        bool,
        typer.Option(
            "--accounted",
            help="For private records: a random number of runs, of which the best alone is "
            "released, all within the one epsilon.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE.html", help="Write tables and figure as one page."),
    ] = None,
    as_json: accounting.AsJson = False,
) -> None:
    """Trains variants side by side: a table and a figure.

    Each is tuned by a grid of rates, or with \\[search] by Optuna. Stops and resumes anywhere.

    Example: quietgrad compare recipes/denoising.toml --html comparison.html
    """
    announce("compare", as_json or only_report)
    from quietgrad.comparing.early import require_comparison

    require_comparison(config, accounted)
    look_early(config, keys=False)
    from quietgrad.cli.compare import run_accounted, run_compare

    if accounted:
        run_accounted(config, only_report, shard, html, as_json)
    else:
        run_compare(config, only_report, shard, html, as_json)


@one_line
def audit(
    config: ConfigPath = None,
    overrides: Overrides = None,
    kind: Annotated[
        str,
        typer.Option(
            help="Canaries: 'gradient' (given gradients, one entry each) or 'input' (public "
            "records with wrong labels)."
        ),
    ] = "gradient",
    canaries: Annotated[
        int, typer.Option(help="m, records more, each in or out by a fair coin.")
    ] = 1000,
    confidence: Annotated[float, typer.Option(help="Of the lower bound, between 0 and 1.")] = 0.95,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            metavar="FILE.png",
            help="Draw the claimed trade-off curve and the errors; private, as the records are.",
        ),
    ] = Path("audit.png"),
    as_json: accounting.AsJson = False,
) -> None:
    """Attacks a run with canaries: a lower bound on epsilon.

    Trains once more. It can refute a claim, and is never a proof of one.

    Example: quietgrad audit people.toml --canaries 200
    """
    announce("audit", as_json)
    look_early(config, overrides or [])
    from quietgrad.cli.audit import run_audit

    run_audit(config, overrides or [], kind, canaries, confidence, figure, as_json)


# In the order in which somebody with a file of records meets them.
COMMANDS = (
    check,
    init,
    plan,
    train,
    runs,
    report,
    predict,
    export,
    audit,
    compare,
    settings,
    accounting.calibrate,
    accounting.epsilon,
    spectrum,
)
for _command in COMMANDS:
    app.command(help=paragraphs(_command.__doc__ or ""))(_command)
