"""The commands and their options; each imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad import __version__
from quietgrad.cli import accounting
from quietgrad.cli.beside.commands import report, runs
from quietgrad.cli.beside.planning import (
    ConfigPath,
    ExtendEpochs,
    ExtendSteps,
    ExtendTo,
    Overrides,
    plan,
)
from quietgrad.cli.output import announce, hush_libraries, one_line, paragraphs

app = typer.Typer(
    help="Differentially private training in PyTorch, with every epsilon an upper bound.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("calibrate")(accounting.calibrate)
app.command("epsilon")(accounting.epsilon)
app.command("report")(report)
app.command("runs")(runs)
app.command("plan")(plan)

Processes = Annotated[int, typer.Option("--nproc", metavar="N", help="On N processes here.")]


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


@app.command()
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
    """Trains privately on texts, tables or images, or a language model to answer; without CONFIG,
    a classifier on MiniLM and 38 thousand tweets.
    """
    announce("train", as_json)
    from quietgrad.cli.training import run_train

    extend = extend_steps, extend_epochs, extend_to
    run_train(config, overrides or [], resume, as_json, extend, processes)


@app.command()
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
        typer.Option("--output", metavar="FILE.csv", help="Write all records with predictions."),
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
    """Says what a run's model makes of new records: labels and probabilities, or answers. Costs no
    privacy.
    """
    from quietgrad.cli.predict import run_predict

    run_predict(run_dir, file, output, each, as_json)


@app.command()
def export(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a finished run.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Ends in .pt2, or in .onnx.")
    ],
    form: Annotated[
        str, typer.Option("--format", help="torch-export, or onnx (with quietgrad\\[onnx]).")
    ] = "torch-export",
    as_json: accounting.AsJson = False,
) -> None:
    """Writes a run's model as one file that runs without this library: any batch size and length,
    label names inside. Costs no privacy.
    """
    from quietgrad.cli.beside.export import run_export

    run_export(run_dir, form, output, as_json)


Text = Annotated[str, typer.Option("--text", metavar="COLUMN", help="Column of the text.")]
Label = Annotated[str, typer.Option("--label", metavar="COLUMN", help="Column of the label.")]


@app.command()
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
    as_json: accounting.AsJson = False,
) -> None:
    """Shows the owner of a file what training would refuse in it: every broken row with its line,
    class counts, rare labels, encoding. Its output is private.
    """
    from quietgrad.cli.beside.check import run_check

    run_check(source, text, label, as_json)


@app.command()
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
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out broken rows, and those that lack a label."),
    ] = False,
    as_json: accounting.AsJson = False,
) -> None:
    """Writes a commented configuration for a file of records, to read and then to train with.
    Overwrites nothing.
    """
    from quietgrad.cli.beside.init import run_init

    run_init(source, output, text, label, skip_bad, as_json)


@app.command()
def settings(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="Such as noise.bands, bands or noise; all without."),
    ] = None,
    as_json: accounting.AsJson = False,
) -> None:
    """Says what the keys of a configuration file mean, what they may be, and their defaults."""
    from quietgrad.cli.settings import run_settings

    run_settings(key, as_json)


@app.command()
@one_line
def spectrum(
    config: ConfigPath = None, overrides: Overrides = None, as_json: accounting.AsJson = False
) -> None:
    """Pretrains on public unlabelled images, and computes the Hessian's spectrum that shapes
    NoiseCurve's noise.
    """
    from quietgrad.cli.spectrum import run_spectrum

    run_spectrum(config, overrides or [], as_json)


@app.command()
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
    """Trains variants side by side, tunes each (a grid of rates, or with \\[search] Optuna), and
    makes a table and a figure; stops and resumes anywhere.
    """
    from quietgrad.cli.compare import run_accounted, run_compare

    if accounted:
        run_accounted(config, only_report, shard, as_json)
    else:
        run_compare(config, only_report, shard, html, as_json)


@app.command()
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
    confidence: Annotated[float, typer.Option(help="Of the lower bounds.")] = 0.95,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            metavar="FILE.png",
            help="Draw the claimed trade-off curve and the attack's errors.",
        ),
    ] = Path("audit.png"),
    as_json: accounting.AsJson = False,
) -> None:
    """Trains once with canaries and attacks the releases: a lower bound on epsilon, to hold the
    claim against. Never a proof of it.
    """
    from quietgrad.cli.audit import run_audit

    run_audit(config, overrides or [], kind, canaries, confidence, figure, as_json)


for _command in app.registered_commands:
    assert _command.callback is not None
    _command.help = paragraphs(_command.callback.__doc__ or "")
