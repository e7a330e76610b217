"""What chooses has no part in what counts, bounds of several findings hold together, and what is
shown of the whole plan is of the whole plan: an audit without these refutes sound mechanisms.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from quietgrad import PrivacyConfig
from quietgrad.auditing import mechanism as many_runs
from quietgrad.auditing.bounds.thresholds import worth_for_curve
from quietgrad.auditing.canaries import Directions
from quietgrad.auditing.contribution import contribution
from quietgrad.auditing.report import AuditReport, Finding, Guesses, Look, findings_of, rate_points
from quietgrad.auditing.scores.attacks import learnt_scores
from quietgrad.auditing.scores.whitening import log_likelihood_ratio
from quietgrad.auditing.trials import Trials
from quietgrad.beside import TrainingLoss
from quietgrad.events import PoissonGaussian

EVENT = PoissonGaussian(1.0, 1.0, 1)
SEEN = Guesses(9, 10, 10)


def test_bounds_of_several_findings_hold_together() -> None:
    """Mutant: each at the confidence of one alone, so that many findings refute by luck."""
    asked: list[float] = []

    def bound(level: float) -> float:
        asked.append(level)
        return level

    looks = [Look(name, "method", 1.0, bound, SEEN) for name in "abcde"]
    for found in findings_of(looks, 0.9):
        assert found.epsilon == 0.9 and found.joint == pytest.approx(0.98)
    assert len(asked) == 10


def report_of(*findings: Finding) -> AuditReport:
    claimed = findings[0].claimed
    return AuditReport(
        "many runs", "gradient", claimed, 1e-5, 0.95, 100, "add-remove", EVENT, findings
    )


def test_what_is_shown_of_the_plan_is_joint_and_of_the_whole() -> None:
    """Mutants: bounds that hold alone, or of another claim."""
    whole = Finding("whole run", "m", 2.0, 2.5, 1.5, SEEN)
    one = Finding("one participation", "m", 1.9, 1.95, 1.8, SEEN)
    report = report_of(whole, replace(whole, joint=1.25), one)
    assert report.lower_bound == 1.5 and not report.refuted and not whole.refutes
    assert report_of(whole, replace(one, joint=1.91)).refuted  # a part's claim is a claim
    assert not replace(whole, joint=2.0).refutes and replace(whole, joint=2.001).refutes


def test_limits_of_shown_rates_are_two_sided() -> None:
    scores, included = np.arange(100.0), np.arange(100) % 2 == 0
    for point in rate_points(scores, included, 0.9):
        for rate, limits in (
            (point.false_positive, point.false_positive_limits),
            (point.false_negative, point.false_negative_limits),
        ):
            exact = stats.binomtest(round(50 * rate), 50).proportion_ci(0.9, "exact")
            assert limits == pytest.approx((exact.low, exact.high))


def test_the_threshold_is_that_of_the_trials_which_choose() -> None:
    present, chosen = np.arange(200) % 2 == 0, np.arange(200) < 100
    scores = np.where(present, 1.0, 0.0) + np.where(chosen, 0.0, 10.0)
    judged = many_runs._Judged("whole run", 1.0, EVENT, scores, present, chosen)
    errors = many_runs._errors(judged, worth_for_curve)
    assert (errors.absent, errors.present) == (50, 50)
    assert (errors.false_positives, errors.false_negatives) == (50, 0)


def test_the_learnt_attack_learns_of_the_trials_which_choose() -> None:
    order = np.random.default_rng(0)
    present, chosen = np.arange(300) % 2 == 0, np.arange(300) < 120
    products = order.normal(size=(300, 1, 1)) + present[:, None, None]
    trials = Trials(present, products, np.ones_like(products))
    found = learnt_scores(trials, chosen)
    other = learnt_scores(replace(trials, present=np.where(chosen, present, ~present)), chosen)
    assert found is not None and other is not None and np.array_equal(found, other)


def test_noise_levels_are_those_of_the_trials_which_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def levels(some: Trials) -> None:
        assert not some.present.any() and len(some.products) == len(some.present) <= 12
        raise Stop

    monkeypatch.setattr(many_runs, "noise_levels", levels)
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=1).build(1)
    some = np.ones((40, 1, 1))
    trials = Trials(np.arange(40) % 2 == 0, some, some)
    with pytest.raises(Stop):
        many_runs._judge(plan, trials, "gradient", 0.95, np.random.default_rng(0))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_scores_are_the_ratio_of_two_densities(rate: float) -> None:
    residual, std, canary = np.array([-0.7, 0.2, 3.0]), 1.3, 2.0
    apart = stats.norm.pdf(residual, 0.0, std)
    mixed = (1 - rate) * apart + rate * stats.norm.pdf(residual, canary, std)
    energy = np.full(3, (canary / std) ** 2)
    found = log_likelihood_ratio(residual * canary / std**2, energy, rate)
    assert found == pytest.approx(np.log(mixed / apart))


def test_canaries_that_share_an_entry_are_no_runs_of_their_own() -> None:
    def of(places: list[list[int]]) -> Directions:
        return Directions(9, torch.tensor(places), torch.ones(2, 2))

    assert of([[0, 1], [2, 3]]).disjoint and not of([[0, 1], [1, 3]]).disjoint


def test_a_canary_gives_a_training_loss_the_most_that_a_record_can() -> None:
    plan = PrivacyConfig(
        noise_multiplier=1.0, sample_rate=1.0, steps=1, training_loss=TrainingLoss()
    ).build(3)
    with plan.start() as run:
        next(run.batches())
        made = contribution(run, {"w": torch.ones(3, 4)})
        assert float(made.private.beside["training-loss"]) == 3.0
