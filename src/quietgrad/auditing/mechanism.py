"""White-box audit of a plan by many runs: the whole mechanism as it ships, with one canary that is
there or not (Nasr et al. 2023, "Tight auditing of differentially private machine learning").

The attacker knows all that the definition of differential privacy gives him: every other record,
which of them were drawn, the projections, the mixing matrix, and the canary's clipped contribution.
He subtracts what the others contributed, and takes the log-likelihood ratio of the rest: by the
claimed noise, and by what he learnt of noise and signal on other runs. Under the claimed mechanism
the first is the best test there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.accounting import epsilon
from quietgrad.accounting.rounding import round_up
from quietgrad.auditing.bounds.errors import (
    ErrorCounts,
    epsilon_of_rates,
    lower_bound_clopper_pearson,
    lower_bound_trade_off,
    require_confidence_of_audit,
    upper_rate,
)
from quietgrad.auditing.bounds.thresholds import (
    best_threshold,
    errors_at,
    worth_for_curve,
    worth_for_epsilon,
)
from quietgrad.auditing.report import KINDS, AuditReport, Kind, Look, findings_of, rate_points
from quietgrad.auditing.scores.attacks import learnt_scores, noise_levels, scores_of
from quietgrad.auditing.stage import Stage, linear_stage
from quietgrad.auditing.trials import Trials, run_trials
from quietgrad.checks import require_at_least, require_int, require_word
from quietgrad.events import PoissonGaussian
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import trainable_parameters

CHOOSING = 0.3  # share of the runs that only choose: noise levels, learnt attack, thresholds
FEWEST_RUNS = 40


def audit_mechanism(
    plan: PrivacyPlan,
    stage: Stage | None = None,
    *,
    runs: int = 4000,
    kind: Kind = "gradient",
    direction: Mapping[str, Tensor] | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditReport:
    """Runs the plan many times, every other time with the canary, and proves what it can.

    Args:
        plan: any plan; record N - 1 of its data set is the canary. Every run is ``plan.start()``
            with the plan's sampler, clipper and noise, without a ledger.
        stage: model, other records and canary; None: a linear layer and made-up records. The model
            is not updated.
        runs: half of them with the canary. About 4000 show 0.8 of the claimed epsilon at sampling
            rate 1; error counts alone need about exp(epsilon) times as many as a curve.
        kind: "gradient": a given gradient is clipped and added as the canary's contribution;
            "input": the canary goes through model and clipper with the others of its batch.
        direction: parameter name -> gradient of the canary, for kind="gradient"; None: equal
            entries in all parameters.
        confidence: of the bounds.
        seed: of the audit's own choices; the plan draws by its own.

    Returns:
        Lower bounds on the whole run and on one participation, by error counts (valid whatever the
        mechanism is) and by the trade-off curve of the claimed family.

    Raises:
        ValueError: for bad arguments, a stage of other records than the plan's, or an input canary
            in a stage whose loss draws random numbers.
    """
    require_word("kind", kind, KINDS)
    require_confidence_of_audit(confidence)
    require_int("runs", runs)
    require_at_least(
        "runs", runs, FEWEST_RUNS, "rates cannot be told from fewer; thousands are usual"
    )
    _ = plan.plain_event  # refuses others before any work
    stage = linear_stage(plan) if stage is None else stage
    stage.require(plan)
    if kind == "input":
        stage.require_no_draws()
    if plan.seed is not None:
        raise ValueError(
            "the plan has a seed, so all of its runs would draw the same batches and noise; build "
            "it without one to audit it"
        )
    if direction is not None and kind != "gradient":
        raise ValueError(
            "direction is for kind='gradient'; an input canary's gradient is the model's"
        )
    given = _everywhere(stage) if direction is None else dict(direction)
    coins = np.arange(runs) % 2 == 1
    trials = run_trials(plan, stage, coins, kind, given)
    return _judge(plan, trials, kind, confidence, np.random.default_rng(seed))


def _everywhere(stage: Stage) -> dict[str, Tensor]:
    return {name: torch.ones_like(p) for name, p in trainable_parameters(stage.model).items()}


@dataclass(frozen=True)
class _Judged:
    """Scores with what is claimed of what they were computed from."""

    released: str
    claimed: float
    event: PoissonGaussian
    scores: NDArray[np.float64]
    present: NDArray[np.bool_]
    chosen: NDArray[np.bool_]


def _judge(
    plan: PrivacyPlan, trials: Trials, kind: Kind, confidence: float, order: np.random.Generator
) -> AuditReport:
    runs = len(trials.present)
    chosen = np.zeros(runs, dtype=bool)
    chosen[: math.ceil(CHOOSING * runs)] = True
    trials = trials.at(order.permutation(runs))
    present = trials.present
    event = plan.plain_event
    levels = noise_levels(trials.at(np.flatnonzero(chosen & ~present)))
    each = scores_of(trials, event.participation_rate, levels)  # [runs, participations]
    whole = _Judged("whole run", plan.epsilon, event, each.sum(1), present, chosen)
    looks = [_by_counts(whole, plan.delta), _by_curve(whole, plan.delta)]
    if event.compositions > 1:
        one, times = event.after(1), each.shape[1]
        part = _Judged(
            "one participation",
            epsilon(one, plan.delta),
            one,
            each.reshape(-1),
            np.repeat(present, times),
            np.repeat(chosen, times),
        )
        looks += [_by_counts(part, plan.delta), _by_curve(part, plan.delta)]
    learnt = learnt_scores(trials, chosen)
    if learnt is not None:
        looks.append(
            _by_counts(
                replace(whole, released="whole run, learnt attack", scores=learnt), plan.delta
            )
        )
    held = int((~chosen & ~present).sum())
    fewest = upper_rate(0, held, (1 - confidence) / 2)
    notes = (
        f"{int(chosen.sum())} of {runs} runs chose noise levels and thresholds; errors were "
        "counted on the others.",
        "With so many runs error counts alone (Clopper-Pearson) show no more than epsilon = "
        f"{round_up(epsilon_of_rates(fewest, fewest, plan.delta), 2)}, whatever the mechanism.",
        "Trade-off bounds are for mechanisms that differ from the claimed one in their noise "
        "multiplier; above the claim they refute it whatever the mechanism is.",
    )
    return AuditReport(
        "many runs",
        kind,
        plan.epsilon,
        plan.delta,
        confidence,
        runs,
        plan.neighbouring,
        event,
        findings_of(looks, confidence),
        rate_points(whole.scores[~chosen], present[~chosen], confidence),
        notes,
    )


def _by_counts(judged: _Judged, delta: float) -> Look:
    errors = _errors(judged, worth_for_epsilon(delta))
    return Look(
        judged.released,
        "Clopper-Pearson",
        judged.claimed,
        lambda level: lower_bound_clopper_pearson(errors, delta, level),
        errors,
    )


def _by_curve(judged: _Judged, delta: float) -> Look:
    errors = _errors(judged, worth_for_curve)
    return Look(
        judged.released,
        "trade-off",
        judged.claimed,
        lambda level: lower_bound_trade_off(errors, judged.event, delta, level),
        errors,
    )


def _errors(judged: _Judged, worth: Callable[[float, float], float]) -> ErrorCounts:
    """Counted on the held-out trials, at the threshold that is best on the choosing ones."""
    chosen = judged.chosen
    threshold = best_threshold(judged.scores[chosen], judged.present[chosen], worth)
    return errors_at(judged.scores[~chosen], judged.present[~chosen], threshold)
