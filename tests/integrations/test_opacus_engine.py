"""An Opacus script's engine: what is accounted for, how much noise there is, what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from quietgrad.checks import SettingsWarning
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaNoise,
    StepNoise,
)
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from quietgrad.integrations.opacus.validators import ModuleValidator, UnsupportedModuleError

DELTA = 1e-5


def data(n: int = 60, batch_size: int = 10) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, 5, generator=draw)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=batch_size, shuffle=True)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def made(
    engine: PrivacyEngine | None = None, model: nn.Module | None = None, **options: Any
) -> Any:
    model = net() if model is None else model
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": data()} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine() if engine is None else engine
    return engine, *engine.make_private(module=model, optimizer=optimizer, **options)


def train(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("accountant", "opacus"),
    [("prv", PRVAccountant), ("rdp", RDPAccountant), ("gdp", PRVAccountant)],
)
def test_epsilon_is_that_of_opacus(accountant: str, opacus: Any) -> None:
    engine, model, optimizer, loader = made(PrivacyEngine(accountant=accountant))
    for _ in range(3):
        train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 1 / 6, 18)]
    theirs = opacus()
    theirs.history = [(1.0, 1 / 6, 18)]
    assert engine.get_epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)


def test_epsilon_is_never_below_the_truth() -> None:
    # One batch of everything: the Gaussian mechanism, whose epsilon has a closed form (Balle and
    # Wang 2018, theorem 5).
    engine, model, optimizer, loader = made(data_loader=data(60, 60), noise_multiplier=1.5)
    for _ in range(4):
        train(model, optimizer, loader)
    mu = 2 / 1.5

    def excess(e: float) -> float:
        return norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - DELTA

    exact = brentq(excess, 0, 50)
    assert exact <= engine.get_epsilon(DELTA) <= 1.01 * exact


def test_two_steps_on_a_batch_are_one_of_less_noise() -> None:
    engine, model, optimizer, loader = made()
    for x, y in loader:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    ((sigma, q, steps),) = engine.accountant.history
    assert (q, steps) == (1 / 6, 6) and sigma == pytest.approx(math.sqrt(0.5)) and sigma**2 < 0.5
    apart = PRVAccountant()  # what Opacus would say: coins of their own, which they have not
    apart.history = [(1.0, 1 / 6, 12)]
    assert engine.get_epsilon(DELTA) > 1.05 * apart.get_epsilon(DELTA)


def test_noise_for_a_target_is_enough_and_not_more() -> None:
    model = net()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data(),
        target_epsilon=4.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        train(model, optimizer, loader)
    assert 3.95 <= engine.get_epsilon(DELTA) <= 4.0


@pytest.mark.statistical
@pytest.mark.parametrize("sigma", [0.8, 2.0])
def test_the_noise_is_there(sigma: float) -> None:
    # 100 200 entries of noise alone: the sample standard deviation is within 2 % of the right one
    # but for a chance of 1e-17 (nine standard errors), and that of sigma / sqrt(2) is 29 % off.
    model = nn.Linear(500, 200)
    loader = DataLoader(TensorDataset(torch.randn(60, 500), torch.zeros(60).long()), batch_size=10)
    _, model, optimizer, loader = made(
        model=model, data_loader=loader, noise_multiplier=sigma, max_grad_norm=0.5
    )
    loader.source.indices = lambda number: np.array([], dtype=np.int64)
    for x, y in loader:
        assert x.shape == (0, 500) and y.shape == (0,)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        break
    noise = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters())])
    wanted = 0.1 * sigma * 0.5 / 10  # learning rate, sigma C over the expected batch size
    assert float(noise.std()) == pytest.approx(wanted, rel=0.02)
    assert abs(float(noise.mean())) < 6 * wanted / math.sqrt(noise.numel())


def test_sum_and_mean_differ_by_the_expected_batch_size() -> None:
    steps = {}
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        _, model, optimizer, loader = made(
            data_loader=data(60, 60), noise_multiplier=1e-3, loss_reduction=reduction
        )
        for x, y in loader:
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
        steps[reduction] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(steps["sum"], 60 * steps["mean"], atol=0.05)


def test_empty_batches_are_stepped_on_with_noise_even_where_the_loop_skips_them() -> None:
    engine, model, optimizer, loader = made()
    sizes = iter([[], [1, 2], [], [3]])
    drawn: dict[int, Any] = {}

    def indices(number: int) -> Any:
        if number not in drawn:
            drawn[number] = np.array(next(sizes, [4, 5]), dtype=np.int64)
        return drawn[number]

    loader.source.indices = indices
    for x, y in loader:
        if len(x) == 0:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1 / 6, 6)]
    assert all(p.isfinite().all() for p in model.parameters())


def test_recurrent_models_run_on_empty_batches() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x.unsqueeze(1))[0][:, -1])

    _, model, optimizer, loader = made(model=Names())
    loader.source.indices = lambda number: np.array([], dtype=np.int64)
    train(model, optimizer, loader)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_batch_that_is_skipped_is_refused() -> None:
    *_, loader = made()
    loader.source.indices = lambda number: np.arange(3)
    said = r"was not called for the last batch.*BatchMemoryManager"
    with pytest.raises(RuntimeError, match=said):
        for _ in loader:
            pass


def test_a_batch_of_a_loop_that_was_left_is_drawn_again() -> None:
    engine, model, optimizer, loader = made()
    first = next(iter(loader))[0]
    again = next(iter(loader))[0]
    assert torch.equal(first, again) and engine.get_epsilon(DELTA) == 0.0
    train(model, optimizer, loader)
    assert not torch.equal(next(iter(loader))[0], first)


def test_records_can_be_looked_at_in_evaluation_mode() -> None:
    engine, model, optimizer, loader = made()
    model.eval()
    with torch.no_grad():
        outputs = [model(x) for x, _ in loader]
    assert len(outputs) == 6 and engine.get_epsilon(DELTA) == 0.0
    model.train()
    train(model, optimizer, loader)
    assert engine.accountant.history[0][2] == 6


def test_workers_read_the_same_batches() -> None:
    old = data()
    loader = DataLoader(old.dataset, batch_size=10, num_workers=1)
    engine, model, optimizer, loader = made(data_loader=loader)
    for _ in range(2):
        train(model, optimizer, loader)
    assert engine.accountant.history[0][2] == 12


def test_learning_rate_schedules_and_names() -> None:
    _, model, optimizer, loader = made()
    assert isinstance(optimizer, torch.optim.Optimizer) and len(loader) == 6
    assert len(loader.dataset) == 60
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, loader)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert next(iter(model.state_dict())) == "_module.0.weight"
    assert model.append == model._module.append  # what the model itself has passes through
    again = copy.deepcopy(model)  # an average of weights, say: trained by nobody
    assert torch.equal(again._module[0].weight, model._module[0].weight)


def test_schedules_of_noise_are_accounted_for_step_by_step() -> None:
    engine, model, optimizer, loader = made()
    noise, clip = ExponentialNoise(optimizer, gamma=0.5), ExponentialGradClip(optimizer, gamma=0.9)
    for _ in range(2):
        train(model, optimizer, loader)
        noise.step()
        clip.step()
    assert sorted(engine.accountant.history) == [(0.5, 1 / 6, 6), (1.0, 1 / 6, 6)]
    theirs = PRVAccountant()
    theirs.history = [(1.0, 1 / 6, 6), (0.5, 1 / 6, 6)]
    assert engine.get_epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)
    assert optimizer.max_grad_norm == pytest.approx(0.81)
    assert LambdaNoise(optimizer, noise_lambda=lambda e: 1 + e).base_noise_multiplier == 0.25
    step = StepNoise(optimizer, step_size=2, gamma=0.1)
    step.step()
    assert optimizer.noise_multiplier == 0.25
    step.step()
    assert optimizer.noise_multiplier == pytest.approx(0.025)


def test_a_checkpoint_holds_what_was_spent(tmp_path: Path) -> None:
    engine, model, optimizer, loader = made()
    train(model, optimizer, loader)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, other, optimizer, loader = made()
    again.load_checkpoint(path=path, module=other, optimizer=optimizer)
    assert torch.equal(model._module[0].weight, other._module[0].weight)
    assert again.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    train(other, optimizer, loader)
    assert again.accountant.history == [(1.0, 1 / 6, 12)]


@pytest.mark.parametrize(("n", "batch_size"), [(60, 10), (5, 5)], ids=["any", "as many as wide"])
def test_a_generator_learns_through_the_private_model(n: int, batch_size: int) -> None:
    _, model, optimizer, loader = made(data_loader=data(n, batch_size))
    generator = nn.Linear(3, 5)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(generator(torch.randn(100, 3))), torch.ones(100).long()).backward()
        assert generator.weight.grad.abs().sum() > 0
        assert all(p.grad is None for p in model.parameters())
        with pytest.warns(SettingsWarning, match="private, and epsilon does not cover"):
            model(generator(torch.randn(len(x), 3)))
        break


def test_ghost_returns_the_criterion_too() -> None:
    loader = DataLoader(
        TensorDataset(torch.randn(12, 4, 5), torch.randint(0, 2, (12, 4))), batch_size=12
    )
    engine, model, optimizer, criterion, loader = made(
        data_loader=loader,
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(ignore_index=1),
    )
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out.view(-1, 2), y.view(-1), shape=out.shape)
        loss.backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1.0, 1)]


def test_parts_of_a_batch_are_one_release() -> None:
    engine, model, optimizer, loader = made()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as parts:
        train(model, optimizer, parts)
    assert engine.accountant.history == [(1.0, 1 / 6, 6)]


def test_per_layer_norms_add_up_in_squares() -> None:
    _, model, optimizer, loader = made(clipping="per_layer", max_grad_norm=[1.0, 2.0, 2.0, 4.0])
    assert optimizer.max_grad_norm == 5.0
    train(model, optimizer, loader)


def test_secure_mode_draws_from_a_cryptographic_stream() -> None:
    pytest.importorskip("cryptography")
    _, model, optimizer, loader = made(PrivacyEngine(secure_mode=True))
    assert optimizer.noise_of(0).noise.source.name == "secure"
    train(model, optimizer, loader)


def test_batches_are_poisson_samples_whatever_is_asked() -> None:
    with pytest.warns(SettingsWarning, match="poisson_sampling=False is not done"):
        engine, model, optimizer, loader = made(poisson_sampling=False)
    asked, *same = made()
    sizes = set()
    for x, y in loader:
        sizes.add(len(x))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    train(*same)
    assert len(sizes) > 1
    assert engine.get_epsilon(1e-5) == asked.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipping": "adaptive"}, "adaptive"),
        ({"clipping": "adaptive", "target_unclipped_quantile": 0.5}, "share of clipped records"),
        ({"grad_sample_mode": "ghost_fsdp"}, "grad_sample_mode"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"max_grad_norm": [1.0, 2.0]}, "per_layer"),
        ({"target_unclipped_quantile": 0.5}, "target_unclipped_quantile is refused: it sets"),
        ({"normalize_clipping": True}, "normalize_clipping is no argument"),
    ],
)
def test_refused_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_strict_is_taken_and_lets_nothing_through() -> None:
    train(*made(strict=False)[1:])
    mixing = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModuleError, match="BatchNorm"):
        made(model=mixing, strict=False)


@pytest.mark.parametrize(
    ("reduction", "remedy", "other"),
    [
        ("sum", r"\.sum\(\)\), or leave", "or pass"),
        ("mean", "or pass loss_reduction='sum'", "or leave"),
    ],
)
def test_a_loss_that_is_no_such_reduction_names_a_remedy_that_is_open(
    reduction: str, remedy: str, other: str
) -> None:
    _, model, optimizer, loader = made(data_loader=data(60, 60), loss_reduction=reduction)
    features, labels = next(iter(loader))
    losses = F.cross_entropy(model(features), labels, reduction="none")
    (losses.mean() if reduction == "sum" else losses.sum()).backward()
    with pytest.raises(ValueError, match=remedy) as caught:
        optimizer.step()
    assert other not in str(caught.value)


def test_refused_loaders_models_and_optimisers() -> None:
    dataset = data().dataset
    weighted = WeightedRandomSampler([1.0] * 60, 60)
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        made(data_loader=DataLoader(dataset, batch_size=10, sampler=weighted))
    with pytest.raises(ValueError, match="not the module's"):
        PrivacyEngine().make_private(
            module=net(),
            optimizer=torch.optim.SGD(net().parameters(), lr=0.1),
            data_loader=data(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    mixing = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModuleError, match="layer '1'"):
        made(model=mixing)
    assert not PrivacyEngine().is_compatible(module=mixing)
    fixed = PrivacyEngine.get_compatible_module(mixing)
    assert isinstance(fixed[1], nn.GroupNorm) and isinstance(mixing[1], nn.BatchNorm1d)
    assert ModuleValidator.is_valid(fixed) and ModuleValidator.validate(fixed) == []
    assert not ModuleValidator.is_valid(fixed.eval())


def test_steps_that_are_no_release_are_refused() -> None:
    engine, model, optimizer, loader = made()
    loader.source.indices = lambda number: np.arange(10)  # five would be as many as columns
    with pytest.raises(RuntimeError, match="outside the loop"):
        optimizer.step()
    for _ in loader:
        with pytest.raises(RuntimeError, match=r"without loss\.backward"):
            optimizer.step()
        break
    for _ in loader:
        with pytest.raises(RuntimeError, match="other records than the batch's"):
            model(torch.randn(1000, 5))
        break
    for x, y in loader:
        penalty = sum(p.square().sum() for p in model.parameters())
        with pytest.raises(ValueError, match="for a penalty use weight_decay"):
            (F.cross_entropy(model(x), y) + 0.1 * penalty).backward()
        penalty.backward()
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match="not released"):
            optimizer.step()
        break
    model.zero_grad()
    for x, y in loader:
        with pytest.raises(ValueError, match="outside the private model's own call"):
            F.cross_entropy(model._module(x), y).backward()
        assert all(p.grad is None for p in model.parameters())
        break
    assert engine.get_epsilon(DELTA) == 0.0


def test_names_of_opacus_modules() -> None:
    from quietgrad.integrations.opacus.accountants import RDPAccountant
    from quietgrad.integrations.opacus.accountants.utils import get_noise_multiplier
    from quietgrad.integrations.opacus.data_loader import DPDataLoader
    from quietgrad.integrations.opacus.grad_sample import GradSampleModule
    from quietgrad.integrations.opacus.optimizers import DPOptimizer
    from quietgrad.integrations.opacus.privacy_engine import PrivacyEngine as Engine

    _, model, optimizer, loader = made(Engine())
    assert isinstance(model, GradSampleModule) and isinstance(optimizer, DPOptimizer)
    assert isinstance(loader, DPDataLoader)
    sigma = get_noise_multiplier(
        target_epsilon=3.0, target_delta=DELTA, sample_rate=1 / 6, epochs=2, accountant="rdp"
    )
    accountant = RDPAccountant()
    for _ in range(12):
        accountant.step(noise_multiplier=sigma, sample_rate=1 / 6)
    assert 2.9 < accountant.get_epsilon(DELTA) <= 3.0


def test_outputs_may_be_written_into() -> None:
    _, model, optimizer, loader = made()
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        out /= 2
        out[:, 0] = -1.0
        F.cross_entropy(out, y).backward()
        optimizer.step()


def test_half_precision_in_the_loop() -> None:
    _, model, optimizer, loader = made()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
