"""Averaged weights: the formula, what a model holds when, and runs that save what validation
records prefer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quietgrad.averaging import ExponentialAverage


def test_the_average_is_the_recursion_with_its_warm_up() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = ExponentialAverage(model, decay=0.5)
    expected, frozen = model.weight.detach().double().clone(), model.bias.detach().clone()
    for t in range(20):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update()
        keep = min(0.5, (1 + t) / (10 + t))
        expected = keep * expected + (1 - keep) * model.weight.detach().double()
    own = model.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(model.weight.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(model.bias, frozen)
    assert torch.equal(model.weight, own)
    average.write()
    torch.testing.assert_close(model.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_own_weights_come_back_after_an_error() -> None:
    model = nn.Linear(2, 2)
    average = ExponentialAverage(model)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(KeyError), average.applied():
        assert model.weight.abs().sum() > 0
        raise KeyError
    assert not model.weight.any()


def test_changes_below_a_half_precision_digit_add_up() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(256.0)
    average = ExponentialAverage(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(258.0)
    average.steps = 100_000
    for _ in range(1000):  # each moves the average by less than bfloat16 can hold there
        average.update()
    with average.applied():
        assert model.weight.item() == 258.0 or model.weight.item() == 256.0
    assert 257.2 < average.state_dict()["averages"]["weight"].item() < 257.3


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_it_goes_on_where_the_precision_of_the_model_is_changed(kinds: tuple) -> None:
    model = nn.Linear(2, 1, bias=False).to(kinds[0])
    average = ExponentialAverage(model, decay=0.5)
    before = model.weight.detach().double().clone()
    model.to(kinds[1])
    with torch.no_grad():
        model.weight.fill_(1.0)
    average.update()  # with a weight of 0.9
    found = average.state_dict()["averages"]["weight"]
    assert found.dtype == kinds[1]
    torch.testing.assert_close(found.double(), 0.1 * before + 0.9)


def test_a_saved_average_goes_on() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    averages = [ExponentialAverage(model, 0.9) for model in models]
    averages[0].update()
    averages[1].load_state_dict(averages[0].state_dict())
    assert averages[1].steps == 1
    with averages[0].applied(), averages[1].applied():
        assert torch.equal(models[0].weight, models[1].weight)
    with pytest.raises(ValueError, match="other parameters"):
        ExponentialAverage(nn.Linear(3, 2)).load_state_dict(averages[0].state_dict())


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), "0.97"])
def test_decays_that_are_none_are_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match="decay="):
        ExponentialAverage(nn.Linear(1, 1), decay)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable"):
        ExponentialAverage(nn.Linear(1, 1).requires_grad_(False))


def test_a_run_saves_what_validation_records_prefer(quietgrad, settings, write_config) -> None:
    config = write_config(settings | {"training.averaging": 0.9})
    code, out, _ = quietgrad("train", config, "--json")
    result = json.loads(out)
    assert code == 0 and result["weights"] in ("averaged", "last")
    folder = Path(settings["training.run_dir"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["averaged_validation_accuracy"] <= 1 for line in lines)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    averages, last = saved["average"]["averages"], saved["trainable"]
    assert saved["average"]["steps"] == 6
    assert any(not torch.equal(value, last[name]) for name, value in averages.items())


def test_an_average_that_never_moves_is_refused(quietgrad, settings, write_config) -> None:
    code, _, err = quietgrad("plan", write_config(settings | {"training.averaging": 1.0}))
    assert code == 2 and "averaging=1.0 never takes in a step" in err
