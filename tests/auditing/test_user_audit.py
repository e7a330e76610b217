"""A user with many records is protected at the printed epsilon, and the wrong ways are not: records
of a user clipped one by one, records drawn one by one, users cut into micro-batches.

Keys come from a counter (conftest.py), so results repeat. With fresh keys a right mechanism would
be refuted with probability at most 0.05 an audit, and by the Monte Carlo with 4e-6 a run of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plans import changed
from torch import Tensor, nn

from quietgrad import PrivacyConfig, PrivacyPlan, Users
from quietgrad.auditing import Stage, audit_mechanism
from quietgrad.auditing.stage import linear_stage, weighted_outputs
from quietgrad.clipping import BoundClipper, ClippedSum, UserBatch
from quietgrad.clipping.capture.examples import Examples
from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler, UserIndices

pytestmark = [pytest.mark.statistical, pytest.mark.usefixtures("examined_once")]
MANY = 24  # records of the user who is or is not there
OTHERS = 8  # users of one or two records
OWNERS = [f"other {i % OTHERS}" for i in range(12)] + ["many"] * MANY
CONFIG = PrivacyConfig(
    noise_multiplier=1.0, sample_rate=0.1, steps=1, target_delta=0.01, users=Users(MANY, "sum")
)


def plan_of(**settings: Any) -> PrivacyPlan:
    return changed(CONFIG, **settings).build(len(OWNERS), record_owner=OWNERS)


def stage() -> Stage:
    """The others' records have gradients of all kinds; all of the user's pull one way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator)
    order = torch.tensor(sorted(range(12), key=lambda i: i % OTHERS))
    known = UserBatch((x[order], torch.ones(12, 2)), (2, 2, 2, 2, 1, 1, 1, 1))
    canary = UserBatch((torch.full((MANY, 3), 3.0), torch.ones(MANY, 2)), (MANY,))
    return Stage(nn.Linear(3, 2, bias=False), weighted_outputs, known, canary)


def clipped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is shortened to C for itself; the sum still counts users."""
    clip = BoundClipper.clip

    def instead(self: Any, batch: Any, *rest: Any, **options: Any) -> ClippedSum:
        one_by_one = replace(self.clipper, combined=None)
        bound = self.__dict__.setdefault(
            "of_records", BoundClipper(one_by_one, self.model, self.per_example_loss)
        )
        found = clip(bound, batch.records, *rest, **options)
        return replace(found, private=replace(found.private, examples=len(batch.sizes)))

    monkeypatch.setattr(BoundClipper, "clip", instead)


def cut_by_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who does not fit into a micro-batch of four is clipped in pieces."""

    def in_pieces(self: Examples, size: int) -> Any:
        assert self.sizes is not None
        whose = [i for i, n in enumerate(self.sizes) for _ in range(n)]
        for start in range(0, len(whose), 4):
            part = whose[start : start + 4]
            sizes = tuple(part.count(i) for i in dict.fromkeys(part))
            rows = (tensor[start : start + 4] for tensor in self.records)
            yield Examples(tuple(rows), sizes, 1, self.combined)

    monkeypatch.setattr(Examples, "parts", in_pieces)
    clip = BoundClipper.clip

    def counting_users(self: Any, batch: Any, *rest: Any, **options: Any) -> ClippedSum:
        found = clip(self, batch, *rest, **options)
        return replace(found, private=replace(found.private, examples=len(batch.sizes)))

    monkeypatch.setattr(BoundClipper, "clip", counting_users)


def drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin for every record: a user is there where one record is."""

    def records(self: PoissonSampler, key: RandomKey, step: int) -> UserIndices:
        assert self.users is not None
        coins = key.generator("sampling", step).random(len(self.users.order)) < self.sample_rate
        ends = self.users.offsets
        own = {
            user: self.users.order[ends[user] : ends[user + 1]][coins[ends[user] : ends[user + 1]]]
            for user in range(self.users.count)
        }
        there = [user for user, found in own.items() if len(found)]
        chosen = [own[user] for user in there] or [np.zeros(0, dtype=np.int64)]
        sizes = tuple(len(own[user]) for user in there)
        return UserIndices(np.array(there, dtype=np.int64), np.concatenate(chosen), sizes)

    monkeypatch.setattr(PoissonSampler, "batch", records)


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "records clipped one by one": clipped_one_by_one,
    "users cut by micro-batches": cut_by_micro_batches,
    "records drawn one by one": drawn_one_by_one,
}


@pytest.mark.grid(2, "plans audited at three seconds each")
@pytest.mark.parametrize(
    "settings",
    [{}, {"users": Users(MANY, "mean")}, {"estimator": "hutch"}, {"bands": 2, "steps": 2}],
    ids=str,
)
def test_a_user_with_many_records_is_protected(settings: dict[str, Any]) -> None:
    report = audit_mechanism(plan_of(**settings), stage(), kind="input", runs=200, seed=0)
    assert not report.refuted and report.neighbouring == "add-remove-user"
    assert "per user" in report.verdict


@pytest.mark.slow("800 runs of a right mechanism")
def test_most_of_the_claim_is_shown() -> None:
    """So the audit would see less noise: it is no weak attack that finds nothing."""
    plan = plan_of(sample_rate=1.0)
    report = audit_mechanism(plan, stage(), kind="input", runs=800, seed=0)
    assert not report.refuted
    assert report.finding("whole run", "trade-off").epsilon > 0.5 * report.claimed


@pytest.mark.parametrize("wrong", WRONG)
def test_the_wrong_way_is_refuted(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[wrong](monkeypatch)
    rate = 0.1 if "drawn" in wrong else 1.0
    plan = plan_of(sample_rate=rate)
    runs = 400 if "drawn" in wrong else 120
    report = audit_mechanism(plan, stage(), kind="input", runs=runs, seed=0)
    assert report.refuted and "per user" in report.verdict


def released(plan: PrivacyPlan, model: nn.Module, x: Tensor) -> float:
    """What one run of the loader releases along the user's gradient."""
    with plan.start() as run:
        run.starts.trains = False  # nothing steps on what is released
        for batch in run.loader([(row,) for row in x], steps=1, physical_batch_size=4):
            noisy = run.release(run.clip(model, along, batch))
            return float(noisy.gradients["weight"].sum() / math.sqrt(3))
    raise AssertionError


def along(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The gradient of a record is the record; the others' are zero."""
    return model(batch[0]).sum(1)  # type: ignore[no-any-return]


def excess(rate: float, runs: int) -> float:
    """P(S | with the user) - e^epsilon P(S | without) - delta by frequencies, in deviations, for
    the set of releases that tells most.
    """
    plan = plan_of(sample_rate=rate)
    without = changed(CONFIG, sample_rate=rate).build(12, record_owner=OWNERS[:-MANY])
    model = nn.Linear(3, 1, bias=False)
    x = torch.cat([torch.zeros(12, 3), torch.full((MANY, 3), 5.0)])
    present = np.array([released(plan, model, x) for _ in range(runs)])
    absent = np.array([released(without, model, x[:12]) for _ in range(runs)])
    # Where the likelihoods' ratio is e^epsilon: (1 - q) + q exp(s - 1/2) at sigma = C = 1.
    weight = math.exp(plan.epsilon)
    threshold = math.log((weight - 1 + rate) / rate) + 0.5
    one, two = (present > threshold).mean(), (absent > threshold).mean()
    spread = 0.25 + weight**2 * max(two, 1 / runs)
    return float((one - weight * two - plan.delta) / math.sqrt(spread / runs))


@pytest.mark.slow("thousands of runs of a right mechanism, half a minute")
@pytest.mark.parametrize(("rate", "runs"), [(0.5, 120), (0.1, 500)])
def test_frequencies_stay_within_epsilon_and_delta(rate: float, runs: int) -> None:
    assert excess(rate, runs) < 4.5


@pytest.mark.slow("thousands of runs of the loader, half a minute together")
@pytest.mark.parametrize("wrong", WRONG)
def test_frequencies_of_the_wrong_way_do_not(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[wrong](monkeypatch)
    assert excess(*((0.1, 500) if "drawn" in wrong else (0.5, 120))) > 4.5


def test_audits_of_single_records_are_refused() -> None:
    with pytest.raises(ValueError, match="pass a Stage whose records and canary are"):
        linear_stage(plan_of())
