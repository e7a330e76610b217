"""What ends up in ``.grad``: the release, with earlier ones that were not stepped on, and nothing
that was not released.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quietgrad.noise import NoisySum


def noisy(value: float) -> NoisySum:
    return NoisySum({"weight": torch.full((1, 2), value)}, 1.0, expected_batch_size=2.0)


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(2, 1, bias=False, dtype=dtype)


def held(model: nn.Linear) -> float:
    return float(model.weight.grad[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_releases_add_up_until_an_optimiser_steps(dtype: torch.dtype) -> None:
    model = linear(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noisy(2.0).write_gradients(model)
    assert held(model) == 1.0
    noisy(4.0).write_gradients(model)
    noisy(2.0).write_gradients(model)
    assert held(model) == 4.0
    optimizer.step()
    noisy(6.0).write_gradients(model)  # zero_grad was forgotten
    assert held(model) == 3.0


class ThroughData(torch.optim.Optimizer):
    """As many optimisers beside torch's own are written."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.Adagrad(p, fused=True),
        ThroughData,
    ],
    ids=["fused sgd", "fused adamw", "foreach adamw", "fused adagrad", "through data"],
)
def test_every_optimisers_step_counts_as_one(make) -> None:
    """Also where zero_grad is forgotten, and the weights' versions do not change."""
    model = linear()
    optimizer = make(model.parameters())
    for _ in range(3):
        noisy(2.0).write_gradients(model)
        assert held(model) == 1.0
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_zero_grad_nothing_is_added_to(set_to_none: bool) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    noisy(2.0).write_gradients(model)
    optimizer.zero_grad(set_to_none=set_to_none)
    noisy(4.0).write_gradients(model)
    assert held(model) == 2.0


def test_a_gradient_that_was_not_released_is_replaced() -> None:
    model = linear()
    x = torch.ones(3, 2)
    model(x).sum().backward()
    noisy(2.0).write_gradients(model)
    assert held(model) == 1.0
    model(x).sum().backward()  # adds 3 to the release
    noisy(2.0).write_gradients(model)
    assert held(model) == 1.0
    model.weight.grad = torch.ones(1, 2)
    noisy(2.0).write_gradients(model)
    assert held(model) == 1.0


def test_what_was_scaled_since_is_replaced() -> None:
    model = linear()
    noisy(2.0).write_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    noisy(2.0).write_gradients(model)
    assert held(model) == 1.0


def test_the_released_sum_stays_as_it_was() -> None:
    model, first = linear(), NoisySum({"weight": torch.ones(1, 2)}, 1.0, expected_batch_size=1)
    first.write_gradients(model)
    noisy(2.0).write_gradients(model)
    assert torch.equal(first.gradients["weight"], torch.ones(1, 2))


def test_a_sum_of_which_nobody_said_the_batch_size_has_no_mean() -> None:
    """A default would be right for one batch size, and silently wrong for all others."""
    released, model = NoisySum({"weight": torch.ones(1, 2)}, 1.0), linear()
    for use in (released.mean, lambda: released.write_gradients(model)):
        with pytest.raises(ValueError, match="expected_batch_size=None: nothing says"):
            use()
    assert model.weight.grad is None
