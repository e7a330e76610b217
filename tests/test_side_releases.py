"""Plans and runs with a private training loss and an adaptive clipping norm: what is estimated,
what is written down, and what is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import changed
from torch import Tensor, nn

from quietgrad import Clipping, PrivacyConfig, PrivateRun
from quietgrad.accounting import epsilon
from quietgrad.beside import AdaptiveClipping, PrivateEstimate, TrainingLoss
from quietgrad.beside.session import SideSession
from quietgrad.beside.values import releases_beside
from quietgrad.clipping import per_example_norms
from quietgrad.denoising import SpikesWithBulk
from quietgrad.events import PoissonGaussian, SideRelease
from quietgrad.ledger import read_ledger
from quietgrad.noise import BandedNoise, NoisySum

LOSS, ADAPTIVE = TrainingLoss(high=4.0), AdaptiveClipping(quantile=0.7)
CONFIG = PrivacyConfig(
    target_epsilon=2.0,
    max_grad_norm=5.0,
    expected_batch_size=50,
    steps=40,
    training_loss=LOSS,
    adaptive_clipping=ADAPTIVE,
    seed=3,
    data_are_public=True,
)
RECORDS = 500


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 6, generator=generator)
    return x, (x[:, 0] > 0).long()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def steps(run: PrivateRun, model: nn.Module, count: int | None = None) -> list[NoisySum]:
    x, y = data()
    optimizer, made = torch.optim.SGD(model.parameters(), 0.2), []
    for drawn in run.batches(count):
        index = torch.from_numpy(drawn)
        made.append(run.backward(model, loss, (x[index], y[index])))
        optimizer.step()
        optimizer.zero_grad()
    return made


def test_both_are_off_unless_asked_for() -> None:
    plain = replace(CONFIG, training_loss=None, adaptive_clipping=None).build(RECORDS)
    assert plain.event == PoissonGaussian(plain.noise_multiplier, 0.1, 40)
    assert plain.told_beside() == {} and "beside" not in plain.event.to_json()
    with plain.start() as run:
        made = steps(run, build(), 2)
        assert run.training_loss is None and run.max_grad_norm == 5.0 and run.shown() == {}
    assert made[0].beside == {}


@pytest.mark.parametrize("past_the_counter", [False, True])
def test_a_number_beside_that_was_changed_after_clipping_is_not_released(
    past_the_counter: bool,
) -> None:
    # Before its noise a record may add 1 to it at most: a hundred times that is no bound.
    with CONFIG.build(RECORDS).start() as run:
        count = len(next(run.batches()))
        gradients = torch.ones(count, 3)
        clipped = run.contribution({"w": gradients}, count, torch.ones(count))
        side = clipped.private.beside[LOSS.name]
        (side.data if past_the_counter else side).mul_(100)
        with pytest.raises(RuntimeError, match="changed after it was clipped"):
            run.release(clipped)
        assert run.released == 0


def test_the_target_covers_both_and_the_gradients_pay_half_a_per_cent_each() -> None:
    plan = CONFIG.build(RECORDS)
    assert 1.99 < plan.epsilon <= 2.0
    assert plan.epsilon == epsilon(plan.event, plan.delta)
    alone = replace(CONFIG, training_loss=None, adaptive_clipping=None).build(RECORDS)
    assert 1.005 < plan.noise_multiplier / alone.noise_multiplier < 1.02
    names = {LOSS.name: 1, ADAPTIVE.name: 1}
    assert {side.name: side.every for side in plan.event.beside} == names
    assert plan.multiplier_for() == pytest.approx(plan.noise_multiplier, rel=1e-3)


def test_the_estimate_is_of_the_mean_loss_and_says_how_noisy_it_is() -> None:
    config = replace(
        CONFIG, target_epsilon=None, noise_multiplier=1.0, sample_rate=1.0,
        expected_batch_size=None, adaptive_clipping=None, steps=200,
    )  # fmt: skip
    plan, model = config.build(RECORDS), build()
    x, y = data()
    true = float(loss(model, (x, y)).mean().detach())
    errors, last = [], None
    with plan.start() as run:
        for drawn in run.batches():
            index = torch.from_numpy(drawn)
            run.release(run.clip(model, loss, (x[index], y[index])))
            last = run.training_loss
            assert last is not None and last.release == run.released
            errors.append((last.value - true) / last.noise_std)
    assert last is not None
    (nu,) = (side.noise_multiplier for side in plan.event.beside)
    assert last.noise_std == pytest.approx(2.0 * nu / RECORDS)
    # 200 standard normal errors; a factor of 1.5 and a missing middle of the range are seen.
    assert abs(np.mean(errors)) < 5 / 200**0.5 and 0.75 < np.std(errors) < 1.25
    assert last.smoothed_noise_std == pytest.approx(last.noise_std * (0.1 / 1.9) ** 0.5, rel=1e-3)
    assert abs(last.smoothed - true) < 5 * last.smoothed_noise_std
    assert str(last).endswith("(private estimate)")


def test_noise_and_its_average_are_said_by_hand() -> None:
    """Mutants: half the range, or squares, left out of what is told of the noise; every step paid
    for as if it were every third.
    """
    every_third = TrainingLoss(low=1.0, high=9.0, own_noise=3.0, every=3, smoothing=0.5)
    releases = releases_beside((every_third,), 1.0)
    assert releases == (SideRelease(LOSS.name, 3.0, 3),)
    session = SideSession((every_third,), releases, 50.0, 5.0)
    session.take(1, {LOSS.name: 25.0})
    first = session.training_loss
    assert first == PrivateEstimate(1, 7.0, 4.0 * 3 / 50, 7.0, 4.0 * 3 / 50)
    session.take(4, {LOSS.name: 0.0})
    assert (second := session.training_loss) is not None
    assert (second.value, second.smoothed) == (5.0, pytest.approx((0.25 * 7 + 0.5 * 5) / 0.75))
    std = 0.24 * (0.25**2 + 0.5**2) ** 0.5 / 0.75
    assert second.smoothed_noise_std == pytest.approx(std)


def test_what_is_shown_is_released_and_nothing_else() -> None:
    plan = CONFIG.build(RECORDS)
    session = SideSession(plan.beside, plan.event.beside, 50.0, 5.0)
    with plan.start() as run:
        for number, noisy in enumerate(steps(run, build(), 5), start=1):
            session.take(number, noisy.beside)
        assert session.shown() == run.shown()  # a function of releases
        assert run.shown().keys() == {
            "private_training_loss",
            "private_training_loss_noise_std",
            "clipping_norm",
        }


def test_the_clipping_norm_finds_its_quantile() -> None:
    generous = replace(
        CONFIG, target_epsilon=None, noise_multiplier=0.5, training_loss=None, steps=60,
    )  # fmt: skip
    for first in (0.05, 50.0):
        plan, model = replace(generous, max_grad_norm=first).build(RECORDS), build()
        x, y = data()
        with plan.start() as run:
            for drawn in run.batches():
                index = torch.from_numpy(drawn)
                run.release(run.clip(model, loss, (x[index], y[index])))
            found = run.max_grad_norm
        norms = per_example_norms(model, loss, data())
        assert float((norms < found).float().mean()) == pytest.approx(0.7, abs=0.15)


def test_norms_and_levels_follow_the_releases() -> None:
    plan = CONFIG.build(RECORDS)
    with plan.start() as run:
        norm = 5.0
        for noisy in steps(run, build(), 6):
            assert noisy.noise_std == pytest.approx(plan.noise_multiplier * norm)
            fraction = min(max(0.5 + noisy.beside[ADAPTIVE.name] / (2 * 50.0), 0.0), 1.0)
            norm *= math.exp(-0.2 * (fraction - 0.7))
        assert run.max_grad_norm == pytest.approx(norm)


def test_a_denoiser_is_told_the_noise_of_the_step() -> None:
    seen: list[tuple[float, float]] = []

    class Watching:
        def denoise(self, noisy: NoisySum, model: nn.Module | None = None) -> NoisySum:
            denoised = SpikesWithBulk().denoise(noisy, model)
            seen.append((noisy.noise_std, denoised.noise_std))
            return denoised

    plan = replace(CONFIG, denoising=Watching()).build(RECORDS)
    with plan.start() as run:
        made = steps(run, build(), 4)
    assert [level for level, _ in seen] == [noisy.noise_std for noisy in made]
    assert len({level for level, _ in seen}) == 4


def lines_of(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def test_the_ledger_has_the_event_and_every_norm_before_its_release(tmp_path: Path) -> None:
    plan, ledger = CONFIG.build(RECORDS), tmp_path / "ledger.jsonl"
    norms = []
    with plan.start(ledger) as run:
        for _ in range(5):
            norms.append(run.max_grad_norm)
            steps(run, build(), 1)
        norms.append(run.max_grad_norm)
    lines = lines_of(ledger)
    assert lines[0]["event"]["beside"] == plan.told_beside()["beside"]
    assert lines[0]["max_grad_norm"] == norms[0] == 5.0
    said = {
        line["step"]: line["max_grad_norm"] for line in lines if line["type"] == "clipping-norm"
    }
    assert said == dict(enumerate(norms[1:], start=1))
    order = [(line["type"], line["step"]) for line in lines if "step" in line][1:]
    assert order[:5] == [
        ("release", 0), ("clipping-norm", 1), ("release", 1), ("clipping-norm", 2), ("release", 2),
    ]  # fmt: skip
    contents = read_ledger(ledger)
    assert contents.max_grad_norm == norms[-1] and contents.event == plan.event.after(5)
    assert epsilon(contents.event, plan.delta) < plan.epsilon


@pytest.mark.parametrize("bands", [1, 4])
def test_a_run_that_was_stopped_goes_on_with_its_norm(tmp_path: Path, bands: int) -> None:
    config = replace(CONFIG, noise=BandedNoise(bands)) if bands > 1 else CONFIG
    plan, whole = config.build(RECORDS), build()
    with plan.start() as run:
        steps(run, whole, 12)
        expected = run.max_grad_norm
    stopped = build()
    for count in (5, 7):
        with plan.start(tmp_path / "l.jsonl", tmp_path / "keys") as run:
            steps(run, stopped, count)
            norm = run.max_grad_norm
    assert norm == expected
    assert torch.equal(whole.weight, stopped.weight)


def test_after_a_kill_the_norm_is_the_last_that_was_written(tmp_path: Path) -> None:
    plan, ledger = CONFIG.build(RECORDS), tmp_path / "l.jsonl"
    with plan.start(ledger) as run:
        steps(run, build(), 4)
        before = run.max_grad_norm
        text, count = ledger.read_bytes(), Path(f"{ledger}.count").read_bytes()
        steps(run, build(), 1)
        later = ledger.read_bytes()
    rest = later[len(text) :]
    release, norm = rest.splitlines(keepends=True)
    assert b'"release"' in release and b'"clipping-norm"' in norm
    Path(f"{ledger}.count").write_bytes(count)
    ledger.write_bytes(text + release)  # killed before the norm's line
    with plan.start(ledger) as run:
        assert run.released == 5 and run.max_grad_norm == before
        (noisy,) = steps(run, build(), 1)
        assert noisy.noise_std == pytest.approx(plan.noise_multiplier * before)


def test_a_resume_with_other_numbers_beside_is_refused(tmp_path: Path) -> None:
    ledger = tmp_path / "l.jsonl"
    with CONFIG.build(RECORDS).start(ledger) as run:
        steps(run, build(), 2)
    others = [
        replace(CONFIG, training_loss=None),
        replace(CONFIG, adaptive_clipping=None),
        replace(CONFIG, training_loss=replace(LOSS, share=0.2)),
        replace(CONFIG, adaptive_clipping=replace(ADAPTIVE, every=2)),
    ]
    for other in others:
        with pytest.raises(ValueError, match="resume with a changed privacy setting: event"):
            other.build(RECORDS).start(ledger)


def test_a_plan_whose_parts_do_not_belong_together_is_refused() -> None:
    plan = CONFIG.build(RECORDS)
    quiet = tuple(replace(s, noise_multiplier=s.noise_multiplier / 2) for s in plan.event.beside)
    wrong = [
        {"noise": replace(plan.noise, beside=quiet)},  # less noise than accounted for
        {"noise": replace(plan.noise, beside=())},
        {"training_loss": None},
        {"clipper": replace(plan.clipper, beside=())},
        {"training_loss": replace(LOSS, high=8.0)},  # a wider range than the clipper's
        {"event": replace(plan.event, beside=()), "report": replace(
            plan.report, event=replace(plan.event, beside=())
        )},
    ]  # fmt: skip
    for parts in wrong:
        with pytest.raises(ValueError, match="released beside the gradients"):
            replace(plan, **parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 5.0}, "low=5.0 and high=5.0 are no range"),
        ({"high": math.inf}, "high=inf"),
        ({"low": math.nan}, "low=nan"),
        ({"low": 0.0, "high": 5e-324}, "are no range"),
        ({"share": 0.5}, "share=0.5 of the budget is above 0.4"),
        ({"share": 0.0}, "share=0.0"),
        ({"share": 0.1, "own_noise": 3.0}, "share=0.1 and own_noise=3.0 are both given"),
        ({"own_noise": 0}, "own_noise=0"),
        ({"every": 0}, "every=0"),
        ({"smoothing": 1.0}, "smoothing=1.0 never takes in a step"),
    ],
)
def test_bad_training_losses_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingLoss(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantile": 0.0}, "quantile=0.0 must be above 0"),
        ({"quantile": 1.0}, "quantile=1.0"),
        ({"rate": 0}, "rate=0"),
        ({"share": 0.41}, "share=0.41"),
    ],
)
def test_bad_adaptive_clipping_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveClipping(**settings)


def test_what_does_not_go_together_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"adaptive_clipping with clipping.scaling='automatic'"):
        replace(CONFIG, clipping=Clipping(scaling="automatic")).build(RECORDS)
    with pytest.raises(TypeError, match=r"training_loss=True must be a quietgrad.beside"):
        replace(CONFIG, training_loss=True).build(RECORDS)
    with pytest.raises(TypeError, match="adaptive_clipping='LOSS'"):
        replace(CONFIG, adaptive_clipping="LOSS").build(RECORDS)


def test_the_norm_stays_in_its_range_and_moves_by_at_most_its_rate() -> None:
    assert ADAPTIVE.next_norm(1.0, 1e9, 50.0) == pytest.approx(math.exp(-0.2 * 0.3))
    assert ADAPTIVE.next_norm(1.0, -1e9, 50.0) == pytest.approx(math.exp(0.2 * 0.7))
    assert ADAPTIVE.next_norm(1e-15, 1e9, 50.0) == 1e-15
    assert ADAPTIVE.next_norm(1e15, -1e9, 50.0) == pytest.approx(1e15)
    fast = AdaptiveClipping(rate=1e4)  # overflowed, when the count was written down and drawn
    assert fast.next_norm(1.0, -1e9, 50.0) == pytest.approx(1e15)
    assert fast.next_norm(1.0, 1e9, 50.0) == 1e-15


def test_sketches_and_bands_are_accounted_for_with_both() -> None:
    sketched = changed(
        replace(CONFIG, target_epsilon=None, noise_multiplier=3.0), estimator="hutch"
    )
    plan = sketched.build(RECORDS)
    assert plan.epsilon > epsilon(replace(plan.event, beside=()), plan.delta)
    with plan.start() as run:
        made = steps(run, build(), 3)
    assert all(len(noisy.beside) == 2 for noisy in made)
    assert isinstance(plan.event.beside[0], SideRelease)
    assert isinstance(run.training_loss, PrivateEstimate)


def test_plans_whose_settings_change_are_refused() -> None:
    from quietgrad.schedules import Linear, Phase, Schedules

    changing = [
        {"schedules": Schedules(noise=Linear(1.0, 2.0))},
        {"phases": (Phase(steps=5), Phase(steps=5)), "steps": None},
    ]
    for settings in changing:
        with pytest.raises(ValueError, match="plans whose steps are all alike"):
            replace(CONFIG, **settings).build(RECORDS)
    with pytest.raises(ValueError, match="an extension"):
        CONFIG.build(RECORDS).extended(steps=3)
