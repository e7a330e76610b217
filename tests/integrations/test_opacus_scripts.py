"""What scripts for Opacus 1.6 do beside the usual loop: names of modules, schedules, models that
are not wrapped, layers of their own.
"""

from __future__ import annotations

import copy
from typing import Any

import opacus.schedulers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine, schedulers
from quietgrad.integrations.opacus.grad_sample import register_grad_sampler
from quietgrad.integrations.opacus.utils.batch_memory_manager import (
    BatchMemoryManager,
    wrap_data_loader,
)
from quietgrad.integrations.opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from quietgrad.integrations.opacus.utils.uniform_sampler import UniformWithReplacementSampler
from quietgrad.integrations.opacus.validators import (
    ModuleValidator,
    register_module_fixer,
    register_module_validator,
)
from quietgrad.integrations.opacus.validators.errors import ShouldReplaceModuleError

DELTA = 1e-3
TINY = 2e-6  # noise that leaves sums as they are; the clipper stays 1e-3 below the norm


def data(n: int = 60, batch: int = 20) -> DataLoader[Any]:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=batch)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


def private(model: nn.Module, loader: Any = None, **options: Any) -> Any:
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader or data(), **options
    )


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, norm: float) -> list[Tensor]:
    """By one backward pass a record."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]).view(1, -1), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        length = torch.stack([g.norm() for g in gradients]).norm()
        total = [t + g * min(1.0, norm / float(length)) for t, g in zip(total, gradients)]
    return total


class Squeezing(nn.Module):
    """As in Opacus' IMDb example: ``squeeze()`` takes a single record's dimension too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).unsqueeze(2).squeeze()
        return out


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("kind", [net, Squeezing])
def test_the_release_is_the_sum_of_clipped_gradients(kind: Any, wrap_model: bool) -> None:
    model = kind()
    before = copy.deepcopy(model)
    made, optimizer, loader = private(
        model, noise_multiplier=TINY, max_grad_norm=0.3, wrap_model=wrap_model
    )
    called = made if wrap_model else model
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()
        records, labels = torch.tensor(x.numpy()), torch.tensor(y.numpy())
        optimizer.step()
        break
    expected = clipped_sum(before, records, labels, 0.3)
    for p, total in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, total / 20, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("wrap_model", [True, False])
def test_an_empty_batch_has_outputs_of_no_rows(wrap_model: bool) -> None:
    model = Squeezing()
    made, optimizer, loader = private(model, wrap_model=wrap_model)
    loader.source.indices = lambda number: torch.zeros(0, dtype=torch.long).numpy()
    shapes = []
    for x, y in loader:
        optimizer.zero_grad()
        out = (made if wrap_model else model)(x)
        shapes.append(tuple(out.shape))
        F.cross_entropy(out, y).backward()
        optimizer.step()
    assert set(shapes) == {(0, 2)}
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_model_that_is_not_wrapped_keeps_its_names_and_gets_its_forward_back() -> None:
    model = net()
    names, own = list(model.state_dict()), model.forward
    hooks, optimizer, loader = private(model, wrap_model=False)
    with pytest.raises(ValueError, match="made private before"):
        private(model, wrap_model=False)
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.deepcopy(model)
    model.eval()
    assert not hooks.training
    for x, _ in loader:  # a look: nothing is released
        model(x)
    assert all(p.grad is None for p in model.parameters())
    model.train()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=7, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert list(model.state_dict()) == names
    hooks.cleanup()
    assert "forward" not in vars(model) and model.forward == own
    assert not isinstance(model(torch.ones(1, 5)), type(x))
    copy.deepcopy(model)


class Centred(nn.Module):
    """Mixes records."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out - out.mean(0)


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_model_that_mixes_records_is_refused(wrap_model: bool) -> None:
    model = Centred()
    made, optimizer, loader = private(model, wrap_model=wrap_model)
    x, y = next(iter(loader))
    F.cross_entropy((made if wrap_model else model)(x), y).backward()
    with pytest.raises(ValueError, match=r"record|example"):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_the_followed_call_passes_by_get_no_gradient() -> None:
    model = net()
    _, _, loader = private(model, wrap_model=False)
    x, y = next(iter(loader))
    for passing in (lambda: nn.Sequential.forward(model, x), lambda: model[2](model[0](x))):
        with pytest.raises(ValueError, match="outside the private model's own call"):
            F.cross_entropy(passing(), y).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_model_with_hooks_is_not_attached_to() -> None:
    model = net()
    model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="run twice"):
        private(model, wrap_model=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ExponentialNoise", {"gamma": 0.9}),
        ("StepNoise", {"step_size": 2, "gamma": 0.5}),
        ("LambdaNoise", {"noise_lambda": lambda epoch: 1 / (1 + epoch)}),
        ("ExponentialGradClip", {"gamma": 1.1}),
        ("StepGradClip", {"step_size": 3, "gamma": 2.0}),
        ("LambdaGradClip", {"scheduler_function": lambda epoch: 1 + epoch}),
    ],
)
def test_schedules_give_what_opacus_own_give(name: str, options: dict[str, Any]) -> None:
    class Optimizer:
        noise_multiplier, max_grad_norm = 1.5, 0.7

    ours, theirs = Optimizer(), Optimizer()
    one = getattr(schedulers, name)(ours, **options)
    other = getattr(opacus.schedulers, name)(theirs, **options)
    for _ in range(7):
        one.step()
        other.step()
        assert vars(ours) == pytest.approx(vars(theirs)) and vars(ours)
    again = getattr(schedulers, name)(Optimizer(), **options)
    again.load_state_dict(one.state_dict())
    assert again.last_epoch == 7


def test_a_schedule_of_a_scripts_own_is_accounted_for() -> None:
    class Halving(schedulers._NoiseScheduler):
        def get_noise_multiplier(self) -> float:
            return 2.0 / (1 + self.last_epoch)

    model, optimizer, loader = private(net())
    schedule = Halving(optimizer)
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    assert loader.source.accountant.history == [(2.0, 1 / 3, 3), (1.0, 1 / 3, 3)]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_grad_sampler_that_is_wrong_does_no_harm() -> None:
    @register_grad_sampler(Scale)
    def wrong(layer: Any, activations: Any, backprops: Any) -> Any:
        return {layer.weight: torch.zeros(len(backprops), 5)}

    model = nn.Sequential(Scale(), nn.Linear(5, 2))
    before = copy.deepcopy(model)
    made, optimizer, loader = private(model, noise_multiplier=TINY)
    x, y = next(iter(loader))
    F.cross_entropy(made(x), y).backward()
    expected = clipped_sum(before, torch.tensor(x.numpy()), torch.tensor(y.numpy()), 1.0)
    optimizer.step()
    # A record's part is shortened by a thousandth of it at most, and is at most 1 long.
    least = 1.1e-3 * len(x) / 20
    assert float((model[0].weight.grad - expected[0] / 20).norm()) < least
    assert float(expected[0].norm()) / 20 > 5 * least


def test_validators_and_fixers_of_a_scripts_own() -> None:
    class Odd(nn.Linear):
        pass

    @register_module_validator(Odd)
    def validate(layer: Odd) -> list[Exception]:
        return [ShouldReplaceModuleError("an odd layer")]

    @register_module_fixer([Odd])
    def fix(layer: Odd) -> nn.Module:
        return nn.Linear(layer.in_features, layer.out_features)

    model = nn.Sequential(Odd(5, 2), nn.BatchNorm1d(2))
    found = [str(error) for error in ModuleValidator.validate(model)]
    assert len(found) == 2 and "an odd layer" in found
    fixed = ModuleValidator.fix(model)
    assert type(fixed[0]) is nn.Linear and ModuleValidator.is_valid(fixed)
    assert type(model[0]) is Odd


def test_no_validator_lets_batch_norm_through() -> None:
    @register_module_validator(nn.BatchNorm1d)
    def fine(layer: Any) -> list[Exception]:
        return []

    with pytest.raises(ValueError, match="BatchNorm"):
        private(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))


def test_losses_of_ghost_clipping_by_hand() -> None:
    made, optimizer, loader = private(net())
    criterion = DPLossFastGradientClipping(made, optimizer, nn.CrossEntropyLoss())
    for i, (x, y) in enumerate(wrap_data_loader(
        data_loader=loader, max_batch_size=9, optimizer=optimizer
    )):  # fmt: skip
        optimizer.zero_grad()
        if i % 2:
            loss = criterion(made(x), y)
        else:
            each = F.cross_entropy(made(x), y, reduction="none")
            loss = DPTensorFastGradientClipping(made, optimizer, each)
        assert isinstance(loss.item(), float)
        loss.backward()
        optimizer.step()
    assert sum(steps for _, _, steps in loader.source.accountant.history) == 3


def test_a_sampler_of_opacus_is_read_as_its_rate() -> None:
    dataset = data().dataset
    sampler = UniformWithReplacementSampler(num_samples=60, sample_rate=0.25)
    assert len(sampler) == 4 and all(0 <= i < 60 for batch in sampler for i in batch)
    _, _, loader = private(net(), DataLoader(dataset, batch_sampler=sampler))
    assert loader.sample_rate == 0.25


def test_what_is_not_offered_says_so() -> None:
    from quietgrad.integrations.opacus.accountants.rdp import RDPAccountant
    from quietgrad.integrations.opacus.data_loader import DPDataLoader
    from quietgrad.integrations.opacus.distributed import (
        DifferentiallyPrivateDistributedDataParallel,
    )
    from quietgrad.integrations.opacus.grad_sample import utils
    from quietgrad.integrations.opacus.lightning import DPLightningDataModule
    from quietgrad.integrations.opacus.optimizers import DPOptimizerFastGradientClipping
    from quietgrad.integrations.opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping

    for refused in (
        lambda: DifferentiallyPrivateDistributedDataParallel(net()),
        lambda: DPLightningDataModule(None),
        lambda: DPDataLoader.from_data_loader(data(), distributed=False),
        lambda: PrivacyEngineAdaptiveClipping(accountant="prv"),
        lambda: DPOptimizerFastGradientClipping(
            optimizer=torch.optim.SGD(net().parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=20,
        ),
        lambda: RDPAccountant().get_optimizer_hook_fn(sample_rate=0.1),
    ):
        with pytest.raises(ValueError, match=r"docs/|make_private"):
            refused()
    assert utils.register_grad_sampler is register_grad_sampler
    accountant = RDPAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    epsilon, order = accountant.get_privacy_spent(delta=DELTA)
    assert epsilon == accountant.get_epsilon(DELTA) and order > 1
