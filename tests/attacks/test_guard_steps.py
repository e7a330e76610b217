"""The guard on another loss, another model, a later step: what was examined once is not examined
for good, and nothing outlives the bound clipper.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.guarded import (
    RECORDS,
    Loss,
    With,
    good,
    hardest_sixteen,
    info_nce,
    plan_of,
    records,
    released,
    rows,
    small,
    without_mean,
)
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.guard import Guard, is_guarded


def test_second_loss_on_a_model_that_saw_a_good_one_is_guarded_anew() -> None:
    for steps_of_good in (1, 3, 6):
        with plan_of().start() as run:
            assert (
                released(run, small(), lambda step, n=steps_of_good: good if step < n else info_nce)
                == steps_of_good
            )


def test_a_fresh_lambda_at_every_step_is_one_loss_and_another_closure_is_not(monkeypatch) -> None:
    examined: list[int] = []
    right = Guard.examine
    monkeypatch.setattr(
        Guard,
        "examine",
        lambda self, s, b, n, step, *more: (
            examined.append(step) or right(self, s, b, n, step, *more)
        ),
    )
    scale = torch.tensor(2.0)
    with plan_of().start() as run:
        assert (
            released(run, small(), lambda step: lambda model, batch: good(model, batch) * scale)
            == 40
        )
    assert examined == [step for step in range(40) if is_guarded(step)] == [0, 1, 3, 7, 15, 31]
    examined.clear()
    with plan_of(6).start() as run:
        assert (
            released(
                run, small(), lambda step: lambda model, batch: good(model, batch) * (1.0 + step)
            )
            == 6
        )
    assert examined == list(range(6))  # the step is closed over: six losses


def test_other_models_and_other_trainable_parameters_are_guarded_anew(monkeypatch) -> None:
    examined: list[int] = []
    right = Guard.examine
    monkeypatch.setattr(
        Guard,
        "examine",
        lambda self, s, b, n, step, *more: (
            examined.append(step) or right(self, s, b, n, step, *more)
        ),
    )
    bound = Clipper(1.0).bind(small(), good)
    for step in (4, 4, 5, 6):  # none of them a guarded step
        bound.clip(records(), step=step)
    assert examined == [4]
    bound.model[0].requires_grad_(False)
    assert set(bound.clip(records(), step=8).gradients) == {"3.weight", "3.bias"}
    bound.model.eval()
    bound.clip(records(), step=8)
    bound.model.train().requires_grad_(True)
    assert len(bound.clip(records(), step=9).gradients) == 4
    assert examined == [4, 8, 8]


def test_nothing_about_models_or_losses_outlives_the_bound_clipper() -> None:
    """A contrastive loss is refused on a model that another clipper, or this one unbound, found
    good a moment ago.
    """
    model = small()
    clipper = Clipper(1.0)
    clipper.clip(model, good, records())
    with pytest.raises(ValueError, match="depends on other examples"):
        clipper.clip(model, info_nce, records())
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).clip(model, info_nce, records())


def test_a_gate_that_opens_later_is_seen_at_the_next_guarded_step() -> None:
    opened = {"at": 5}
    step_now = {"step": 0}

    def change(model: With, h: Tensor) -> Tensor:
        return without_mean(model, h) if step_now["step"] >= opened["at"] else h

    def losses(step: int) -> Loss:
        step_now["step"] = step
        return good

    with plan_of().start() as run:
        assert (
            released(run, With(change), losses) == 7
        )  # releases 1, 2, 4, 8 are guarded: the eighth is not made


def test_a_larger_micro_batch_than_any_before_is_examined_whatever_the_step() -> None:
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), hardest_sixteen)
    bound.clip(rows(records(), *range(4)), step=4)  # fewer than sixteen: nothing is mined yet
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=5)


def test_guarded_steps_are_the_powers_of_two_and_every_512th() -> None:
    assert [n + 1 for n in range(2100) if is_guarded(n)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
        1536,
        2048,
    ]
