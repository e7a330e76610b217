"""What is clipped of an Opacus script's loop is each record's own gradient: against a loop over
single records, and against Opacus' per-sample gradients.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import opacus
import pytest
import torch
import torch.nn.functional as F
from integrations.opacus_loops import LOOPS, RECORDS, Loop, perceptron
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager

C = 0.4


def private(model: nn.Module, records: tuple[Tensor, ...], **options: Any) -> Any:
    """Model, optimiser, loader of one batch that holds every record, and the sums to come."""
    loader = DataLoader(TensorDataset(*records), batch_size=options.pop("batch_size", RECORDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "max_grad_norm": C} | options
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )
    sums: list[dict[str, Tensor]] = []
    release = optimizer._release

    def note(clipped: Any) -> None:
        sums.append({name: g.clone() for name, g in clipped.gradients.items()})
        release(clipped)

    optimizer._release = note
    return model, optimizer, loader, sums


def clipped(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(g) for name, g in rows[0].items()}
    for row in rows:
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in row.values()))
        for name, g in row.items():
            total[name] += min(1.0, C / max(norm, 1e-12)) * g
    return total


def one_by_one(loop: Loop, model: nn.Module) -> dict[str, Tensor]:
    rows = []
    for i in range(RECORDS):
        model.zero_grad()
        loop.body(model, *(r[i : i + 1] for r in loop.records()))
        rows.append(
            {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for n, p in model.named_parameters()
            }
        )
    return clipped(rows)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    size = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    for name, g in wanted.items():
        assert float((found[name] - g).norm()) <= 2e-3 * size, name


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop.alone], ids=lambda loop: loop.name)
def test_the_sum_is_that_of_single_records(loop: Loop) -> None:
    torch.manual_seed(0)
    model = loop.model()
    wanted = one_by_one(loop, copy.deepcopy(model))
    model, optimizer, loader, sums = private(model, loop.records())
    for batch in loader:
        optimizer.zero_grad()
        loop.body(model, *batch)
        optimizer.step()
    assert_same(sums[0], wanted)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize(
    "loop", [loop for loop in LOOPS if loop.in_opacus], ids=lambda loop: loop.name
)
def test_the_sum_is_that_of_opacus(loop: Loop) -> None:
    torch.manual_seed(0)
    model = loop.model()
    theirs = opacus.GradSampleModule(copy.deepcopy(model))
    loop.body(theirs, *loop.records())
    named = list(theirs._module.named_parameters())
    rows = [{name: p.grad_sample[i] for name, p in named} for i in range(RECORDS)]
    model, optimizer, loader, sums = private(model, loop.records())
    for batch in loader:
        optimizer.zero_grad()
        loop.body(model, *batch)
        optimizer.step()
    assert_same(sums[0], clipped(rows))


def test_parts_of_a_batch_add_up_to_the_same_release() -> None:
    torch.manual_seed(0)
    records = LOOPS[0].records()
    wanted = one_by_one(LOOPS[0], perceptron_copy := perceptron())
    model = copy.deepcopy(perceptron_copy)
    model.zero_grad()
    model, optimizer, loader, sums = private(model, records)
    before = copy.deepcopy(model.state_dict())
    parts, moved = 0, []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
    ) as parts_loader:
        for x, y in parts_loader:
            assert len(x) <= 5
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            parts += 1
            moved.append(any((before[k] != v).any() for k, v in model.state_dict().items()))
    assert parts == 3 and moved == [False, False, True]
    assert len(sums) == 1
    assert_same(sums[0], wanted)


def mean_weighted(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 9.0])).backward()


def ignored(model: Any, x: Tensor, y: Tensor) -> None:
    y = y.clone()
    y[:, 0] = torch.where(y[:, 0] == 0, -100, y[:, 0])
    F.cross_entropy(model(x).view(-1, 3), y.view(-1)).backward()


def divided(model: Any, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y, reduction="sum") / len(x) ** 2).backward()


def contrastive(model: Any, x: Tensor, y: Tensor) -> None:
    z = F.normalize(model(x), dim=1)
    F.cross_entropy(z @ z.T, torch.arange(len(x))).backward()


def hardest(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, reduction="none").topk(3).values.mean().backward()


def centred(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    F.cross_entropy(out - out.mean(dim=0), y).backward()


def statistics_of_the_inputs(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model((x - x.mean(dim=0)) / 2), y).backward()


MIXING = [mean_weighted, divided, contrastive, hardest, centred, statistics_of_the_inputs]


@pytest.mark.parametrize("body", MIXING, ids=lambda body: body.__name__)
def test_losses_that_mix_records_are_refused(body: Any) -> None:
    torch.manual_seed(0)
    model, optimizer, loader, sums = private(perceptron(), LOOPS[0].records())
    with pytest.raises(ValueError, match="of a loss of each record alone"):
        for x, y in loader:
            body(model, x, y)
            optimizer.step()
    assert sums == []


def test_ignored_targets_in_a_mean_are_refused() -> None:
    loop = next(loop for loop in LOOPS if loop.name == "positions")
    model, optimizer, loader, _ = private(perceptron(), loop.records())
    with pytest.raises(ValueError, match="ignored targets"):
        for x, y in loader:
            ignored(model, x, y)
            optimizer.step()


class Centred(nn.Module):
    """Takes the mean over the batch out, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h - h.mean(dim=0).detach()


def test_a_model_that_mixes_records_is_refused_by_the_guard() -> None:
    model, optimizer, loader, sums = private(Centred(), LOOPS[0].records())
    with pytest.raises(ValueError, match="depends on other examples"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert sums == []


def test_what_a_record_adds_does_not_depend_on_the_others() -> None:
    # With and without the last record: the sums differ by its own clipped gradient, at most C.
    torch.manual_seed(0)
    model = perceptron()
    x, y = LOOPS[0].records()
    found = []
    for n in (RECORDS, RECORDS - 1):
        one, optimizer, loader, sums = private(copy.deepcopy(model), (x[:n], y[:n]))
        for batch in loader:
            LOOPS[1].body(one, *batch)
            optimizer.step()
        found.append(sums[0])
    difference = {name: found[0][name] - found[1][name] for name in found[0]}
    norm = math.sqrt(sum(float(g.square().sum()) for g in difference.values()))
    assert 0.5 * C < norm <= C * (1 + 1e-5)


def by_its_own_size(model: Any, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    (loss / loss.item()).backward()


def by_the_number(model: Any, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) * len(x) / 7).backward()


@pytest.mark.parametrize(
    ("body", "message"), [(by_its_own_size, "read off"), (by_the_number, "number of records")]
)
def test_numbers_of_the_batch_may_not_scale_the_loss(body: Any, message: str) -> None:
    model, optimizer, loader, _ = private(perceptron(), LOOPS[0].records(), batch_size=4)
    with pytest.raises(ValueError, match=message):
        for _ in range(10):
            for x, y in loader:
                if len(x):
                    body(model, x, y)
                    optimizer.step()


def test_schedules_may_scale_the_loss() -> None:
    model, optimizer, loader, _ = private(perceptron(), LOOPS[0].records(), batch_size=4)
    for epoch in range(10):
        for x, y in loader:
            ((0.5 + epoch / 10) * F.cross_entropy(model(x), y) / 2).backward()
            optimizer.step()


def test_tensors_of_an_earlier_batch_are_refused_in_the_loss_and_nowhere_else() -> None:
    model, optimizer, loader, _ = private(perceptron(), LOOPS[0].records(), batch_size=4)
    loader.source.indices = lambda number: np.arange(number, number + 4)
    total, before = torch.zeros(()), None
    with pytest.raises(ValueError, match="of an earlier batch"):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            if number == 2:
                assert before is not None
                loss = loss + F.mse_loss(out, before)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            before = out.detach() * 2
    assert float(total) > 0
