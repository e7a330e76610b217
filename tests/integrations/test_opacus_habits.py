"""What real scripts for Opacus do around the usual loop, written as their authors write it: each
runs, or is refused in a line that names the remedy.
"""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import opacus.validators
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.layers import DPLSTM
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from quietgrad.integrations.opacus.validators import ModuleValidator

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


def private(
    model: nn.Module | None = None, data: Any = None, loaded: Any = None, **options: Any
) -> Any:
    """(engine, model, optimiser, loader)."""
    model = net() if model is None else model
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaded or DataLoader(data or TensorDataset(X, Y), batch_size=20),
        **({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options),
    )
    return (engine, *made)


class Packed(nn.Module):
    """Texts of their own lengths, as recurrent layers of scripts take them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read, self.out = nn.Embedding(9, 4), DPLSTM(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(x).transpose(0, 1), lengths, enforce_sorted=False
        )
        return self.out(self.read(packed)[1][0][-1])


def test_packed_texts() -> None:
    ids, lengths = torch.randint(0, 9, (60, 6)), torch.randint(1, 7, (60,))
    engine, model, optimizer, loader = private(Packed(), TensorDataset(ids, lengths, Y))
    for x, n, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x, n.cpu()), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1 / 3, 3)]


@dataclass
class Rows:
    x: Tensor
    y: Tensor


def test_batches_that_are_dataclasses() -> None:
    def collate(rows: list[Any]) -> Rows:
        return Rows(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    data = DataLoader(TensorDataset(X, Y), batch_size=60, collate_fn=collate)
    model, plain = nn.Linear(5, 2), nn.Linear(5, 2)
    plain.load_state_dict(model.state_dict())
    _, model, optimizer, loader = private(
        model, loaded=data, noise_multiplier=1e-6, max_grad_norm=100.0
    )
    for batch in loader:
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    F.cross_entropy(plain(X), Y).backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, atol=1e-4, rtol=1e-2)


def test_batches_by_next_and_an_iterator_made_anew() -> None:
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    for _ in range(7):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1 / 3, 7)]


def test_clients_with_an_engine_each_and_averaged_weights() -> None:
    clients = random_split(TensorDataset(X, Y), [20, 20, 20])
    shared, engines = net(), [PrivacyEngine() for _ in clients]
    for _ in range(2):
        states = []
        for engine, client in zip(engines, clients, strict=True):
            local = copy.deepcopy(shared)
            model, optimizer, loader = engine.make_private(
                module=local,
                optimizer=torch.optim.SGD(local.parameters(), lr=0.1),
                data_loader=DataLoader(client, batch_size=10, shuffle=True),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            states.append(model._module.state_dict())
        shared.load_state_dict(
            {name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]}
        )
    assert [engine.accountant.history for engine in engines] == [[(1.0, 0.5, 4)]] * 3


def test_layers_that_are_frozen_between_epochs() -> None:
    engine, model, optimizer, loader = private()
    for epoch in range(2):
        if epoch:
            model._module[0].requires_grad_(False)
            kept = model._module[0].weight.clone()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert torch.equal(model._module[0].weight, kept)
    assert engine.accountant.history == [(1.0, 1 / 3, 6)]


def test_a_script_may_ask_which_part_of_a_batch_was_the_last() -> None:
    _, model, optimizer, loader = private()
    assert optimizer.secure_mode is False
    skipped, releases = [], []
    optimizer.attach_step_hook(lambda _: releases.append(len(skipped)))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            skipped.append(optimizer._is_last_step_skipped)
    assert [i for i, was in enumerate(skipped) if not was] == releases
    assert len(releases) == 3 < len(skipped)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("grad_samples", "vmap"),
        ("accumulated_iterations", "BatchMemoryManager"),
        ("clip_and_accumulate", "optimizer.step()"),
        ("virtual_step", "before 1.0; BatchMemoryManager"),
        ("generator", "streams of Quietgrad's own"),
    ],
)
def test_attributes_of_the_other_way_of_clipping_name_what_there_is(name: str, remedy: str) -> None:
    _, _, optimizer, _ = private()
    with pytest.raises(AttributeError, match=f"no '{name}'") as said:
        getattr(optimizer, name)
    assert remedy in str(said.value)
    assert not hasattr(optimizer, "no_such_thing")


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm_stands_for_batch_norm_where_it_is_asked_for(dims: int) -> None:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 4, 1)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](4)
    nn.init.normal_(norm.weight)
    mixed = nn.Sequential(convolution, norm, nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(60, 2, *[3] * dims)
    mixed(x)
    fixed = ModuleValidator.fix_and_validate(mixed, replace_bn_with_in=True)
    assert isinstance(fixed[1], nn.modules.instancenorm._InstanceNorm)
    assert torch.equal(fixed[1].weight, norm.weight)
    engine, model, optimizer, loader = private(fixed, TensorDataset(x, Y))
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-3) > 0


def test_a_tolerance_of_opacus_search_is_taken() -> None:
    model = net()
    sigmas = []
    for options in ({}, {"epsilon_tolerance": 0.5}):
        _, optimizer, _ = PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
            target_epsilon=3.0,
            target_delta=1e-3,
            epochs=2,
            max_grad_norm=1.0,
            **options,
        )
        sigmas.append(optimizer.noise_multiplier)
    assert sigmas[0] == sigmas[1]


def _norms(parameters: list[Any]) -> Any:
    return torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters])


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        _norms,
        lambda parameters: torch.norm(parameters[0].grad_sample),
        lambda parameters: torch.stack([p.grad_sample for p in parameters]),
        lambda parameters: torch.einsum("n,n...->...", torch.ones(2), parameters[0].grad_sample),
        lambda parameters: parameters[0].grad_sample[0],
        lambda parameters: len(parameters[0].grad_sample),
        lambda parameters: 2 * parameters[0].grad_sample,
    ],
    ids=["norms", "norm", "stack", "einsum", "item", "len", "twice"],
)
def test_gradients_of_records_on_parameters_say_what_there_is(read: Any, wrap_model: bool) -> None:
    bare = net()
    _, model, optimizer, loader = private(bare, wrap_model=wrap_model)
    for x, y in loader:
        F.cross_entropy((model if wrap_model else bare)(x), y).backward()
        with pytest.raises(AttributeError, match=r"'grad_sample'.*optimizer\.step\(\).*vmap"):
            read(list(bare.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        for p in bare.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]
        break


def test_parameters_are_saved_copied_and_left_as_torch_has_them() -> None:
    bare = net()
    _, model, _, _ = private(bare)
    for p in copy.deepcopy(model).parameters():
        assert not hasattr(p, "grad_sample")
    file = io.BytesIO()
    torch.save(list(bare.parameters()), file)
    file.seek(0)
    for a, b in zip(torch.load(file, weights_only=True), bare.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not a.grad_sample
    model.cleanup()
    assert not any(hasattr(p, "grad_sample") for p in bare.parameters())


def test_hooks_may_be_put_on_and_taken_off() -> None:
    engine, model, optimizer, loader = private()
    model.disable_hooks()
    model.enable_hooks()
    model.remove_hooks()
    model.add_hooks(loss_reduction="mean", batch_first=True)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert sum(count for _, _, count in engine.accountant.history) == 3


def test_groups_for_batch_norm() -> None:
    """Of a vector, GroupNorm with a channel a group is a number normalized by itself; torch refuses
    it for one record, so training ended in its error.
    """
    layers = (nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = ModuleValidator.fix(nn.Sequential(*layers))
    assert model[1].num_groups == 8
    engine, model, optimizer, loader = private(model)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-3) > 0
    image = nn.Sequential(nn.Conv2d(1, 12, 1), nn.BatchNorm2d(12))
    assert ModuleValidator.fix(image)[1].num_groups == 4
    assert opacus.validators.ModuleValidator.fix(image)[1].num_groups == 4
    assert ModuleValidator.fix(image, num_groups=6)[1].num_groups == 6
    with pytest.raises(ValueError, match="num_groups=0 is below 1"):
        ModuleValidator.fix(image, num_groups=0)
    with pytest.raises(ValueError, match="give one of the two"):
        ModuleValidator.fix(image, num_groups=4, replace_bn_with_in=True)
