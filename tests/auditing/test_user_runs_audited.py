"""One run with users as canaries, each with more records than may stand for a user; and of plans
whose settings change. Right mechanisms are not refuted, wrong ones are.

Keys come from a counter (conftest.py) and coins from seeds, so results repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import changed
from torch import Tensor, nn

from quietgrad import PrivacyConfig, PrivacyPlan, Users
from quietgrad.auditing import AuditReport, GradientCanaries, InputCanaries, audit_one_run
from quietgrad.clipping import BoundClipper, ClippedSum, UserBatch
from quietgrad.loading.draws import users_in_parts
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.sampling import UserIndices
from quietgrad.schedules import Phase

pytestmark = [pytest.mark.statistical, pytest.mark.usefixtures("examined_once")]
RECORDS, CANARIES, MANY, CAP = 120, 100, 12, 8
OWNERS = [f"user {i * i % 37}" for i in range(RECORDS)]
OTHERS = len(set(OWNERS))
CONFIG = PrivacyConfig(
    target_delta=1e-5, noise_multiplier=1.0, sample_rate=0.5, steps=5, users=Users(CAP, "sum")
)


def plan_of(**settings: Any) -> PrivacyPlan:
    canaries = [f"canary {i}" for i in range(CANARIES) for _ in range(MANY)]
    owners = [*OWNERS, *canaries]
    return changed(CONFIG, **settings).build(len(owners), record_owner=owners)


class Training:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(RECORDS, 12, generator=generator)
        self.y = torch.randint(0, 4, (RECORDS,), generator=generator)
        torch.manual_seed(0)
        self.model = nn.Linear(12, 64)  # as many entries as canaries need for their own
        far = 3 * torch.randn(CANARIES, 12, generator=generator)
        self.canaries = (far, torch.arange(CANARIES) % 64)

    def batches_of(self, drawn: UserIndices) -> Iterator[UserBatch]:
        for users in users_in_parts(drawn, 32) if len(drawn) else [drawn]:
            index = torch.from_numpy(users.records)
            yield UserBatch((self.x[index], self.y[index]), users.sizes)

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def audit(kind: str = "gradient", **settings: Any) -> AuditReport:
    training, plan = Training(), plan_of(**settings)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)

    def update(noisy: NoisySum) -> None:
        noisy.write_gradients(training.model)
        optimizer.step()

    chosen: Any = GradientCanaries(CANARIES)
    if kind == "input":
        chosen = InputCanaries(training.canaries)
    return audit_one_run(
        plan, training.model, training.loss, training.batches_of, chosen, update=update, seed=0
    )


@pytest.mark.grid(2, "kinds of canaries times plans, three seconds each")
@pytest.mark.parametrize("kind", ["gradient", "input"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"users": Users(CAP, "mean", "fresh")}, {"bands": 2, "steps": 6}],
    ids=["sum", "mean", "bands"],
)
def test_users_with_many_records_are_protected(kind: str, settings: dict[str, Any]) -> None:
    report = audit(kind, **settings)
    assert not report.refuted and report.trials == CANARIES
    assert report.neighbouring.startswith("add-remove-user") and "per user" in report.verdict


def test_where_there_is_no_noise_to_speak_of_users_are_found() -> None:
    """So the canaries are there, and are looked for in the right places."""
    report = audit("input", noise_multiplier=0.02, sample_rate=1.0)
    found = report.finding("releases", "guesses in one run").evidence
    # All 100 are called. Chance gives 50; directions that canaries share cost a few.
    assert found.correct > 85  # type: ignore[union-attr]


def test_records_clipped_one_by_one_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user then gives eight times C."""
    clip = BoundClipper.clip

    def one_by_one(self: Any, batch: Any, *rest: Any, **options: Any) -> ClippedSum:
        parts = batch if isinstance(batch, Iterator) else iter([batch])
        plain = self.__dict__.setdefault(
            "of_records",
            BoundClipper(replace(self.clipper, combined=None), self.model, self.per_example_loss),
        )
        sums = []
        for part in parts:
            found = clip(plain, part.records, *rest, **options)
            counted = replace(found.private, examples=len(part.sizes))
            sums.append(replace(found, private=counted))
        total = sums[0]
        for more in sums[1:]:
            total = total + more
        return total

    settings: dict[str, Any] = {"noise_multiplier": 5.0, "sample_rate": 1.0}
    assert not audit("input", **settings).refuted
    monkeypatch.setattr(BoundClipper, "clip", one_by_one)
    assert audit("input", **settings).refuted


def test_no_more_than_the_cap_stands_for_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    clip = BoundClipper.clip

    def looking(self: Any, batch: Any, *rest: Any, **options: Any) -> ClippedSum:
        if isinstance(batch, UserBatch):
            seen.append(batch.sizes)
        return clip(self, batch, *rest, **options)

    monkeypatch.setattr(BoundClipper, "clip", looking)
    audit("input", sample_rate=1.0, steps=1)
    assert max(size for sizes in seen for size in sizes) == CAP < MANY


def test_canaries_among_the_others_are_refused() -> None:
    training = Training()
    shuffled = CONFIG.build(4, record_owner=["a", "b", "a", "c"])
    with pytest.raises(ValueError, match=r"record_owner=\[\*owners, \*owners_of_canaries\]"):
        audit_one_run(
            shuffled, training.model, training.loss, training.batches_of, GradientCanaries(2)
        )


PHASES = (Phase(steps=2, noise=0.5), Phase(steps=3, batch_size=0.4, clipping_norm=2.0))


@pytest.mark.parametrize("kind", ["gradient", "input"])
def test_plans_that_change_are_audited(kind: str) -> None:
    report = audit(kind, phases=PHASES, steps=None)
    assert not report.refuted
    assert not any("trade-off" in finding.method for finding in report.findings)
    if kind == "gradient":
        assert report.finding("releases", "guesses in one run").epsilon > 0


def test_correlated_noise_that_changes_is_refused() -> None:
    with pytest.raises(ValueError, match="audit it with independent noise"):
        audit(phases=PHASES, steps=None, bands=2)
