"""A script that sets torch's default device: what the library makes for itself lies where its own
numbers are drawn. "meta" stands for a GPU; what is made there by mistake holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.denoising import PersistentAmplification, SpectralAdamW, SpikesWithBulk
from quietgrad.noise import BandedNoise, IndependentNoise

pytestmark = pytest.mark.usefixtures("elsewhere")

X, Y = torch.randn(60, 10), torch.arange(60) % 2


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def begun() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 80), nn.Tanh(), nn.Linear(80, 2)).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator("cpu").manual_seed(0))
    return model


@pytest.mark.parametrize("bands", [1, 2])
@pytest.mark.parametrize("source", ["keyed", "secure"])
def test_no_release_is_lost_to_noise_drawn_elsewhere(source: Any, bands: int) -> None:
    if source == "secure":
        pytest.importorskip("cryptography")
    noise = IndependentNoise(source) if bands == 1 else BandedNoise(bands, source=source)
    model = begun()
    plan = PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=3,
        steps=4,
        noise=noise,
        training_loss=TrainingLoss(),
        adaptive_clipping=AdaptiveClipping(),
    ).build(60)
    with plan.start() as run:
        for batch in run.loader(torch.utils.data.TensorDataset(X, Y), steps=4):
            noisy = run.backward(model, loss, batch)
            assert all(g.device.type == "cpu" for g in noisy.gradients.values())
    assert run.released == 4


@pytest.mark.parametrize("in_the_optimiser", [False, True])
def test_denoising_searches_where_the_gradients_are(in_the_optimiser: bool) -> None:
    model = begun()
    plan = PrivacyConfig(
        noise_multiplier=0.1,
        expected_batch_size=20,
        steps=3,
        denoising=None if in_the_optimiser else SpikesWithBulk(),
    ).build(60)
    optimizer = SpectralAdamW(model, PersistentAmplification())
    with plan.start() as run:
        for indices in run.batches():
            noisy = run.backward(model, loss, (X[indices], Y[indices]))
            if in_the_optimiser:
                optimizer.step(noisy)
    assert all(p.isfinite().all() for p in model.parameters())
