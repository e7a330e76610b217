"""A head fitted to public records, or drawn at random: better than chance at once, frozen, and
refused where it makes no sense.
"""

from __future__ import annotations

import pytest
import torch
from tiny_runs import config_of, interrupt_at, train

from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.records import predictions


def test_it_is_fitted_to_half_of_the_validation_records_and_frozen(settings: dict) -> None:
    prepared = prepare(config_of(settings | {"model.public_head_steps": 50, "training.seed": 0}))
    head = prepared.model.classifier.head
    assert float(head.weight.norm()) > 0 and not head.weight.requires_grad
    assert (
        len(prepared.validation) == len(prepared.task.splits.validation) // 2
    )  # the other half was fitted to
    found = predictions(prepared.model.classifier, prepared.validation, 64, prepared.device)
    assert (found == prepared.validation.labels).mean() > 0.7


def test_training_goes_on_above_and_below_it(settings: dict) -> None:
    values = settings | {"model.public_head_steps": 50, "training.seed": 0}
    before = prepare(config_of(values)).model.classifier.head.weight.detach().clone()
    prepared, outcome, _ = train(values)
    assert outcome.result["epsilon"] <= 4.0
    assert prepared.model.classifier.head.weight.equal(before)


def test_a_random_head_has_orthonormal_rows_stays_and_the_body_learns_to_meet_it(
    settings: dict,
) -> None:
    values = settings | {
        "model.random_head": True,
        "model.tune": "full",
        "training.seed": 0,
        "privacy.enabled": False,
    }
    values["training.steps"] = 30
    before = prepare(config_of(values)).model.classifier.head.weight.detach().clone()
    torch.testing.assert_close(before @ before.T, torch.eye(len(before)), atol=1e-5, rtol=0)
    prepared, _, _ = train(values)
    assert prepared.model.classifier.head.weight.equal(before)
    found = predictions(prepared.model.classifier, prepared.validation, 64, prepared.device)
    assert (found == prepared.validation.labels).mean() > 0.8
    assert len(prepared.validation) == len(prepared.task.splits.validation)  # none was fitted to
    other = prepare(config_of(values | {"training.seed": 1})).model.classifier.head.weight
    assert (other - before).norm() > 0.5


def test_a_resumed_run_goes_on_under_the_head_that_it_began_with(settings: dict) -> None:
    """Without a seed the head is drawn from the operating system's entropy: it cannot be drawn
    again.
    """
    values = settings | {
        "model.random_head": True,
        "model.tune": "full",
        "training.checkpoint_every": 1,
    }
    prepared, first, _ = train(values, report=interrupt_at(3))
    assert first.interrupted
    head = prepared.model.classifier.head.weight.detach().clone()
    assert (prepare(config_of(values)).model.classifier.head.weight - head).norm() > 0.5
    again, second, _ = train(values, resume=True)
    assert not second.interrupted and again.model.classifier.head.weight.equal(head)


def test_refusals(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"model\.random_head=True freezes the head"):
        config_of({"model.tune": "head", "model.random_head": True})
    with pytest.raises(ValueError, match="set one of the two"):
        config_of({"model.random_head": True, "model.public_head_steps": 5})
    with pytest.raises(ValueError, match="random_head needs a head on pooled features"):
        prepare(config_of(settings | {"model.random_head": True, "model.head": "auto"}))
    with pytest.raises(ValueError, match="freezes the head"):
        config_of({"model.tune": "head", "model.public_head_steps": 5})
    with pytest.raises(ValueError, match="a head on pooled features"):
        prepare(config_of(settings | {"model.public_head_steps": 5, "model.head": "auto"}))
