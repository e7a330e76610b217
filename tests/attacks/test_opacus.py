"""Careless and hostile loops of the Opacus kind: ways in which one record acted in what others
contribute, or a gradient went out without noise. Numbers in comments are the largest distance of
two clipped sums, with a record and without, in clipping norms, before the remedy (it may be 1.001).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager

C, N = 0.4, 12


def made(n: int = N, batch_size: int | None = None, **options: Any) -> Any:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 5, generator=draw), torch.randint(0, 3, (N,), generator=draw)
    x[-1] *= 50
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    collate = options.pop("collate_fn", None)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = options.pop("engine", None) or PrivacyEngine()
    loader = DataLoader(TensorDataset(x[:n], y[:n]), batch_size=batch_size or n, collate_fn=collate)
    return engine, *engine.make_private(
        module=model, optimizer=raw, data_loader=loader, noise_multiplier=1.0, max_grad_norm=C
    )


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def one_sum(body: Callable[..., None], n: int, **options: Any) -> dict[str, Tensor]:
    _, model, optimizer, loader = made(n, **options)
    sums: list[dict[str, Tensor]] = []
    release = optimizer._release

    def note(clipped: Any) -> None:
        sums.append({name: g.clone() for name, g in clipped.gradients.items()})
        release(clipped)

    optimizer._release = note
    for x, y in loader:
        body(model, x, y)
        optimizer.step()
    return sums[0]


def distance(body: Callable[..., None], **options: Any) -> float:
    a, b = one_sum(body, N, **options), one_sum(body, N - 1, **options)
    return math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a)) / C


def weights_without_gradient(model: Any, x: Tensor, y: Tensor) -> None:  # 2.75
    with torch.no_grad():
        size = model(x).exp().sum(dim=1)
    weight = 5 * size / size.sum()
    (weight * F.cross_entropy(model(x), y, reduction="none")).mean().backward()


def weights_in_evaluation_mode(model: Any, x: Tensor, y: Tensor) -> None:  # 2.75
    model.eval()
    size = model(x).exp().sum(dim=1).detach()
    model.train()
    weight = 5 * size / size.sum()
    (weight * F.cross_entropy(model(x), y, reduction="none")).mean().backward()


def gradients_by_records(model: Any, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    (F.cross_entropy(model(x.detach()), y) / g.norm()).backward()


def gradient_penalty(model: Any, x: Tensor, y: Tensor) -> None:  # it had no gradient, in silence
    x = x.clone().requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (F.cross_entropy(out, y) + g.norm(dim=1).mean()).backward()


def centred_in_numpy(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    a = x.numpy()
    F.cross_entropy(model(torch.from_numpy(a - a.mean(axis=0))), y).backward()


def centred_in_the_memory_of_numpy(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    a = x.numpy()
    a -= a.mean(axis=0)
    F.cross_entropy(model(x), y).backward()


def centred_lists(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    a = torch.tensor(x.tolist())
    F.cross_entropy(model(a - a.mean(dim=0)), y).backward()


def centred_copy(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    a = copy.deepcopy(x)
    F.cross_entropy(model(a - a.mean(dim=0)), y).backward()


def centred_data(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    x.data -= x.data.mean(dim=0)
    F.cross_entropy(model(x), y).backward()


def running_mean(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    mean = torch.zeros(5)
    mean.mul_(0.9).add_(x.mean(dim=0))
    F.cross_entropy(model(x - 2 * mean), y).backward()


def written_rows(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    rows = torch.zeros(len(x), 5)
    rows[:] = x - x.mean(dim=0)
    F.cross_entropy(model(rows), y).backward()


def written_out(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    mean = torch.zeros(5)
    torch.mean(x, 0, out=mean)
    F.cross_entropy(model(x - mean), y).backward()


def scripted(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    centred: Any = torch.jit.trace(lambda t: t - t.mean(dim=0), torch.randn(4, 5))
    F.cross_entropy(model(centred(x)), y).backward()


def mapped(model: Any, x: Tensor, y: Tensor) -> None:  # 3.29
    z: Any = torch.vmap(lambda row: row * 2)(x)
    F.cross_entropy(model(z - z.mean(dim=0)), y).backward()


def past_torch(model: Any, x: Tensor, y: Tensor) -> None:  # 2.91
    with torch._C.DisableTorchFunctionSubclass():
        z = x - x.mean(dim=0)
    F.cross_entropy(model(z), y).backward()


MIXING = [
    weights_without_gradient,
    weights_in_evaluation_mode,
    gradients_by_records,
    gradient_penalty,
    centred_in_numpy,
    centred_in_the_memory_of_numpy,
    centred_lists,
    centred_copy,
    centred_data,
    running_mean,
    written_rows,
    written_out,
    scripted,
    mapped,
    past_torch,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("body", MIXING, ids=lambda body: body.__name__)
def test_what_records_make_of_each_other_is_refused(body: Callable[..., None]) -> None:
    with pytest.raises(
        ValueError, match=r"each record alone|earlier batch|outside of torch|cannot"
    ):
        distance(body)


def written_records(model: Any, x: Tensor, y: Tensor) -> None:
    x /= 3
    x.sub_(1.0)
    x = torch.cat([x[:, :3], x.new_ones(x.size(0), 2)], dim=1)
    labels = torch.full((len(x),), 1.0)
    F.binary_cross_entropy_with_logits(model(x)[:, 0], labels).backward()
    labels.fill_(0.0)
    F.binary_cross_entropy_with_logits(model(x + 1)[:, 0], labels).backward()


def teacher(model: Any, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        wanted = model(x + 1).softmax(dim=1)
    weight = wanted.max(dim=1).values
    each = F.cross_entropy(model(x), y, reduction="none") * weight
    (each.mean() + F.mse_loss(model(x).softmax(dim=1), wanted)).backward()


@pytest.mark.parametrize("body", [written_records, teacher], ids=lambda body: body.__name__)
def test_what_is_made_of_each_record_alone_is_done_right(body: Callable[..., None]) -> None:
    assert 0 < distance(body) <= 1.001


def counted_weights(model: Any, x: Tensor, y: Tensor) -> None:
    positive = (y == 1).sum().item()
    weight = torch.tensor([1.0, (len(y) - positive) / (positive + 1), 1.0])
    F.cross_entropy(model(x), y, weight=weight, reduction="none").mean().backward()


def counted_in_numpy(model: Any, x: Tensor, y: Tensor) -> None:
    weight = torch.tensor(np.bincount(y.numpy(), minlength=3) + 1.0).float()
    F.cross_entropy(model(x), y, weight=weight, reduction="none").mean().backward()


def chosen_by_the_loss(model: Any, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    if loss > 1.2:
        loss = loss / 100
    (loss * 1.0).backward()


def number_in_a_tensor(model: Any, x: Tensor, y: Tensor) -> None:  # 1.5, with a power of thirty
    (F.cross_entropy(model(x), y) * torch.tensor(1 / (len(x) + 1))).backward()


READING = [counted_weights, counted_in_numpy, chosen_by_the_loss, number_in_a_tensor]


@pytest.mark.parametrize("body", READING, ids=lambda body: body.__name__)
def test_numbers_that_follow_the_batch_are_refused(body: Callable[..., None]) -> None:
    _, model, optimizer, loader = made(batch_size=4)
    with pytest.raises(ValueError, match=r"the loss is scaled by|outside of torch"):
        for _ in range(30):
            for x, y in loader:
                if len(x):
                    body(model, x, y)
                    optimizer.step()


def test_schedules_and_numbers_for_a_log_are_not() -> None:
    _, model, optimizer, loader = made(batch_size=4)
    done = 0
    for _ in range(10):
        for x, y in loader:
            done += 1
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y) * min(1.0, done / 20)
            assert out.argmax(dim=1).numpy().shape == (len(y),) and isinstance(loss.item(), float)
            loss.backward()
            optimizer.step()


def mixed(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return 0.5 * x + 0.5 * x.roll(1, 0), y


def padded(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x + 0.1 * torch.randn(x.shape), y


def test_a_collate_fn_that_mixes_records_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of several records"):  # 1.28
        distance(lambda model, x, y: F.cross_entropy(model(x), y).backward(), collate_fn=mixed)
    _, model, optimizer, loader = made(collate_fn=padded)
    for x, y in loader:
        step(model, optimizer, x, y)


def test_a_pass_within_a_pass_repeats_no_batch() -> None:
    # Five of the six batches of the outer loop were those of the inner one, and were counted as if
    # they had coins of their own.
    engine, model, optimizer, loader = made(batch_size=2)
    with pytest.raises(RuntimeError, match="another pass"):
        for x, y in loader:
            step(model, optimizer, x, y)
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=1, optimizer=optimizer
            ) as parts:
                for a, b in parts:
                    step(model, optimizer, a, b)
    assert engine.accountant.history == [(1.0, 1 / 6, 7)]


def test_weights_beside_the_private_model_learn_nothing_of_records() -> None:
    _, model, _, loader = made()
    head = nn.Linear(3, 3)  # with an optimiser of its own, it learnt without noise
    scale = torch.ones(1, requires_grad=True)
    for x, y in loader:
        for loss in (
            F.cross_entropy(head(model(x)), y),
            F.cross_entropy(scale * model(x), y),
            F.cross_entropy(nn.Linear(5, 3)(x), y),
            F.cross_entropy(model._module[2](F.relu(model._module[0](x))), y),
        ):
            with pytest.raises(ValueError, match="no noise"):
                loss.backward()
        break
    weights = [*model.parameters(), *head.parameters(), scale]
    assert all(p.grad is None for p in weights)


@pytest.mark.parametrize("when", ["before", "within"])
def test_evaluation_mode_leaves_no_gradient(when: str) -> None:
    _, model, _, loader = made()
    model.train(when == "within")
    for x, y in loader:
        model.eval()
        with pytest.raises(RuntimeError, match="nothing learns from"):
            F.cross_entropy(model(x), y).backward()
        break
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_of_two_private_models_is_refused() -> None:
    # The one was called in the place of the other.
    engine, model, optimizer, loader = made()
    other: Any = nn.Linear(5, 3)
    other, _, loader = engine.make_private(
        module=other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=C,
    )
    for x, y in loader:
        F.cross_entropy(model(x) + other(x), y).backward()
        with pytest.raises(ValueError, match="several private models"):
            optimizer.step()
        break


def test_an_engine_has_one_accountant_and_no_copy() -> None:
    engine, *_ = made()
    with pytest.raises(AttributeError):
        engine.accountant = PrivacyEngine().accountant  # epsilon was 0 for ever
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(engine)


def test_the_number_of_steps_may_not_follow_the_loss() -> None:
    _, model, optimizer, loader = made(batch_size=2)
    with pytest.raises(RuntimeError, match="same number of steps"):
        for _ in range(20):
            for x, y in loader:
                step(model, optimizer, x, y)
                if F.cross_entropy(model(x), y).item() > 1:
                    step(model, optimizer, x, y)


def test_empty_batches_get_as_many_steps_as_others() -> None:
    # The history of noise told how many batches were empty.
    engine, model, optimizer, loader = made(batch_size=2)
    sizes = [3, 0, 2, 0, 1, 4]
    loader.source.indices = lambda number: np.arange(sizes[number])
    for x, y in loader:
        for _ in range(2 if len(x) else 0):
            step(model, optimizer, x, y)
            model(x).sum().item()
    ((sigma, _, steps),) = engine.accountant.history
    assert steps == 6 and sigma == pytest.approx(0.5**0.5)


def test_weights_are_not_written_from_records() -> None:  # 2.89, and the weights held the records
    _, model, _, loader = made()
    bias = model._module[0].bias
    before = bias.detach().clone()
    for x, _ in loader:
        with torch.no_grad(), pytest.raises(RuntimeError, match="without noise"):
            bias[:5] = x.mean(dim=0)
        with torch.no_grad(), pytest.raises(RuntimeError, match="without noise"):
            bias.add_(x.mean())
        break
    assert torch.equal(bias, before)


def test_no_epsilon_is_told_for_a_delta_that_admits_publishing_records() -> None:
    # Before: engine.get_epsilon(0.9) was 0.0 after any number of releases.
    engine, model, optimizer, loader = made()
    for x, y in loader:
        step(model, optimizer, x, y)
    for delta in (0.9, 0.5, 1 / N):
        for told in (engine, engine.accountant):
            with pytest.raises(ValueError, match="is not below"):
                told.get_epsilon(delta)
    assert engine.get_epsilon(1e-3) > 1
    with pytest.raises(ValueError, match="publish everything"):
        PrivacyEngine().get_epsilon(0.5)  # of how many records, nobody knows yet
    plain = nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"target_delta=0\.5 is not below"):
        PrivacyEngine().make_private_with_epsilon(
            module=plain,
            optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(N, 5)), batch_size=N),
            target_epsilon=1.0,
            target_delta=0.5,
            epochs=1,
            max_grad_norm=C,
        )


def spread_of_the_batch(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (F.cross_entropy(out, y) + out.std(0).sum()).backward()


def all_but_the_worst(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, reduction="none").sort().values[:-1].mean().backward()


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("body", [spread_of_the_batch, all_but_the_worst], ids=lambda b: b.__name__)
def test_a_loss_that_no_record_has_alone_is_refused(body: Callable[..., None]) -> None:
    # Before: every record's own loss was not a number, so all added zero, and noise was trained on.
    with pytest.raises(ValueError, match="a loss of each record alone"):
        one_sum(body, N)
