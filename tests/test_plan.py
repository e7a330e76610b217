"""One configuration to one plan: what is checked, what is refused, and that a run keeps to it."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import changed
from torch import nn

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.accounting import epsilon, epsilon_report
from quietgrad.accounting.calibrate import EPSILON_TOLERANCE
from quietgrad.clipping import ClippedSum, Clipper
from quietgrad.denoising import PersistentAmplification, SpikesWithBulk
from quietgrad.events import Envelope, ExactClipping, RandomizedClipping
from quietgrad.noise import BandedNoise, GaussianNoise
from quietgrad.plan import PrivateRun
from quietgrad.sampling import PoissonSampler

RECORDS = 60
CONFIG = PrivacyConfig(noise_multiplier=1.2, expected_batch_size=6, steps=8)


def plan_of(dataset_size: int = RECORDS, **changes: object) -> PrivacyPlan:
    """Made-up data are public, so short seeds are allowed."""
    return changed(CONFIG, data_are_public=True, **changes).build(dataset_size)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, 5, generator=generator), torch.randint(
        0, 3, (RECORDS,), generator=generator
    )


def train(plan: PrivacyPlan) -> tuple[nn.Module, list[np.ndarray]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    batches = []
    with plan.start() as run:
        for indices in run.batches():
            run.step(model, loss, (x[indices], y[indices]))
            optimizer.step()
            batches.append(indices)
    return model, batches


def clip(run: PrivateRun):
    """The sum of the next batch."""
    indices = next(run.batches())
    x, y = data()
    return run.clip(nn.Linear(5, 3), loss, (x[indices], y[indices]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("target_epsilon", "noise_multiplier"),
        ("expected_batch_size", "sample_rate"),
        ("steps", "epochs"),
    ],
)
def test_exactly_one_of_a_pair(one: str, other: str) -> None:
    complete = {"noise_multiplier": 1.2, "expected_batch_size": 6, "steps": 8}
    values = {"target_epsilon": 3.0, "sample_rate": 0.1, "epochs": 1.0} | complete
    rest = {k: v for k, v in complete.items() if k not in (one, other)}
    for pair in ({}, {one: values[one], other: values[other]}):
        with pytest.raises(
            ValueError, match=f"exactly one of {one} and {other}|exactly one of {other} and {one}"
        ):
            PrivacyConfig(**rest, **pair).build(RECORDS)
    for name in (one, other):
        PrivacyConfig(**rest, **{name: values[name]}).build(RECORDS)


def test_rates_steps_and_epochs() -> None:
    plan = plan_of()
    assert plan.event.sample_rate == plan.sampler.sample_rate == 0.1
    assert plan.expected_batch_size == pytest.approx(6)
    assert plan_of(steps=None, epochs=2.5).steps == 25
    assert plan_of(steps=None, epochs=0.001).steps == 1
    assert plan_of(expected_batch_size=RECORDS).event.sample_rate == 1.0


def test_delta_defaults_below_one_over_n() -> None:
    for n in (100, 1000, 1_000_000):
        assert plan_of(n).delta == pytest.approx(n**-1.1)
    for n in (
        1,
        2,
        10,
        RECORDS,
    ):  # of few records: a run that publishes them all once in a hundred times is none
        assert plan_of(n, expected_batch_size=1).delta == 0.01
    assert plan_of(target_delta=1e-5).delta == 1e-5


@pytest.mark.parametrize(
    ("records", "delta"),
    [
        (RECORDS, 1 / RECORDS),
        (RECORDS, 0.5),
        (RECORDS, 0.9),
        (2, 0.5),
        (2, 0.2),
        (1, 0.9),
        (1, 0.1),
    ],
)
def test_delta_of_one_over_n_and_more_is_refused(records: int, delta: float) -> None:
    with pytest.raises(ValueError, match=f"={delta} is not below .*less than .*default is 0.01"):
        plan_of(records, expected_batch_size=1, target_delta=delta)


def test_delta_below_one_over_n_is_taken() -> None:
    assert plan_of(target_delta=0.99 / RECORDS).delta == 0.99 / RECORDS
    assert plan_of(1, expected_batch_size=1, target_delta=0.09).delta == 0.09


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"expected_batch_size": RECORDS + 1},
            f"expected_batch_size={RECORDS + 1} exceeds.*use at most {RECORDS}",
        ),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"expected_batch_size": None, "sample_rate": 1.1}, "sample_rate"),
        ({"noise_multiplier": 0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": None, "target_epsilon": 0}, "target_epsilon"),
        ({"noise_multiplier": None, "target_epsilon": -1.0}, "target_epsilon"),
        ({"noise_multiplier": None, "target_epsilon": math.inf}, "target_epsilon"),
        ({"target_delta": 0}, "target_delta"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf}, "max_grad_norm"),
        ({"steps": 0}, "steps"),
        ({"steps": None, "epochs": 0}, "epochs"),
        ({"estimator": "ghots"}, "estimator='ghots'"),
        ({"estimator": "hutch", "sketch_dim": 1}, "sketch_dim"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0"),
        ({"seed": -1}, "seed"),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_bad_values_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(**change)


@pytest.mark.parametrize("change", [{"steps": 2.5}, {"steps": True}, {"seed": 1.5}], ids=str)
def test_counts_must_be_whole_numbers(change: dict) -> None:
    with pytest.raises(TypeError, match=next(iter(change))):
        plan_of(**change)


def test_dataset_size_must_be_a_positive_whole_number() -> None:
    with pytest.raises(TypeError, match="dataset_size"):
        plan_of(60.0)
    with pytest.raises(ValueError, match="dataset_size"):
        plan_of(0)


def test_plans_and_configurations_are_frozen() -> None:
    plan = plan_of()
    for frozen, field in (
        (plan, "noise"),
        (CONFIG, "seed"),
        (plan.noise, "noise_multiplier"),
        (plan.event, "steps"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, field, None)


def other_parts(plan: PrivacyPlan) -> dict[str, dict[str, object]]:
    return {
        "less noise": {"noise": GaussianNoise(0.5)},
        "sketched norms": {"clipper": Clipper(1.0, "hutch")},
        "another rate": {"sampler": PoissonSampler(RECORDS, 0.5)},
        "other data": {"sampler": PoissonSampler(RECORDS + 1, 0.1)},
        "event of another noise": {"event": replace(plan.event, noise_multiplier=9.0)},
        "event of another rate": {"event": replace(plan.event, sample_rate=0.01)},
        "event of sketches": {"event": replace(plan.event, clipping=RandomizedClipping(32))},
        # The sampler is plain Poisson: two bands would halve the compositions that are accounted
        # for.
        "event with bands": {"event": replace(plan.event, bands=2)},
        # The report belongs to eight steps at the plan's delta; it would go on saying so.
        "event of more steps": {"event": replace(plan.event, steps=800)},
        "another delta": {"delta": 1e-12},
        "records of users clipped": {"clipper": replace(plan.clipper, combined="mean")},
    }


@pytest.mark.parametrize("part", sorted(other_parts(plan_of())))
def test_parts_of_different_plans_are_refused(part: str) -> None:
    plan = plan_of()
    with pytest.raises(ValueError, match=r"build plans with PrivacyConfig\.build"):
        replace(plan, **other_parts(plan)[part])


def test_an_event_of_fewer_turns_is_refused_with_its_own_report_too() -> None:
    plan = plan_of()
    event = replace(plan.event, bands=2)
    with pytest.raises(ValueError, match="bands=2 is accounted for, but the noise"):
        replace(plan, event=event, report=epsilon_report(event, plan.delta))


def test_consistent_sketched_parts_are_refused_only_when_they_differ() -> None:
    plan = plan_of(estimator="hutch", sketch_dim=32)
    with pytest.raises(ValueError, match="accounted for"):
        replace(plan, clipper=Clipper(1.0, "hutch", 16))  # smaller sketches need more noise
    with pytest.raises(ValueError, match="accounted for"):
        replace(plan, event=replace(plan.event, clipping=ExactClipping()))
    assert replace(plan, clipper=Clipper(1.0, "hutch", 32, 2)).epsilon == plan.epsilon


def test_run_makes_no_more_releases_than_planned() -> None:
    run = plan_of(steps=3).start()
    for _ in range(3):
        run.release(clip(run))
    last = ClippedSum({}, run.plan.clipper.claim)
    with pytest.raises(RuntimeError, match="all 3 releases of the plan are made"):
        run.release(last)
    assert run.released == 3
    assert list(run.batches()) == []


@pytest.mark.parametrize("steps", [-1, 2.5, float("nan"), "3", True])
def test_a_loop_has_a_whole_number_of_steps(steps: Any) -> None:
    """Before: nan were all that remain, 2.5 three, and -1 none without a word."""
    with pytest.raises((TypeError, ValueError), match=f"steps={steps!r} "):
        next(plan_of().start().batches(steps))


def test_skipping_a_batch_is_an_error() -> None:
    run = plan_of().start()
    batches = run.batches()
    next(batches)
    with pytest.raises(RuntimeError, match="not released"):
        next(batches)


def test_releasing_a_batch_twice_is_an_error() -> None:
    # The accountant takes every release's batch to be drawn afresh; the same records in two
    # releases are not covered.
    run = plan_of().start()
    clipped = clip(run)
    run.release(clipped)
    with pytest.raises(RuntimeError, match="released already"):
        run.release(clipped)


def test_clipped_sum_with_another_claim_is_refused() -> None:
    run = plan_of().start()
    next(run.batches())
    x, y = data()
    for other in (Clipper(2.0), Clipper(1.0, "hutch"), Clipper(0.5)):
        with pytest.raises(ValueError, match="the plan accounts for"):
            run.release(other.clip(nn.Linear(5, 3), loss, (x, y)))
    assert run.released == 0
    with pytest.raises(RuntimeError, match="was not made by this run"):  # the same claim
        run.release(
            Clipper(1.0, "ghost", physical_batch_size=2).clip(nn.Linear(5, 3), loss, (x, y))
        )


def test_noise_follows_the_clipping_norm() -> None:
    for clip_norm in (0.1, 5.0):
        run = plan_of(max_grad_norm=clip_norm).start()
        assert run.release(clip(run)).noise_std == pytest.approx(1.2 * clip_norm)


@pytest.mark.parametrize(("estimator", "envelope"), [("hutch", "convex"), ("hutch++", "hutch++")])
def test_sketches_are_accounted_for_as_randomized_and_need_more_noise(
    estimator: str, envelope: Envelope
) -> None:
    private = {"noise_multiplier": None, "target_epsilon": 2.0}
    exact = plan_of(**private)
    sketched = plan_of(**private, estimator=estimator, sketch_dim=16)
    assert exact.event.clipping == ExactClipping()
    assert sketched.event.clipping == RandomizedClipping(16, envelope)
    assert sketched.noise_multiplier > exact.noise_multiplier
    assert sketched.epsilon <= 2.0
    # With the noise of exact clipping, the sketched run spends more than the target.
    assert (
        epsilon(replace(sketched.event, noise_multiplier=exact.noise_multiplier), sketched.delta)
        > 2.0
    )
    assert (
        plan_of(**private, estimator=estimator, sketch_dim=64).noise_multiplier
        < sketched.noise_multiplier
    )


@pytest.mark.grid(1, "three numbers of projections")
@pytest.mark.parametrize("sketch_dim", [2, 3, 8])
def test_few_projections_cost_more_and_warn_of_nothing(sketch_dim: int) -> None:
    few, many = (plan_of(estimator="hutch", sketch_dim=k) for k in (sketch_dim, 2 * sketch_dim))
    assert plan_of().epsilon < many.epsilon < few.epsilon < math.inf


@pytest.mark.parametrize("estimator", ["auto", "exact", "materialized", "ghost"])
def test_exact_estimators_cost_no_noise(estimator: str) -> None:
    assert plan_of(estimator=estimator).event == plan_of().event


@pytest.mark.parametrize("target", [0.3, 2.0, 8.0])
def test_spent_epsilon_grows_and_ends_at_the_plans(target: float) -> None:
    plan = plan_of(noise_multiplier=None, target_epsilon=target)
    run = plan.start()
    spent = [run.epsilon()]
    for _ in range(plan.steps):
        run.release(clip(run))
        spent.append(run.epsilon())
    assert spent[0] == 0
    assert all(a < b for a, b in pairwise(spent))
    assert spent[-1] == plan.epsilon
    assert target - 2 * EPSILON_TOLERANCE < plan.epsilon <= target


def test_seed_makes_runs_identical_bit_for_bit() -> None:
    for estimator in ("exact", "hutch"):
        (one, batches), (other, same) = (
            train(plan_of(seed=4, estimator=estimator)) for _ in range(2)
        )
        assert all(np.array_equal(a, b) for a, b in zip(batches, same, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("seeds", [(None, None), (4, 5)])
def test_without_a_common_seed_runs_differ(seeds: tuple) -> None:
    (one, batches), (other, different) = (train(plan_of(seed=seed)) for seed in seeds)
    assert not all(np.array_equal(a, b) for a, b in zip(batches, different, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))


def test_entropy_seeded_runs_ignore_torchs_seed() -> None:
    # A user's torch.manual_seed for reproducible weights must not make the noise predictable.
    noises = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        run = plan_of(estimator="hutch").start()
        indices = next(run.batches())
        nothing = run.contribution({"weight": torch.zeros(len(indices), 3, 5)}, len(indices))
        noises.append(run.release(nothing).gradients["weight"])
    assert not torch.equal(*noises)


def test_projections_differ_between_releases_and_not_between_micro_batches() -> None:
    torch.manual_seed(0)
    run = plan_of(estimator="hutch", sketch_dim=8, max_grad_norm=1e-3, seed=1).start()
    model, (x, y) = nn.Linear(5, 3), data()
    one_example = (x[:1], y[:1])
    norms = []  # of the contribution of one and the same example: C / sqrt(R), R random
    for _ in range(3):
        indices = next(run.batches())
        parts = [run.clip(model, loss, one_example) for _ in range(2)]
        found = {float(part.gradients["weight"].norm()) for part in parts}
        assert len(found) == 1
        norms += found
        run.release(run.clip(model, loss, (x[indices], y[indices])))
    assert len(set(norms)) == len(norms)


@pytest.mark.parametrize(
    ("changes", "ids", "error", "message"),
    [
        (
            {"mixing": np.eye(10)},
            None,
            TypeError,
            "mixing must be what quietgrad.noise.mixing_matrix returned, not ndarray",
        ),
        (
            {"noise": "banded"},
            None,
            TypeError,
            "noise='banded' is no record; pass one, such as Ind",
        ),
        (
            {"clipping": "ghost"},
            None,
            TypeError,
            "clipping='ghost' is no record; pass one, such as Clipp",
        ),
        ({"performance": 64}, None, TypeError, "performance=64 is no record"),
        ({"denoising": "paper"}, None, TypeError, "denoising='paper' is no rule"),
        (
            {"denoising": SpikesWithBulk},
            None,
            TypeError,
            "is no rule; pass one, such as SpikesWithBulk",
        ),
        (
            {"denoising": PersistentAmplification()},
            None,
            TypeError,
            "denoising=.* acts inside the optimiser",
        ),
        ({"bands": 2, "family": "wide"}, None, ValueError, "family='wide' is unknown"),
        ({"bands": 2, "memory": "none"}, None, ValueError, "memory='none' is unknown"),
        (
            {"bands": 2},
            ["a", "b"] * 50,
            TypeError,
            "record_ids holds a record of type str; give bytes",
        ),
    ],
)
def test_what_is_of_another_type_is_named(
    changes: dict[str, Any], ids: Any, error: type[Exception], message: str
) -> None:
    config = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-5, expected_batch_size=10, steps=10
    )
    with pytest.raises(error, match=message):
        changed(config, **changes).build(100, ids)


def gradients_after(run: PrivateRun, how: str) -> list[torch.Tensor]:
    """What ``.grad`` holds after the next batch, taken whole or in micro-batches."""
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(5, 3), data()
    indices = next(run.batches())
    if how == "whole":
        noisy = run.backward(model, loss, (x[indices], y[indices]))
    else:
        noisy = run.backward(model, loss, ((x[i : i + 1], y[i : i + 1]) for i in indices))
    assert noisy.expected_batch_size == run.plan.expected_batch_size
    found = [p.grad for p in model.parameters()]
    for gradient, mean in zip(found, noisy.mean().values(), strict=True):
        assert torch.equal(gradient, mean)
    return found


def test_backward_takes_a_batch_or_its_micro_batches() -> None:
    whole, parts = (gradients_after(plan_of(seed=3).start(), how) for how in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-6
        )  # the sum's rounding; the same noise


def test_an_iterator_without_a_micro_batch_is_refused_before_anything_is_released() -> None:
    run = plan_of().start()
    next(run.batches())
    with pytest.raises(ValueError, match=r"gave no micro-batch; .* give one empty micro-batch"):
        run.backward(nn.Linear(5, 3), loss, iter(()))
    assert run.released == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": 1e-320}, "noise_multiplier=1e-320 is below 1e-06: no epsilon"),
        ({"noise_multiplier": 1e300}, r"noise_multiplier=1e\+300 is above 1e\+18: sums of float32"),
        ({"noise_multiplier": 10**400}, "noise_multiplier is a whole number beyond 1e308"),
        ({"steps": 10**400}, "steps is a whole number beyond 1e308"),
        ({"sample_rate": 0.1}, "expected_batch_size=6 and sample_rate=0.1: give exactly one"),
    ],
    ids=["tiny", "vast", "huge", "long", "both"],
)
def test_numbers_beyond_what_can_be_accounted_for(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(**change)


def test_a_plan_is_printed_without_its_matrix() -> None:
    text = repr(plan_of(noise=BandedNoise(2)))
    assert "mixing=MixingMatrix" not in text and "PoissonGaussian" in text and "[" not in text
