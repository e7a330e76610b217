"""Plans whose settings change run with the settings of each step, and every epsilon that is told of
them is the same one.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import changed
from torch import nn

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.accounting import epsilon, epsilon_report
from quietgrad.beside import TrainingLoss
from quietgrad.denoising import OnMomentum, SpectralSGD, SpikesWithBulk
from quietgrad.denoising.moment import MomentNoise
from quietgrad.events import ExactClipping, PoissonGaussian
from quietgrad.ledger import read_ledger
from quietgrad.ledger.chain import count_path
from quietgrad.noise import BandedNoise, NoisySum
from quietgrad.schedules import Constant, Cosine, Linear, Phase, Schedules, Stepwise

pytestmark = pytest.mark.usefixtures("examined_once")

RECORDS = 80
CONFIG = PrivacyConfig(
    target_epsilon=3.0, target_delta=1e-3, expected_batch_size=8, steps=9, data_are_public=True
)
ALL = Schedules(Cosine(2.0, 1.0), Linear(1.0, 0.25), Linear(1.0, 3.0))


def plan_of(**changes) -> PrivacyPlan:
    return changed(CONFIG, **changes).build(RECORDS)


def loss(model: nn.Module, batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (RECORDS,), generator=generator)
    return torch.randn(RECORDS, 40, generator=generator), labels


def released(run, steps: int | None = None) -> list[NoisySum]:
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(40, 3), data()
    return [run.step(model, loss, (x[i], y[i])) for i in run.batches(steps)]


@pytest.mark.parametrize(
    "changes", [{}, {"schedules": ALL}, {"bands": 3}, {"training_loss": TrainingLoss(high=3.0)}]
)
def test_scaled_noise_is_what_runs_and_what_is_counted(changes) -> None:
    plan = plan_of(seed=1, **changes)
    more = plan.scaled(1.5)
    assert more.event == plan.event_scaled(1.5) and more.target_epsilon is None
    assert more.epsilon == epsilon(more.event, plan.delta) < plan.epsilon
    for step in range(plan.steps):
        wanted = 1.5 * plan.at(step).noise_multiplier
        assert more.at(step).noise_multiplier == pytest.approx(wanted, rel=1e-12)
    with plan.start() as one, more.start() as other:
        for a, b in zip(released(one, 2), released(other, 2), strict=True):
            assert b.noise_std == pytest.approx(1.5 * a.noise_std)


@pytest.mark.parametrize("bands", [1, 3])
def test_a_constant_schedule_is_the_plain_plan_to_the_bit(bands) -> None:
    noise = {"bands": bands} if bands > 1 else {}
    plain = plan_of(seed=1, **noise)
    same = [
        plan_of(seed=1, schedules=Schedules(Constant(1.0), Linear(1, 1), Cosine(1, 1)), **noise),
        plan_of(seed=1, schedules=Schedules(noise=7.0), **noise),  # the scale takes it up
        plan_of(seed=1, steps=None, phases=(Phase(steps=4), Phase(steps=5)), **noise),
    ]
    with plain.start() as run:
        expected = released(run)
    for plan in same:
        assert plan.course is None and plan.event == plain.event and plan.report == plain.report
        with plan.start() as run:
            for got, want in zip(released(run), expected, strict=True):
                assert got.noise_std == want.noise_std
                assert got.expected_batch_size == want.expected_batch_size
                assert all(torch.equal(g, want.gradients[n]) for n, g in got.gradients.items())


@pytest.mark.parametrize("bands", [1, 3])
def test_a_shape_is_calibrated_to_the_target(bands) -> None:
    noise = {"bands": bands} if bands > 1 else {}
    plan = plan_of(schedules=ALL, **noise)
    assert 2.97 <= plan.epsilon <= 3.0
    sigmas = [plan.at(t).noise_multiplier for t in range(9)]
    assert sigmas[0] == pytest.approx(2 * sigmas[-1]) and plan.noise_multiplier == min(sigmas)
    assert plan.at(4).sample_rate == pytest.approx(0.1 * 2.0)
    assert plan.multiplier_for() == pytest.approx(plan.noise_multiplier, rel=1e-3)


def test_sketched_clipping_takes_schedules() -> None:
    changes = Schedules(Stepwise((2.0, 1.0), (4,)), batch_size=Stepwise((1.0, 2.0), (4,)))
    plan = plan_of(schedules=changes, estimator="hutch", sketch_dim=32)
    assert 2.97 <= plan.epsilon <= 3.0
    assert plan.noise_multiplier > plan_of(schedules=changes).noise_multiplier
    with plan.start() as run:
        assert len({noisy.noise_std for noisy in released(run)}) == 2


def test_every_step_runs_with_its_own_settings() -> None:
    plan = plan_of(schedules=ALL)
    with plan.start() as run:
        sums = released(run)
    for step, noisy in enumerate(sums):
        own = plan.at(step)
        assert noisy.noise_std == own.noise_multiplier * own.max_grad_norm
        assert noisy.expected_batch_size == pytest.approx(8 * (1 + 2 * step / 8))
        assert plan.clipper_at(step).max_grad_norm == pytest.approx(1 - 0.75 * step / 8)


def test_noise_and_batches_are_what_was_said(monkeypatch) -> None:
    """Measured over 40,000 entries a step, and 300 runs' batches; false alarm below 1e-6 each: the
    noise's deviation within 2.5 %, seven of its standard errors; batch sizes within six.
    """
    plan = plan_of(schedules=ALL, seed=3)
    model = nn.Linear(199, 200)
    x, y = torch.zeros(RECORDS, 199), torch.zeros(RECORDS, dtype=torch.long)
    with plan.start() as run:
        for step, _ in enumerate(run.batches()):
            empty = run.contribution({n: torch.zeros(0, *p.shape) for n, p in params(model)}, 0)
            monkeypatch.setattr(type(run._open), "require_sum", lambda *_: None)
            noisy = run.release(empty)
            entries = torch.cat([g.flatten() for g in noisy.gradients.values()])
            own = plan.at(step)
            expected = own.noise_multiplier * own.max_grad_norm
            assert float(entries.std()) == pytest.approx(expected, rel=0.025)
            # the plan's least noise, unscaled
            assert float(entries.std()) != pytest.approx(plan.noise_multiplier, rel=0.025)
    sizes = np.zeros(9)
    for seed in range(300):
        with plan_of(schedules=ALL, seed=seed).start() as run:
            key = run._session.key
            sizes += [len(plan.indices(key, step)) for step in range(9)]
    expected = np.array([RECORDS * plan.at(t).sample_rate for t in range(9)])
    error = np.sqrt(expected * (1 - expected / RECORDS) / 300)
    assert (np.abs(sizes / 300 - expected) < 6 * error).all()
    assert (np.abs(sizes / 300 - expected[0]) > 6 * error)[1:].all()
    assert len(x) == len(y) == RECORDS


def params(model: nn.Module):
    return list(model.named_parameters())


@pytest.mark.parametrize("bands", [1, 3])
def test_resumes_and_all_that_tells_epsilon_agree(tmp_path: Path, bands) -> None:
    noise = {"bands": bands} if bands > 1 else {}
    plan = plan_of(schedules=ALL, seed=2, **noise)
    with plan.start() as run:
        whole = released(run)
    path, parts, spent = tmp_path / "ledger.jsonl", [], []
    for steps in (2, 3, None):
        with plan.start(path) as run:
            parts += released(run, steps)
            spent.append(run.epsilon())
        contents = read_ledger(path)
        assert contents.event == plan.event.after(contents.releases)
        assert epsilon(contents.event, plan.delta) == spent[-1]
    assert spent == sorted(spent) and spent[-1] == plan.epsilon
    for got, want in zip(parts, whole, strict=True):
        assert got.noise_std == want.noise_std
        assert all(torch.allclose(g, want.gradients[n]) for n, g in got.gradients.items())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["format"] == 3  # versions that would count the first for all refuse it
    own = [line["settings"] for line in lines if line["type"] == "release"]
    assert own == [plan.at(t).to_json() for t in range(9)]


def test_another_schedule_does_not_go_on_with_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    plan = plan_of(schedules=ALL, target_epsilon=None, noise_multiplier=1.0)
    with plan.start(path) as run:
        released(run, 2)
    other = Schedules(Cosine(2.0, 1.0), Linear(1.0, 0.25), Linear(1.0, 2.9))
    for schedules in (other, Schedules()):
        with pytest.raises(ValueError, match="resume with a changed privacy setting: "):
            plan_of(schedules=schedules, target_epsilon=None, noise_multiplier=1.0).start(path)


def test_a_torn_release_counts_with_the_settings_planned_for_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    plan = plan_of(schedules=ALL)
    with plan.start(path) as run:
        released(run, 3)
        count = count_path(path).read_bytes()
        released(run, 1)
    ledger = path.read_bytes()
    path.write_bytes(ledger[:-20])  # counted, so the rest of it is proved
    assert read_ledger(path).event == plan.event.after(4)
    with plan.start(path) as run:
        assert run.released == 4
    count_path(path).write_bytes(count)
    path.write_bytes(ledger[:-20])  # not counted: the noise was not drawn, and it counts
    assert read_ledger(path).event == plan.event.after(4)
    with plan.start(path) as run:
        assert run.released == 4
        released(run)
    assert epsilon(read_ledger(path).event, plan.delta) == plan.epsilon


@pytest.mark.parametrize(
    "what", ["event", "event and report", "course", "sampler", "noise", "clipper", "none"]
)
def test_a_plan_that_would_run_otherwise_than_accounted_is_refused(what) -> None:
    plan = plan_of(schedules=ALL)
    louder = plan.course.scaled(1.5).event(plan.event.clipping)
    wrong = {
        "event and report": {"event": louder, "report": epsilon_report(louder, plan.delta)},
        # the first step's settings for all
        "event": {"event": PoissonGaussian(plan.at(0).noise_multiplier, 0.1, 9, ExactClipping())},
        "course": {"course": plan.course.scaled(0.9)},
        "sampler": {"sampler": replace(plan.sampler, sample_rate=0.1)},
        "noise": {"noise": replace(plan.noise, noise_multiplier=plan.at(0).noise_multiplier)},
        "clipper": {"clipper": plan.clipper.clipping_to(3.0)},
        "none": {"course": None},
    }
    with pytest.raises(ValueError, match=r"build plans with PrivacyConfig\.build"):
        replace(plan, **wrong[what])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedules": 2.0}, "schedules=2.0 is no record"),
        ({"schedules": Schedules(noise="cosine")}, "schedules.noise='cosine' is no schedule"),
        ({"schedules": Schedules(batch_size=Linear(1, 11))}, "schedules.batch_size reaches"),
        (
            # Before: at the step itself, after the releases before it.
            {"schedules": Schedules(clipping_norm=Linear(1.0, 1e-20))},
            "schedules.clipping_norm reaches 1e-20 times",
        ),
        ({"schedules": Schedules(clipping_norm=1e20)}, "schedules.clipping_norm reaches 1e+20"),
        ({"schedules": Schedules(Stepwise((1.0, 2.0), (9,)))}, "use steps below 9"),
        ({"phases": (Phase(steps=3),)}, "steps=9 with phases"),
        ({"steps": None, "phases": (Phase(),)}, "give exactly one of phases[0].steps and"),
        ({"steps": None, "phases": (3,)}, "phases holds 3"),
        ({"steps": None, "phases": Phase(steps=3)}, "is a single one; pass a list, [Phase(...)]"),
        (
            {"steps": None, "phases": (Phase(steps=3),), "schedules": ALL},
            "with phases: a phase has its own",
        ),
        ({"steps": None, "epochs": 1e308}, "epochs=1e+308 are inf steps at sampling rate 0.1"),
        (
            {"steps": None, "epochs": 2.0, "schedules": ALL},
            "with a schedule of the batch size",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, told) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(told)):
        plan_of(**changes)


def test_a_schedule_of_the_clipping_norm_alone_costs_nothing() -> None:
    plan = plan_of(schedules=Schedules(clipping_norm=Linear(1.0, 0.1)))
    assert plan.event == plan_of().event and plan.course is not None


def test_phases_are_calibrated_together_and_looped_over() -> None:
    phases = (Phase(epochs=0.4), Phase(noise=Linear(0.5, 0.7), batch_size=2.0, steps=5))
    plan = plan_of(steps=None, phases=phases)
    assert plan.phase_lengths == (4, 5) and 2.97 <= plan.epsilon <= 3.0
    assert plan.at(4).noise_multiplier == pytest.approx(plan.at(0).noise_multiplier / 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 5), nn.Tanh(), nn.Linear(5, 3))
    (x, y), seen = data(), []
    with plan.start() as run:
        for phase, steps in run.phases():
            model[0].requires_grad_(phase == 1)  # the head alone first
            for i in run.batches(steps):
                noisy = run.step(model, loss, (x[i], y[i]))
                seen.append((phase, len(noisy.gradients), noisy.expected_batch_size))
    assert seen == [(0, 2, 8.0)] * 4 + [(1, 4, 16.0)] * 5


def test_optimisers_of_a_denoised_moment_see_each_step_s_noise() -> None:
    plan = plan_of(schedules=ALL)
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(40, 3), data()
    optimizer = SpectralSGD(model, OnMomentum(SpikesWithBulk()), lr=0.1, momentum=0.5)
    variance = 0.0
    with plan.start() as run:
        for i in run.batches():
            noisy = run.step(model, loss, (x[i], y[i]))
            optimizer.step(noisy)
            optimizer.zero_grad()
            variance = 0.25 * variance + (noisy.noise_std / noisy.expected_batch_size) ** 2
    (level,) = optimizer.param_groups[0]["moment_noise"]
    assert MomentNoise(**level).std == pytest.approx(variance**0.5)


def test_an_audit_refuses_settings_that_change() -> None:
    from quietgrad.auditing import audit_mechanism

    with pytest.raises(ValueError, match="audit it without schedules"):
        audit_mechanism(plan_of(schedules=ALL), runs=200)


def test_banded_noise_takes_any_schedule_of_a_given_matrix() -> None:
    plan = plan_of(noise=BandedNoise(3), schedules=ALL)
    sigmas = [plan.at(t).noise_multiplier for t in range(9)]
    # turns of three steps, each at its least noise and highest rate
    turns = [(min(sigmas[t : t + 3]), plan.at(t + 2).sample_rate) for t in (0, 3, 6)]
    assert [(e.noise_multiplier, e.sample_rate) for e in plan.event.events] == turns
    assert all(e.compositions == 1 and e.bands == 3 for e in plan.event.events)
