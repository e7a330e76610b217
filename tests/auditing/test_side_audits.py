"""Audits of plans that release a training loss and a count beside the gradients: the right ones are
not refuted, what they claim is nearly shown, and broken ones are found out.

Keys come from a counter (conftest.py), so results repeat. With fresh keys a right mechanism would
be refuted with probability at most 0.05 an audit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import quietgrad.clipping.clipped_sum as clipped_sum
from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.accounting import epsilon
from quietgrad.auditing import GradientCanaries, audit_mechanism, audit_one_run
from quietgrad.auditing.stage import linear_stage
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.beside.values import Observed
from quietgrad.clipping import ClippedSum
from quietgrad.noise import BandedNoise, NoisySum

pytestmark = pytest.mark.statistical
BreakNoise = Callable[[Callable[..., NoisySum]], None]
# Most of what is claimed is claimed for the numbers beside the gradients.
LOSS, ADAPTIVE = TrainingLoss(share=0.4), AdaptiveClipping(share=0.4, rate=0.5)


def plan_of(records: int = 1, **settings: Any) -> PrivacyPlan:
    config = PrivacyConfig(
        target_delta=1e-5,
        sample_rate=1.0,
        steps=1,
        noise_multiplier=4.0,
        training_loss=LOSS,
        adaptive_clipping=ADAPTIVE,
    )
    return replace(config, **settings).build(records)


def bound(plan: PrivacyPlan, runs: int = 1000, **options: Any) -> tuple[float, bool]:
    report = audit_mechanism(plan, runs=runs, seed=0, **options)
    return report.finding("whole run", "trade-off").epsilon, report.refuted


@pytest.mark.slow("thousands of runs of right mechanisms")
def test_most_of_the_joint_epsilon_is_shown_and_none_is_refuted() -> None:
    plan = plan_of()
    shown, refuted = bound(plan, 3000)
    alone = epsilon(replace(plan.event, beside=()), plan.delta)
    assert not refuted
    assert 1.2 * alone < shown <= plan.epsilon < 3 * alone


@pytest.mark.grid(1, "plans audited at ten seconds each")
@pytest.mark.parametrize(
    "settings",
    [
        {"sample_rate": 0.5, "steps": 2},
        {"sample_rate": 0.5, "steps": 3, "noise": BandedNoise(2), "noise_multiplier": 6.0},
        {"training_loss": replace(LOSS, every=2), "steps": 2},
    ],
    ids=["sampled", "banded", "every other step"],
)
def test_right_mechanisms_are_not_refuted(settings: dict[str, Any]) -> None:
    plan = plan_of(2, **settings)
    shown, refuted = bound(plan, 400)
    assert not refuted and 0.1 * plan.epsilon < shown


def test_a_record_that_goes_through_the_model_is_as_private() -> None:
    plan = plan_of(3)
    shown, refuted = bound(plan, 250, kind="input", stage=linear_stage(plan))
    assert not refuted and shown > 0


def test_numbers_without_noise_are_refuted(break_noise: BreakNoise) -> None:
    def bare(release: Callable[..., NoisySum], clipped: ClippedSum, *_: object) -> NoisySum:
        sums = {name: float(total) for name, total in clipped.private.beside.items()}
        return replace(release(clipped), beside=sums)

    plan = plan_of()
    break_noise(bare)
    assert bound(plan, 500)[1]


def test_half_the_noise_on_one_number_is_refuted(break_noise: BreakNoise) -> None:
    def half(release: Callable[..., NoisySum], clipped: ClippedSum, *_: object) -> NoisySum:
        noisy = release(clipped)
        sums = {n: float(t) for n, t in clipped.private.beside.items()}
        return replace(
            noisy, beside={n: (v + sums.get(n, 0.0)) / 2 for n, v in noisy.beside.items()}
        )

    plan = plan_of()
    break_noise(half)
    assert bound(plan)[1]


def test_a_count_of_zero_and_one_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sensitivity 1, with noise for 1/2: twice as far in the units of the noise.
    def uncentred(methods: Any, observed: Observed) -> dict[str, Tensor]:
        return {m.name: torch.where(observed.shares > 1, 2.0, 0.0).sum() for m in methods}

    plan = plan_of(training_loss=None, adaptive_clipping=AdaptiveClipping(own_noise=2.0))
    assert not bound(plan)[1]
    monkeypatch.setattr(clipped_sum, "side_sums", uncentred)
    assert bound(plan)[1]


def test_noise_scaled_by_the_first_norm_is_refuted(break_noise: BreakNoise) -> None:
    # The norm grows (no record is below it), the noise does not.
    def old(release: Callable[..., NoisySum], clipped: ClippedSum, *_: object) -> NoisySum:
        noisy = release(clipped)
        factor = 1.0 / clipped.claim.max_grad_norm
        gradients = {
            n: clipped.gradients[n] + factor * (g - clipped.gradients[n])
            for n, g in noisy.gradients.items()
        }
        return replace(noisy, gradients=gradients)

    growing = AdaptiveClipping(quantile=0.99, rate=1.5, own_noise=200.0)
    plan = plan_of(
        training_loss=None, adaptive_clipping=growing, steps=3, max_grad_norm=1.0,
        noise_multiplier=2.0,
    )  # fmt: skip
    assert not bound(plan, 600)[1]
    break_noise(old)
    assert bound(plan, 600)[1]


def test_one_run_takes_a_plan_with_a_training_loss() -> None:
    plan = plan_of(40, steps=2, adaptive_clipping=None)
    stage = linear_stage(replace(plan, dataset_size=21, sampler=replace(
        plan.sampler, dataset_size=21
    )))  # fmt: skip

    def batches_of(indices: Any) -> list[Any]:
        return [stage.choose(torch.from_numpy(indices), False)]

    report = audit_one_run(
        plan, stage.model, stage.per_example_loss, batches_of, GradientCanaries(20), seed=0
    )
    assert not report.refuted


def test_one_run_is_for_plans_of_one_norm() -> None:
    plan = plan_of(20, steps=2)
    stage = linear_stage(plan)
    arguments = (stage.model, stage.per_example_loss, lambda indices: [], GradientCanaries(10))
    with pytest.raises(ValueError, match="audit the plan with audit_mechanism"):
        audit_one_run(plan, *arguments)
