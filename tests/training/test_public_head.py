"""A head fitted to public records: better than chance at once, frozen, and refused where it makes no sense."""

from __future__ import annotations

import pytest
from tiny_runs import config_of, train

from quietgrad.training.prepare import prepare
from quietgrad.training.records import predictions


def test_it_is_fitted_to_half_of_the_validation_records_and_frozen(settings: dict) -> None:
    prepared = prepare(config_of(settings | {"model.public_head_steps": 50, "training.seed": 0}))
    head = prepared.model.classifier.head
    assert float(head.weight.norm()) > 0 and not head.weight.requires_grad
    assert len(prepared.validation) == len(prepared.task.splits.validation) // 2  # the other half was fitted to
    found = predictions(prepared.model.classifier, prepared.validation, 64, prepared.device)
    assert (found == prepared.validation.labels).mean() > 0.7


def test_training_goes_on_above_and_below_it(settings: dict) -> None:
    values = settings | {"model.public_head_steps": 50, "training.seed": 0}
    before = prepare(config_of(values)).model.classifier.head.weight.detach().clone()
    prepared, outcome, _ = train(values)
    assert outcome.result["epsilon"] <= 4.0
    assert prepared.model.classifier.head.weight.equal(before)


def test_refusals(settings: dict) -> None:
    with pytest.raises(ValueError, match="freezes the head"):
        config_of({"model.tune": "head", "model.public_head_steps": 5})
    with pytest.raises(ValueError, match="mean-pooled head"):
        prepare(config_of(settings | {"model.public_head_steps": 5, "model.head": "auto"}))
