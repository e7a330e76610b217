"""``quietgrad calibrate`` and ``quietgrad epsilon``. They never import torch, and the accountant
only when they run: every command loads this file, and so does every completion of a shell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietgrad.checks import (
    how_many,
    require_at_least,
    require_delta,
    require_delta_for,
    require_int,
    require_positive,
)
from quietgrad.cli.output import console, print_json, print_table
from quietgrad.events import (
    ADD_REMOVE,
    ADD_REMOVE_USER,
    RELATIONS,
    ClippingClaim,
    EventSequence,
    ExactClipping,
    PoissonGaussian,
    PrivacyEvent,
    RandomizedClipping,
    unit_of,
)
from quietgrad.ledger import read_ledger
from quietgrad.ledger.earlier import start_row, told_starts

if TYPE_CHECKING:
    from quietgrad.accounting import EpsilonReport

DatasetSize = Annotated[int | None, typer.Option(help="N, number of training records.")]
BatchSize = Annotated[int | None, typer.Option(help="B, expected batch size.")]
Steps = Annotated[int | None, typer.Option(help="T, number of noisy steps.")]
SketchDim = Annotated[
    int | None, typer.Option(help="k of randomized clipping; leave out for exact clipping.")
]
EnvelopeName = Annotated[
    str, typer.Option(help="Envelope of randomized clipping: mixed, convex, hutch or hutch++.")
]
Rank = Annotated[int | None, typer.Option(help="D, total sketched rank, for the hutch envelope.")]
Bands = Annotated[int, typer.Option(help="b, bands of correlated noise; 1 is independent noise.")]
OfUsers = Annotated[
    bool, typer.Option("--users", help="N and B count users, each with all records.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Annotated[float, typer.Option(help="Target delta.")],
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    sketch_dim: SketchDim = None,
    envelope: EnvelopeName = "mixed",
    rank: Rank = None,
    bands: Bands = 1,
    users: OfUsers = False,
    as_json: AsJson = False,
) -> None:
    """The least noise multiplier for a target epsilon; needs N, B, T.

    Example: quietgrad calibrate --epsilon 2 --delta 1e-5 --dataset-size 60000 --batch-size 600
    --steps 1000
    """
    from quietgrad.accounting import epsilon_report, noise_multiplier

    q, total = _rate_and_steps(dataset_size, batch_size, steps)
    clipping = _clipping(sketch_dim, envelope, rank)
    assert dataset_size is not None
    require_positive("--epsilon", epsilon)
    require_delta_for("--delta", delta, dataset_size)
    sigma = noise_multiplier(
        epsilon, delta, sample_rate=q, steps=total, clipping=clipping, bands=bands
    )
    event = PoissonGaussian(sigma, q, total, clipping, bands)
    extra = {"target_epsilon": epsilon, **_unit(users)}
    _show("Calibrated noise", event, epsilon_report(event, delta), as_json, extra)


def epsilon(
    delta: Annotated[float | None, typer.Option(help="Delta; a ledger brings its own.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="sigma, relative to the clipping norm, on the sum.")
    ] = None,
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    sketch_dim: SketchDim = None,
    envelope: EnvelopeName = "mixed",
    rank: Rank = None,
    bands: Bands = 1,
    users: OfUsers = False,
    ledger: Annotated[
        Path | None, typer.Option(help="A run directory or ledger file: what was really spent.")
    ] = None,
    expect_releases: Annotated[
        int | None,
        typer.Option(
            help="With --ledger: how many releases the run said it made; a ledger of fewer was "
            "rolled back."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The epsilon of a mechanism, or what a run has spent.

    Example: quietgrad epsilon --ledger runs/first
    """
    from quietgrad.accounting import epsilon_report

    if ledger is not None:
        mechanism = (noise_multiplier, dataset_size, batch_size, steps, sketch_dim, rank)
        if (
            any(value is not None for value in mechanism)
            or envelope != "mixed"
            or bands != 1
            or users
        ):
            raise ValueError(
                "--ledger brings its own mechanism; leave out --noise-multiplier, --dataset-size, "
                "--batch-size, --steps, --sketch-dim, --envelope, --rank, --bands and --users, or "
                "leave out --ledger"
            )
        _from_ledger(ledger, delta, expect_releases, as_json)
        return
    if expect_releases is not None:
        raise ValueError("--expect-releases belongs to a ledger; give --ledger RUN_DIR as well")
    if noise_multiplier is None or delta is None:
        raise ValueError(
            "give --noise-multiplier and --delta with --dataset-size, --batch-size and --steps, or "
            "give --ledger RUN_DIR"
        )
    q, total = _rate_and_steps(dataset_size, batch_size, steps)
    assert dataset_size is not None
    require_delta_for("--delta", delta, dataset_size)
    event = PoissonGaussian(
        noise_multiplier, q, total, _clipping(sketch_dim, envelope, rank), bands
    )
    _show("Privacy spent", event, epsilon_report(event, delta), as_json, _unit(users))


def _unit(users: bool) -> dict[str, Any]:
    return {"neighbouring": ADD_REMOVE_USER} if users else {}


def _from_ledger(path: Path, delta: float | None, expected: int | None, as_json: bool) -> None:
    from quietgrad.accounting import epsilon_report

    if expected is not None:
        require_at_least("--expect-releases", expected, 0, "give the number that the run printed")
    contents = read_ledger(path)
    if expected is not None and contents.releases < expected:
        raise ValueError(
            f"ledger={str(path)!r} holds {how_many(contents.releases, 'release')}, and "
            f"--expect-releases says {expected}: the directory is an earlier state of the run, so "
            "its epsilon would be too small; restore the newest one"
        )
    at = contents.header.get("delta") if delta is None else delta
    if at is None:
        raise ValueError("the ledger names no delta; give --delta")
    at = float(at)
    size = contents.header.get("dataset_size")
    if isinstance(size, int) and size > 0:
        require_delta_for("delta", at, size)
    else:
        require_delta("delta", at)
    relation = contents.header.get("neighbouring", ADD_REMOVE)
    extra = {
        "releases": contents.releases,
        "ledger": str(path),
        "neighbouring": relation,
        "seeded": contents.seeded,
        **told_starts(contents.started_from),
    }
    if contents.header.get("data_declared_public"):
        extra["data_declared_public"] = True
    if contents.event is not None and contents.not_private is None:
        title, report = "Privacy spent according to the ledger", epsilon_report(contents.event, at)
        _show(title, contents.event, report, as_json, extra)
        return
    record: dict[str, Any] = {"epsilon": 0.0, "delta": at, **extra}
    said = "Nothing has been released: epsilon = 0."
    if contents.not_private is not None:
        record |= {"epsilon": None, "not_private": contents.not_private}
        said = f"No epsilon: this run gave up privacy ({contents.not_private})."
    if as_json:
        print_json(record)
    else:
        console(False).print(said, markup=False)


def _rate_and_steps(
    dataset_size: int | None, batch_size: int | None, steps: int | None
) -> tuple[float, int]:
    for name, value in (
        ("dataset_size", dataset_size),
        ("batch_size", batch_size),
        ("steps", steps),
    ):
        if value is None:
            raise ValueError(
                f"--{name.replace('_', '-')} is missing; give --dataset-size, --batch-size and "
                "--steps"
            )
        require_int(name, value)
        require_at_least(name, value, 1, "use a whole number of at least 1")
    assert dataset_size is not None and batch_size is not None and steps is not None
    if batch_size > dataset_size:
        raise ValueError(
            f"batch_size={batch_size} exceeds dataset_size={dataset_size}; the sampling rate "
            "cannot exceed 1"
        )
    return batch_size / dataset_size, steps


def _clipping(sketch_dim: int | None, envelope: str, rank: int | None) -> ClippingClaim:
    if sketch_dim is None:
        if rank is not None or envelope != "mixed":
            raise ValueError(
                "--envelope and --rank belong to randomized clipping; give --sketch-dim as well"
            )
        return ExactClipping()
    return RandomizedClipping(sketch_dim, envelope, rank)  # type: ignore[arg-type]


DECLARED_PUBLIC = (
    "the training records were declared public: seeds may be known, and nothing is "
    "promised for them"
)


def describe(event: PrivacyEvent, report: EpsilonReport) -> dict[str, Any]:
    """The facts behind an epsilon, as a record."""
    phases = event.events if isinstance(event, EventSequence) else (event,)
    last = phases[-1]
    noise = [p.noise_multiplier for p in phases]
    rates = [p.sample_rate for p in phases]
    sketch = last.clipping if isinstance(last.clipping, RandomizedClipping) else None
    require_positive("noise_multiplier", min(noise))
    record: dict[str, Any] = {
        "noise_multiplier": min(noise),  # with phases, of the least noise and the highest rate
        "epsilon": report.epsilon,
        "delta": report.delta,
        "sample_rate": max(rates),
        "steps": sum(p.steps for p in phases),
        "compositions": sum(p.compositions for p in phases),
        "participation_rate": event.participation_rate,
        "bands": last.bands,
        "clipping": "exact" if sketch is None else "randomized",
        "neighbouring": ADD_REMOVE,
        "sampler": "poisson" if last.bands == 1 else "cyclic-poisson",
        "accountant": "privacy-loss distributions, connect-the-dots, both directions",
        "discretisation": asdict(report.discretisation),
    }
    if sketch is not None:
        record |= {
            "sketch_dim": sketch.sketch_dim,
            "envelope": sketch.envelope,
            "rank": sketch.total_rank,
        }
    if last.beside:
        record["beside"] = [side.to_json() for side in last.beside]
    if len(phases) > 1:
        record["phases"] = [p.to_json() for p in phases]
    if report.reason:
        record["reason"] = report.reason
    return record


def _show(
    title: str, event: PrivacyEvent, report: EpsilonReport, as_json: bool, extra: dict[str, Any]
) -> None:
    from quietgrad.accounting.rounding import round_down, round_up, round_up_to

    record = describe(event, report) | extra
    if as_json:
        print_json(record)
        return
    infinite = math.isinf(report.epsilon)
    unit = unit_of(str(record["neighbouring"]))
    identity = {ADD_REMOVE: "content", ADD_REMOVE_USER: "name"}.get(record["neighbouring"], "index")
    twice = (
        "a user's records are under several owners"
        if unit == "user"
        else "a record appears more than once"
    )
    phases = len(record.get("phases", ()))
    least, most, noise = ("at least ", "at most ", round_down) if phases else ("", "", round_up)
    phased = {"settings": f"{phases} phases, each counted with its own"} if phases else {}
    rows = {
        "epsilon": f"infinite: {report.reason}"
        if infinite
        else f"{round_up(report.epsilon, 4)} (an upper bound)",
        "delta": round_up_to(report.delta, 6),
        **phased,
        "noise multiplier": f"{least}{noise(record['noise_multiplier'], 4)}, relative to "
        "the clipping norm, on the sum",
        "steps": f"{record['steps']}, as {record['compositions']} compositions at rate {most}"
        f"{round_up_to(record['participation_rate'], 6)}",
        **({"data": DECLARED_PUBLIC} if record.get("data_declared_public") else {}),
        **start_row(record),
        "neighbouring relation": RELATIONS[str(record["neighbouring"])],
        "sampler": "Poisson"
        if record["sampler"] == "poisson"
        else f"Poisson within {record['bands']} fixed parts, in turn; a {unit}'s {identity} "
        "decides its part",
        "clipping": "exact"
        if record["clipping"] == "exact"
        else f"randomized, k = {record['sketch_dim']}, {record['envelope']} envelope",
        **beside_row(record.get("beside", ())),
        "accountant": str(record["accountant"]),
        "discretisation": _discretisation(report),
        "invalid if": f"batches are shuffled instead of Poisson-sampled; {twice}; "
        "sums are divided by the realised batch size; "
        "a step is released but not counted; the noise can be predicted",
    }
    print_table(console(False), title, rows)


def beside_row(released: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What is released beside the gradients, as a row; none for nothing."""
    from quietgrad.accounting.rounding import round_up

    told = (
        f"{side['name']}, noise multiplier {round_up(side['noise_multiplier'], 4)}"
        + ("" if side["every"] == 1 else f", every {side['every']} steps")
        for side in released
    )
    text = "; ".join(told)
    return {"beside the gradients": f"{text} (accounted for together)"} if text else {}


def _discretisation(report: EpsilonReport) -> str:
    d = report.discretisation
    text = f"losses rounded up to multiples of {d.interval:.2e}"
    if d.mixture_bins > 1:
        text += f"; {d.mixture_bins} values of the clipping scale, rounded up"
    return text
