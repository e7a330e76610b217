"""Opacus scripts whose batches are flat ids and offsets (the usual text classifier over an
``EmbeddingBag``) run by their import alone, and each record is clipped for itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.collating import BagPlaces, find_bags
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager

pytestmark = pytest.mark.usefixtures("examined_once")

N, WORDS, C = 30, 25, 0.3
Collate = Callable[[list[Any]], Any]


def texts() -> list[tuple[int, list[int]]]:
    """The first two have one word and none: they do not tell that there are bags."""
    draws = torch.Generator().manual_seed(0)
    return [
        (i % 2, torch.randint(0, WORDS, (n,), generator=draws).tolist())
        for i, n in enumerate([1, 0, *(1 + k % 6 for k in range(N - 2))])
    ]


def collate(records: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The tutorial's."""
    labels, flat, offsets = [], [], [0]
    for label, ids in records:
        labels.append(label)
        flat.append(torch.tensor(ids, dtype=torch.int64))
        offsets.append(len(ids))
    return torch.tensor(labels), torch.cat(flat), torch.tensor(offsets[:-1]).cumsum(dim=0)


def with_the_end(records: list[Any]) -> dict[str, Tensor]:
    labels, flat, offsets = collate(records)
    ends = torch.cat([offsets, torch.tensor([len(flat)])])
    return {"offsets": ends, "words": flat, "weights": 1.0 + flat / WORDS, "labels": labels}


class Classifier(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.EmbeddingBag(WORDS, 6, **settings)
        self.fc = nn.Linear(6, 2)

    def forward(self, text: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.fc(self.embedding(text, offsets, per_sample_weights=weights).tanh())


def plain(model: nn.Module, batch: Any) -> None:
    label, text, offsets = (t.to("cpu") for t in batch)
    nn.CrossEntropyLoss()(model(text, offsets), label).backward()


def weighted(model: nn.Module, batch: Any) -> None:
    out = model(batch["words"].long(), batch["offsets"], batch["weights"])
    nn.CrossEntropyLoss()(out, batch["labels"]).backward()


class OwnLoss(Classifier):
    """A mean over its batch, so that it is asked for one record at a time."""

    def forward(self, text: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(super().forward(text, offsets), labels)


def by_itself(model: nn.Module, batch: Any) -> None:
    label, text, offsets = batch
    model(text, offsets, label).backward()


def unknown_words(model: nn.Module, batch: Any) -> None:
    label, text, offsets = batch
    text = torch.where(text > 20, 0, text)
    nn.CrossEntropyLoss()(model(text.clamp(max=19), offsets), label).backward()


def private(model: nn.Module, made_by: Collate, **loading: Any) -> Any:
    loading = {"batch_size": N} | loading
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(texts(), collate_fn=made_by, shuffle=True, **loading),
        noise_multiplier=1.0,
        max_grad_norm=C,
    )


def of_single_records(model: nn.Module, made_by: Collate, body: Any) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for record in texts():
        model.zero_grad()
        body(model, made_by([record]))
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for name, p in model.named_parameters():
            total[name] += p.grad * min(1.0, C / float(norm))
    return total


@pytest.mark.parametrize("most", [None, 7], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("made_by", "body", "model"),
    [
        (collate, plain, lambda: Classifier()),
        (collate, plain, lambda: Classifier(mode="max")),
        (with_the_end, weighted, lambda: Classifier(mode="sum", include_last_offset=True)),
        (collate, by_itself, lambda: OwnLoss()),
        (collate, unknown_words, lambda: Classifier()),
    ],
    ids=["mean", "max", "weighted", "loss of its own", "unknown words"],
)
def test_the_sum_is_that_of_single_records(
    made_by: Collate, body: Any, model: Any, most: int | None
) -> None:
    model = model()
    wanted = of_single_records(copy.deepcopy(model), made_by, body)
    model, optimizer, loader = private(model, made_by)
    released, release = [], optimizer._release
    optimizer._release = lambda clipped: (released.append(clipped.gradients), release(clipped))
    if most is not None:
        parts = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
        )
        loader = parts.__enter__()
    for batch in loader:
        optimizer.zero_grad()
        body(model, batch)
        optimizer.step()
    assert len(released) == 1
    for name, g in wanted.items():
        torch.testing.assert_close(released[0][name], g, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("made_by", "body"), [(collate, plain), (with_the_end, weighted)])
@pytest.mark.parametrize("workers", [0, 1])
def test_small_and_empty_batches(made_by: Collate, body: Any, workers: int) -> None:
    last = made_by is with_the_end
    model = Classifier(mode="sum", include_last_offset=last)
    model, optimizer, loader = private(model, made_by, batch_size=1, num_workers=workers)
    sizes = []
    for batch in loader:
        optimizer.zero_grad()
        sizes.append(len(batch["labels"] if last else batch[0]))
        body(model, batch)
        optimizer.step()
    assert 0 in sizes and max(sizes) > 1


def neighbours_word(records: list[Any]) -> Any:
    label, flat, offsets = collate(records)
    return label, flat.roll(1), offsets


def from_one(records: list[Any]) -> Any:
    label, flat, offsets = collate(records)
    return label, flat, offsets + (len(records) != 3)  # looks well where it is looked at first


@pytest.mark.parametrize(
    ("made_by", "said"),
    [(neighbours_word, "makes a row of several records"), (from_one, "begin at 0")],
)
def test_bags_that_mix_records_are_refused(made_by: Collate, said: str) -> None:
    _, _, loader = private(Classifier(), made_by)
    with pytest.raises(ValueError, match=said):
        next(iter(loader))


def test_where_bags_are() -> None:
    assert find_bags(collate, texts()) == BagPlaces((1,), 2, False)
    assert find_bags(with_the_end, texts()) == BagPlaces((1, 2), 0, True)

    def padded(records: list[Any]) -> Any:
        rows = [torch.tensor(ids) for _, ids in records]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.arange(len(records))

    def numbered(records: list[Any]) -> Any:
        return torch.zeros(len(records)), torch.arange(len(records)), torch.zeros(7)

    for other in (padded, numbered, default_collate, lambda records: 1 / 0):
        assert find_bags(other, texts()) is None
