"""``quietgrad audit``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.accounting.rounding import round_down, round_down_to, round_up, round_up_to
from quietgrad.checks import require_word
from quietgrad.cli.output import console, print_json, print_table, require_place
from quietgrad.cli.progress.counted import Counted
from quietgrad.events import RandomizedClipping
from quietgrad.training.settings.config import load_config

if TYPE_CHECKING:
    from quietgrad.auditing.report import Finding
    from quietgrad.plan import PrivacyPlan


def run_audit(
    config_path: Path | None,
    overrides: list[str],
    kind: str,
    canaries: int,
    confidence: float,
    figure: Path | None,
    as_json: bool,
) -> None:
    """See ``quietgrad audit --help``."""
    target = console(as_json)
    from quietgrad.auditing.report import KINDS

    require_word("--kind", kind, KINDS)
    if figure is not None:
        require_place(figure)
    config = load_config(config_path, overrides)
    started = time.monotonic()
    from quietgrad.auditing.report import MEANING
    from quietgrad.training.audited_run import audited_run

    with Counted(target, "training with canaries") as shown:
        run = audited_run(config, canaries, kind, confidence, shown.count, shown.say)
    report, plan = run.report, run.plan
    record: dict[str, Any] = report.to_json() | {
        "records": run.records,
        "score": {"metric": run.metric, "value": run.score},
        "seconds": round(time.monotonic() - started, 1),
        "figure": None if figure is None else str(figure),
    }
    if figure is not None:
        from quietgrad.report.audit import audit_figure

        points = [
            (p.false_positive, p.false_positive_limits, p.false_negative, p.false_negative_limits)
            for p in report.points
        ]
        title = (
            f"{kind} canaries: epsilon = {round_up_to(report.claimed, 3)} claimed, above "
            f"{round_down_to(report.lower_bound, 3)} shown (delta = {round_up_to(report.delta, 3)})"
        )
        audit_figure(
            plan.event, points, title, f"boxes: {100 * confidence:g} % limits of each rate", figure
        )
    if as_json:
        print_json(record)
        return
    print_table(
        target,
        "Audit of one training run",
        {
            "claimed": f"epsilon = {round_up(report.claimed, 4)} at delta = "
            f"{round_up_to(report.delta, 3)}, an upper bound",
            "shown": f"epsilon > {round_down(report.lower_bound, 4)} with confidence "
            f"{confidence:g} over all rows below",
            "verdict": report.verdict,
            "canaries": f"{report.trials} ({kind}) beside {run.records} {_units(plan)}; every "
            "canary in or out by a fair coin",
            "mechanism": _mechanism(plan),
            f"test {run.metric}": f"{run.score:.4f}, of the model that trained with canaries; it "
            "was not kept",
            **({} if figure is None else {"figure": str(figure)}),
        },
    )
    rows = {f"{f.released}, {f.method}": _bound(f) for f in report.findings}
    print_table(target, f"Lower bounds on epsilon (each alone at confidence {confidence:g})", rows)
    for note in (MEANING, *report.notes):
        target.print(f"- {note}", markup=False, soft_wrap=True)


def _mechanism(plan: PrivacyPlan) -> str:
    claim = plan.clipper.claim.clipping
    clipping = "exact clipping"
    if isinstance(claim, RandomizedClipping):
        clipping = f"{plan.clipper.estimator} with k = {claim.sketch_dim}"
    bands = "" if plan.event.bands == 1 else f", {plan.event.bands} bands"
    every = [plan.at(step) for step in range(plan.steps)]
    noise = _range([settings.noise_multiplier for settings in every])
    rate = _range([settings.sample_rate for settings in every])
    return f"noise multiplier {noise}, rate {rate}, {plan.steps} steps, {clipping}{bands}"


def _range(values: list[float]) -> str:
    least, most = f"{min(values):.4f}", f"{max(values):.4f}"
    return least if least == most else f"{least} to {most}"


def _units(plan: PrivacyPlan) -> str:
    users = plan.sampler.users
    return "records" if users is None else "users; a canary is a user with many records"


def _bound(finding: Finding) -> str:
    from quietgrad.auditing.report import Guesses

    seen = finding.evidence
    if isinstance(seen, Guesses):
        counts = (
            f"{seen.correct} of {seen.guesses} guesses right, {seen.canaries - seen.guesses} "
            "canaries not guessed"
        )
    else:
        counts = (
            f"{seen.false_positives} of {seen.absent} absent called present, "
            f"{seen.false_negatives} of {seen.present} present called absent"
        )
    shown = round_down(finding.epsilon, 4)
    return f"{shown}   ({counts})" + ("   ABOVE THE CLAIM" if finding.refutes else "")
