"""Flat ids and offsets, as ``EmbeddingBag`` takes them, as one row a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import Clipper
from quietgrad.loading import Bags

pytestmark = pytest.mark.usefixtures("examined_once")

N, WORDS = 40, 30


def texts() -> list[tuple[int, list[int]]]:
    """Of no word to six, in two classes."""
    draws = torch.Generator().manual_seed(0)
    words = [torch.randint(0, WORDS, (i % 7,), generator=draws).tolist() for i in range(N)]
    return [(i % 2, ids) for i, ids in enumerate(words)]


def collate(records: list[Any]) -> tuple[Tensor, Bags]:
    """As in the usual tutorial, but for what is returned."""
    lengths = torch.tensor([0] + [len(ids) for _, ids in records])
    flat = torch.tensor([i for _, ids in records for i in ids], dtype=torch.long)
    labels = torch.tensor([label for label, _ in records])
    return labels, Bags.from_offsets(flat, lengths[:-1].cumsum(0))


class Classifier(nn.Module):
    def __init__(self, mode: str = "mean", last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.EmbeddingBag(WORDS, 5, mode=mode, include_last_offset=last)
        self.out = nn.Linear(5, 2)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.out(self.embedding(ids, offsets).tanh())


def loss(model: Any, batch: Any) -> Tensor:
    labels, bags = batch
    return F.cross_entropy(
        model(*bags.flat(model.embedding.include_last_offset)), labels, reduction="none"
    )


@pytest.mark.parametrize("last", [False, True])
def test_there_and_back(last: bool) -> None:
    flat, lengths = torch.arange(1, 8), torch.tensor([2, 0, 4, 1])
    offsets = torch.tensor([0, 2, 2, 6, 7][: 5 if last else 4])
    bags = Bags.from_offsets(flat, offsets, last)
    assert torch.equal(bags.lengths, lengths)
    assert bags.ids.tolist() == [[1, 2, 0, 0], [0] * 4, [3, 4, 5, 6], [7, 0, 0, 0]]
    for one, other in zip(bags.flat(last), (flat, offsets), strict=True):
        assert torch.equal(one, other)
    rows = Bags.of(list(flat.split(lengths.tolist())))
    assert torch.equal(rows.ids, bags.ids) and torch.equal(rows.lengths, lengths)
    none = Bags(bags.ids[:0], bags.lengths[:0]).flat(last)
    assert [len(t) for t in none] == [0, int(last)]
    assert torch.equal(Bags.from_offsets(*none, last).lengths, lengths[:0])


@pytest.mark.parametrize(
    ("offsets", "last"),
    [([1, 2], False), ([0, 3, 2], False), ([0, 6], False), ([0, 2, 4], True)],
    ids=["not from 0", "falling", "beyond", "not to the end"],
)
def test_offsets_that_cut_no_bags_are_refused(offsets: list[int], last: bool) -> None:
    with pytest.raises(ValueError, match="begin at 0"):
        Bags.from_offsets(torch.arange(5), torch.tensor(offsets), last)


@pytest.mark.parametrize(("mode", "last"), [("mean", False), ("sum", True), ("max", False)])
def test_each_record_is_clipped_for_itself(mode: str, last: bool) -> None:
    model, batch, total = Classifier(mode, last), collate(texts()), {}
    for record in texts():
        model.zero_grad()
        loss(model, collate([record])).sum().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.stack([g.norm() for g in found.values()]).norm()
        for name, g in found.items():
            total[name] = total.get(name, 0) + g * min(1.0, 0.3 / float(norm))
    clipper = Clipper(0.3, physical_batch_size=16)
    for name, g in clipper.clip(model, loss, batch).gradients.items():
        # The clipper allows for rounding: its factors are a little smaller.
        torch.testing.assert_close(g, total[name], rtol=2e-3, atol=1e-6)
    assert clipper.execution_choice(model, loss, batch).engine == "bookkeeping"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_reads_them(workers: int) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=3, steps=12).build(N)
    with plan.start() as run:
        loader = run.loader(
            texts(), physical_batch_size=2, collate_fn=collate, steps=12, num_workers=workers
        )
        for batch in loader:
            run.backward(model, loss, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert run.released == plan.steps


def test_flat_ids_without_them_are_refused_with_their_name() -> None:
    def flat(records: list[Any]) -> Any:
        labels, bags = collate(records)
        return labels, *bags.flat()

    plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=3).build(N)
    with plan.start() as run:
        batches = iter(run.loader(texts(), collate_fn=flat))
        with pytest.raises(ValueError, match=r"EmbeddingBag: quietgrad\.loading\.Bags"):
            run.backward(Classifier(), loss, next(batches))
        assert run.released == 0
