"""What a denoiser makes of a run follows from what was released: from the releases and the first
weights alone the same weights come out, to the bit, by another start and without the data.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig, Users
from quietgrad.beside import AdaptiveClipping
from quietgrad.clipping import UserBatch
from quietgrad.denoising import (
    ConstantAmplification,
    HardThreshold,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpectralAdamW,
    SpectralSGD,
    SpikesWithBulk,
)
from quietgrad.noise import NoisySum

USERS, STEPS = 40, 9
Make = Callable[[nn.Module], Any]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 5))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


GRADIENT = [PublishedShrinkage(kappa=1.0), SpikesWithBulk(kappa=1.0), HardThreshold()]
MOMENT: list[tuple[str, Make]] = [
    ("adamw persistent", lambda m: SpectralAdamW(m, PersistentAmplification(), lr=0.01)),
    ("adamw constant", lambda m: SpectralAdamW(m, ConstantAmplification(1.0, delay=2), lr=0.01)),
    (
        "sgd on momentum",
        lambda m: SpectralSGD(m, OnMomentum(SpikesWithBulk(1.0)), lr=0.1, weight_decay=0.1),
    ),
]


def released(rule: Any, make: Make, model: nn.Module) -> list[NoisySum]:
    """What a run for users released, with a norm that adapts and dropout."""
    owners = [i // 3 for i in range(3 * USERS)]
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(len(owners), 12, generator=draw), torch.randint(0, 5, (len(owners),))
    config = PrivacyConfig(
        noise_multiplier=0.3, sample_rate=0.3, steps=STEPS, max_grad_norm=3.0, denoising=rule,
        adaptive_clipping=AdaptiveClipping(), users=Users(records_per_user=2),
    )  # fmt: skip
    optimizer, found = make(model), []
    with config.build(len(owners), record_owner=owners).start() as run:
        for indices in run.batches():
            rows = torch.as_tensor(indices.records)
            noisy = run.backward(model, loss, UserBatch((x[rows], y[rows]), indices.sizes))
            found.append(noisy)
            step(optimizer, noisy)
    return found


def step(optimizer: Any, noisy: NoisySum) -> None:
    if isinstance(optimizer, SpectralAdamW | SpectralSGD):
        optimizer.step(noisy)
    else:
        optimizer.step()


def again(rule: Any, make: Make, model: nn.Module, given: list[NoisySum], stop: int) -> None:
    """The same from releases alone, with a stop: what goes on has the state that was saved."""
    optimizer = make(model)
    for number, noisy in enumerate(given):
        if number == stop:
            kept = pickle.loads(pickle.dumps(optimizer.state_dict()))
            optimizer = make(model)
            optimizer.load_state_dict(kept)
        denoised = noisy if rule is None else rule.denoise(noisy, model)
        denoised.write_gradients(model)
        step(optimizer, noisy)


def ways() -> list[Any]:
    by_rule = [pytest.param(rule, adamw, id=type(rule).__name__) for rule in GRADIENT]
    return [*by_rule, *(pytest.param(None, make, id=name) for name, make in MOMENT)]


@pytest.mark.parametrize(("rule", "make"), ways())
def test_weights_follow_from_what_was_released(rule: Any, make: Make) -> None:
    model = small()
    start = copy.deepcopy(model)
    given = released(rule, make, model)
    again(rule, make, start, given, stop=4)
    for name, parameter in start.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize(("rule", "make"), ways())
def test_another_release_would_be_seen(rule: Any, make: Make) -> None:
    model = small()
    start = copy.deepcopy(model)
    given = released(rule, make, model)
    given[5] = replace(given[5], gradients={n: g * 1.001 for n, g in given[5].gradients.items()})
    again(rule, make, start, given, stop=4)
    same = [torch.equal(a, b) for a, b in zip(start.parameters(), model.parameters(), strict=True)]
    assert not all(same)
