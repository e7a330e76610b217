"""Audit of one training run with many canaries (Steinke, Nasr and Jagielski 2023).

The canaries are the last m records of the data set that the plan is for, so they are sampled,
clipped, noised and accounted for like all others. A fair coin decides of each whether it is there;
the attacker scores every canary from what was released, calls the highest in and the lowest out,
and the number of right calls bounds epsilon from below.

The attacker knows the other records and which of them were drawn, as in the definition of
differential privacy, and takes their part away from every release: what is left is noise and
canaries.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quietgrad.auditing.bounds.errors import (
    ErrorCounts,
    lower_bound_clopper_pearson,
    lower_bound_trade_off,
    require_confidence_of_audit,
)
from quietgrad.auditing.bounds.guessing import (
    count_correct,
    lower_bound_one_run,
    require_guesses,
)
from quietgrad.auditing.bounds.planning import number_of_guesses, planned_threshold
from quietgrad.auditing.bounds.thresholds import errors_at, worth_for_curve, worth_for_epsilon
from quietgrad.auditing.canaries import GradientCanaries, InputCanaries
from quietgrad.auditing.drawn import divided, require_last
from quietgrad.auditing.report import AuditReport, Guesses, Look, findings_of, rate_points
from quietgrad.auditing.scores.flat import Layout
from quietgrad.auditing.scores.scoring import GradientScores, InputScores, Scores
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.events import PoissonGaussian
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import Batch, trainable_parameters

View = Callable[[NoisySum], NoisySum]
NOTES = (
    "A run with canaries is not the run without: its model must not be published as the trained "
    "one.",
    "Which canaries were in was decided by the audit's own secret coins; the canaries are made up "
    "or public.",
    "The attacker knows all other records and which were drawn, and takes their part away. "
    "Canaries are clipped in micro-batches of their own, so this audit does not see what one "
    "record does to others of its micro-batch; audit_mechanism with input canaries does.",
)
INDEPENDENT = (
    "Bounds 'as independent runs' treat the canaries as runs of their own, which they "
    "are under the claimed mechanism: above the claim they refute it; below it they are "
    "estimates."
)


@dataclass(frozen=True)
class _Seen:
    """One thing that was released, and the scores taken of it."""

    released: str
    scores: NDArray[np.float64]


def audit_one_run(
    plan: PrivacyPlan,
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batches_of: Callable[[Any], Iterable[Batch]],
    canaries: GradientCanaries | InputCanaries,
    *,
    update: Callable[[NoisySum], None] | None = None,
    views: Mapping[str, View] | None = None,
    guesses: tuple[int, int] | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditReport:
    """Trains once with canaries and guesses which were in.

    Args:
        plan: for N + m records (users): the N that ``batches_of`` knows, then the canaries. Started
            without a ledger. Its settings may change by step, with one band.
        model, per_example_loss: as for ``PrivateRun.clip``.
        batches_of: indices in 0 .. N - 1 -> their micro-batches; for no index one empty
            micro-batch. Of a plan for users: ``UserIndices`` -> ``UserBatch``es.
        canaries: m gradients, or m records. Of a plan for users, whose last m users they are, each
            is a user's: a gradient for the whole user, or what all of the user's records are alike.
        update: what training does with a released sum (optimiser, denoiser); None leaves the model
            as it is.
        views: name -> what is made of a released sum, such as a denoised one, and attacked too.
            None: the plan's denoising, where it has some.
        guesses: (k+, k-), fixed beforehand; None: what the plan's own mechanism makes best
            (``planning.number_of_guesses``).
        confidence: of the bounds.
        seed: of coins and canaries; None takes the operating system's entropy.
        progress: called after each release with the number of releases.

    Returns:
        Lower bounds by guesses (Theorem 5.2, whatever the mechanism is) for the releases, their
        views and the weights; for gradient canaries also as if every canary were a run of its own,
        which under the claimed mechanism it is.

    Raises:
        ValueError: if the plan is for fewer records than there are canaries, or averages views of
            input canaries; for guesses that are no numbers of canaries.
    """
    require_confidence_of_audit(confidence)
    m = canaries.count
    records = plan.dataset_size - m
    if records < 0:
        raise ValueError(
            f"the plan is for {plan.dataset_size} records, and there are {m} canaries; build the "
            "plan for the records and the canaries together"
        )
    if isinstance(canaries, InputCanaries) and plan.clipper.views > 1:
        raise ValueError(
            f"the plan averages {plan.clipper.views} views of a record, and input canaries have "
            "one; use GradientCanaries"
        )
    if plan.adaptive_clipping is not None:
        raise ValueError(
            "the plan's clipping norm follows what is released (adaptive_clipping), and the scores "
            "of one run are in units of one norm; audit the plan with audit_mechanism"
        )
    require_last(plan, m)
    if guesses is not None:
        require_guesses(*guesses, m)
    taken = sorted({"releases", "weights"} & set(views or ()))
    if taken:
        raise ValueError(
            f"views has the name {taken[0]!r}, which what the audit looks at by itself has; give "
            "it another"
        )
    order = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    included = order.random(m) < 0.5
    event = plan.audited_event
    likely, unlikely = guesses or number_of_guesses(event, m, plan.delta, confidence)
    layout = Layout(trainable_parameters(model))
    looking: dict[str, View] = {"releases": lambda noisy: noisy}
    looking |= _denoised(plan, model) if views is None else views

    scorers: dict[str, Scores]
    if isinstance(canaries, GradientCanaries):
        directions = canaries.directions(layout.size, order)
        scorers = {name: GradientScores(plan, layout, model, directions) for name in looking}
    else:
        batch = canaries.batch
        scorers = {
            name: InputScores(plan, layout, model, per_example_loss, batch) for name in looking
        }
    first = scorers["releases"]
    first.begin()
    with plan.start() as run:
        for step, drawn in enumerate(run.batches()):
            ours, theirs = divided(drawn, records)
            known = run.clip(model, per_example_loss, iter(batches_of(ours)))
            total = first.add(run, known, theirs, included)
            noisy = run.release(total)
            others = layout.flatten(known.gradients)
            for name, view in looking.items():
                scorers[name].see(step, layout.flatten(view(noisy).gradients) - others)
            if update is not None:
                update(noisy)
            if progress is not None:
                progress(step + 1)
    seen = [_Seen(name, s.of_releases()) for name, s in scorers.items()]
    if update is not None:
        seen.append(_Seen("weights", first.of_weights()))
    looks = [_by_guesses(plan, s, included, likely, unlikely, order) for s in seen]
    notes: tuple[str, ...] = NOTES
    if isinstance(canaries, GradientCanaries) and directions.disjoint:
        looks += _as_runs(plan, seen[0], included, confidence)
        notes += (INDEPENDENT,)
    return AuditReport(
        "one run",
        "gradient" if isinstance(canaries, GradientCanaries) else "input",
        plan.epsilon,
        plan.delta,
        confidence,
        m,
        plan.neighbouring,
        event,
        findings_of(looks, confidence),
        rate_points(seen[0].scores, included, confidence),
        notes,
    )


def _denoised(plan: PrivacyPlan, model: nn.Module) -> dict[str, View]:
    rule = plan.denoising
    return {} if rule is None else {"denoised releases": lambda noisy: rule.denoise(noisy, model)}


def _by_guesses(
    plan: PrivacyPlan,
    seen: _Seen,
    included: NDArray[np.bool_],
    likely: int,
    unlikely: int,
    order: np.random.Generator,
) -> Look:
    correct, m = count_correct(seen.scores, included, likely, unlikely, order), len(included)
    evidence = Guesses(correct, likely + unlikely, m)
    return Look(
        seen.released,
        "guesses in one run",
        plan.epsilon,
        lambda level: lower_bound_one_run(correct, likely + unlikely, m, plan.delta, level),
        evidence,
    )


def _as_runs(
    plan: PrivacyPlan, seen: _Seen, included: NDArray[np.bool_], confidence: float
) -> list[Look]:
    """Bounds as if every canary were a run; the thresholds come from the plan alone."""
    if included.all() or not included.any():
        return []  # too few canaries for rates of either kind

    event = plan.audited_event

    def errors(worth: Callable[[float, float], float]) -> ErrorCounts:
        return errors_at(
            seen.scores, included, planned_threshold(event, len(included), worth, confidence)
        )

    counts = errors(worth_for_epsilon(plan.delta))
    by_counts = Look(
        seen.released,
        "Clopper-Pearson, as independent runs",
        plan.epsilon,
        lambda level: lower_bound_clopper_pearson(counts, plan.delta, level),
        counts,
    )
    if not isinstance(event, PoissonGaussian):
        return [by_counts]  # mechanisms that change are no family in one noise multiplier
    curve, family = errors(worth_for_curve), event
    by_curve = Look(
        seen.released,
        "trade-off, as independent runs",
        plan.epsilon,
        lambda level: lower_bound_trade_off(curve, family, plan.delta, level),
        curve,
    )
    return [by_counts, by_curve]
