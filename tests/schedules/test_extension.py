"""Extended plans: the cost is told before any work, the target holds unless another is named, the
ledger never undercounts, and no noise is drawn twice.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_plans import ALL, plan_of, released

from quietgrad.accounting import epsilon
from quietgrad.events import PoissonGaussian
from quietgrad.ledger import planned_course, read_ledger
from quietgrad.ledger.chain import encoded
from quietgrad.plan.by_step.course import longer

pytestmark = pytest.mark.usefixtures("examined_once")


@pytest.mark.parametrize("bands", [1, 3])
def test_a_plain_plan_extended_is_the_longer_plan(bands) -> None:
    noise = {"bands": bands} if bands > 1 else {}
    plan = plan_of(target_epsilon=None, noise_multiplier=1.1, **noise)
    more = plan.extended(steps=4)
    assert more.event == replace(plan.event, steps=13) and more.course is None
    assert more.epsilon == epsilon(more.event, plan.delta) > plan.epsilon
    assert more.phase_lengths == (9, 4)
    assert plan.extended(epochs=0.4).event == more.event
    twice = plan.extended(steps=1).extended(steps=3)
    assert twice.event == more.event and twice.phase_lengths == (9, 1, 3)


def test_a_schedule_goes_on_at_its_last_settings() -> None:
    plan = plan_of(schedules=ALL)
    more = plan.extended(steps=4, target_epsilon=9.0)
    assert [more.at(t) for t in range(9, 13)] == [plan.at(8)] * 4
    assert [more.at(t) for t in range(9)] == [plan.at(t) for t in range(9)]
    assert plan.epsilon < more.epsilon <= 9.0 == more.target_epsilon


@pytest.mark.parametrize("schedules", [None, ALL])
def test_the_target_holds_unless_another_is_named(schedules) -> None:
    plan = plan_of(**({} if schedules is None else {"schedules": schedules}))
    with pytest.raises(ValueError, match=r"in all, above the plan's target of 3; allow it by"):
        plan.extended(steps=1)
    with pytest.raises(ValueError, match=r"above target_epsilon=3\.01; allow it by"):
        plan.extended(steps=20, target_epsilon=3.01)
    total = plan.extended(steps=20, target_epsilon=50.0).epsilon
    assert plan.extended(steps=20, target_epsilon=total).epsilon == total
    with pytest.raises(ValueError, match="neither steps nor epochs"):
        plan.extended(target_epsilon=50.0)
    with pytest.raises(ValueError, match="target_epsilon=-1"):
        plan.extended(steps=1, target_epsilon=-1)


@pytest.mark.grid(4, "mechanisms times ways to go on")
@pytest.mark.parametrize("stopped", [0, 4, 9])
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("schedules", [None, ALL])
def test_a_run_goes_on_with_its_ledger(tmp_path: Path, stopped, bands, schedules) -> None:
    noise = {"bands": bands} if bands > 1 else {}
    plan = plan_of(seed=4, **noise, **({} if schedules is None else {"schedules": schedules}))
    more = plan.extended(steps=4, target_epsilon=9.0)
    path = tmp_path / "ledger.jsonl"
    with plan.start(path) as run:
        sums = released(run, stopped) if stopped else []
    with more.start(path) as run:
        assert run.released == stopped
        sums += released(run, 10 - stopped)
    with more.start(path) as run:
        sums += released(run)
        assert run.released == 13 and run.epsilon() == more.epsilon
    contents = read_ledger(path)
    assert contents.releases == 13 and contents.event == more.event
    assert planned_course(contents)[0] == more.whole_course
    (known,) = contents.extensions
    assert (known.step, known.course.steps, known.target_epsilon) == (stopped, 4, 9.0)
    drawn = [s.gradients["weight"] / s.noise_std for s in sums]  # unlike, so no noise came twice
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert not torch.allclose(one, other, atol=0.1)


def test_an_extension_goes_on_with_a_run_or_not_at_all(tmp_path: Path) -> None:
    """Attack: a run without a ledger, extended and started once more. It made 9 + 13 releases, and
    told the epsilon of 13.
    """
    plan = plan_of(target_epsilon=None, noise_multiplier=1.1)
    with plan.start() as run:
        released(run)
    more = plan.extended(steps=4)
    for ledger in (None, tmp_path / "other.jsonl"):
        with pytest.raises(ValueError, match="holds no run, and this plan is one with steps on"):
            more.start(ledger)
    assert not list(tmp_path.iterdir())  # refused before anything is written


def test_a_plan_without_the_ledger_s_extension_does_not_go_on(tmp_path: Path) -> None:
    plan = plan_of()
    path = tmp_path / "ledger.jsonl"
    plan.start(path).close()
    with plan.extended(steps=4, target_epsilon=9.0).start(path) as run:
        released(run, 2)
    for other in (plan, plan.extended(steps=5, target_epsilon=9.0)):
        with pytest.raises(ValueError, match=r"the run was extended by \[4\] steps"):
            other.start(path)
    further = plan.extended(steps=4, target_epsilon=9.0).extended(steps=2, target_epsilon=9.5)
    with further.start(path) as run:
        released(run)
        assert run.released == 15
    assert len(read_ledger(path).extensions) == 2


@pytest.mark.parametrize("schedules", [None, ALL])
def test_a_ledger_never_counts_a_release_better_than_it_was_planned(
    tmp_path: Path, schedules
) -> None:
    plan = plan_of(**({} if schedules is None else {"schedules": schedules}))
    path = tmp_path / "ledger.jsonl"
    plan.start(path).close()
    with plan.extended(steps=4, target_epsilon=9.0).start(path) as run:
        released(run)
    whole = path.read_bytes().splitlines(keepends=True)
    record = json.loads(whole[-1])
    # a line of other settings, with a chain that fits
    better = {**plan.at(8).to_json(), "noise_multiplier": 99.0}
    forged = {"type": "release", "step": record["step"], "settings": better}

    class Forged:
        def to_json(self) -> dict[str, object]:
            return forged

    line, _ = encoded(len(whole), Forged(), json.loads(whole[-2])["chain"])  # type: ignore[arg-type]
    path.write_bytes(b"".join([*whole[:-1], line]))
    with pytest.raises(ValueError, match=r"has other settings than were planned|another digest"):
        read_ledger(path)


def test_an_extension_counts_from_the_first_step_of_an_old_ledger(tmp_path: Path) -> None:
    # Ledgers of before: plain, of format 2, without anything about extensions.
    plan = plan_of()
    path = tmp_path / "ledger.jsonl"
    with plan.start(path) as run:
        released(run)
    assert json.loads(path.read_bytes().splitlines()[0])["format"] == 2
    more = plan.extended(steps=4, target_epsilon=9.0)
    with more.start(path) as run:
        released(run, 1)
    spent = read_ledger(path).event
    assert spent == PoissonGaussian(plan.noise_multiplier, 0.1, 10)
    assert epsilon(spent, plan.delta) > plan.epsilon


def test_a_longer_matrix_has_the_same_rows_and_short_columns() -> None:
    mixing = plan_of(bands=3).noise.mixing
    assert mixing is not None and longer(None, 3) is None
    for steps in (1, 2, 9, 25):
        whole = longer(mixing, steps)
        assert whole is not None and whole.steps == 9 + steps
        dense = whole.dense()
        assert torch.equal(torch.tensor(dense[:9, :9]), torch.tensor(mixing.dense()))
        assert not dense[9:, :9].any() and not dense[:9, 9:].any()
        assert (dense**2).sum(axis=0).max() <= 1 + 1e-10
