"""Random models: no good one is refused, and mixing is seen behind every kind of randomness."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, Loss, good, records, rows, small, switched_off
from quietgrad.clipping import Clipper


class Noisy(nn.Module):
    """Randomness of many kinds, each example on its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        n = len(h)
        if self.kind == "dropout":
            h = F.dropout(h, 0.4)
        elif self.kind == "feature-dropout":
            h = F.dropout1d(h.unsqueeze(2).expand(-1, -1, 4), 0.3).mean(2)
        elif self.kind == "stochastic-depth":
            h = h * (torch.rand(n, 1) < 0.8)
        elif self.kind == "normal":
            h = h + torch.randn_like(h)
        elif self.kind == "gumbel":
            h = F.gumbel_softmax(h)
        elif self.kind == "masked-positions":
            h = h * (torch.rand(n, 8).argsort(dim=1) < 6)
        elif self.kind == "attention-dropout":
            h_bhtd = h.view(n, 2, 2, 2)
            h = F.scaled_dot_product_attention(h_bhtd, h_bhtd, h_bhtd, dropout_p=0.3).reshape(n, 8)
        elif self.kind == "in-place":
            h = h * torch.empty_like(h).bernoulli_(0.7)
        elif self.kind == "probabilities":
            h = h * torch.bernoulli(torch.sigmoid(h.detach()))
        elif self.kind == "multinomial":
            h = h * F.one_hot(torch.multinomial(torch.softmax(h.detach(), 1), 1)[:, 0], 8)
        return self.head(h)


KINDS = [
    "dropout", "feature-dropout", "stochastic-depth", "normal", "gumbel",
    "masked-positions", "attention-dropout", "in-place",
    "probabilities", "multinomial",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_are_not_refused_are_decided_and_see_the_random_state_unchanged(
    kind: str,
) -> None:
    model = Noisy(kind).train()
    bound = Clipper(1.0, engine="bookkeeping").bind(model, good)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    bound.check(records(8, seed=2))
    drawn = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert torch.equal(drawn[0], torch.rand(2)) and drawn[1:] == (random.random(), np.random.rand())
    verdict = next(iter(bound._guard._verdicts.values()))
    assert verdict.together == 8  # it was compared: nothing was given up as random


@pytest.mark.parametrize("kind", KINDS)
def test_mixing_is_seen_behind_every_kind_of_randomness(kind: str) -> None:
    class MixesToo(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - 0.3 * x.detach().mean(0))

    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, engine="bookkeeping").clip(MixesToo(kind).train(), good, records())


class Masked(nn.Module):
    """SpecAugment: numpy draws which inputs of each example are left out; the loss shows little."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.mixes = nn.Linear(6, 8), nn.Linear(8, 3), mixes
        self.head.weight.data.mul_(1e-4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.from_numpy(np.random.rand(*x.shape) < 0.5)
        return self.head(self.first(x - 0.3 * x.mean(0) if self.mixes else x))


def test_masks_of_numpys_that_the_loss_hardly_shows_are_taken_one_at_a_time() -> None:
    bound = Clipper(1.0).bind(Masked().train(), good)
    bound.clip(records(), step=0)
    assert not next(iter(bound._guard._verdicts.values())).together


def test_mixing_is_seen_behind_masks_that_the_loss_hardly_shows() -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).clip(Masked(mixes=True).train(), good, records())


def test_bert_with_dropout_padding_and_autocast_is_not_refused() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, num_labels=3, max_position_embeddings=20
    )  # fmt: skip
    ids = torch.randint(3, 40, (8, 9))
    mask = (torch.arange(9) < torch.arange(2, 10).unsqueeze(1)).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask, "y": torch.randint(0, 3, (8,))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits, batch["y"], reduction="none")

    def half(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    def trimmed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        longest = int(batch["attention_mask"].sum(1).max())
        return loss(model, {k: t[:, :longest] if t.dim() > 1 else t for k, t in batch.items()})

    model = transformers.BertForSequenceClassification(config).train()
    for chosen in (loss, half, trimmed):
        bound = Clipper(1.0).bind(model, chosen)
        bound.clip(batch)
        assert next(iter(bound._guard._verdicts.values())).together
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).clip(model, lambda m, b: half(m, b) * (1 + 0.2 * b["y"].float().mean()), batch)


def test_one_record_that_cannot_be_varied_is_seen_to_draw_by_itself() -> None:
    """A first batch of one whole number: nothing can be made up beside it."""
    own = torch.Generator().manual_seed(0)
    model = nn.Embedding(5, 3)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["id"]).square().sum(-1) * draw()

    def draw() -> float:
        return float(torch.rand((), generator=own)) + 0.5

    with pytest.raises(ValueError, match="generator of its own"):
        Clipper(1.0, engine="bookkeeping").bind(model, loss).clip({"id": torch.tensor([2])})


def one_number_a_call() -> tuple[nn.Module, Loss]:
    """Of a generator that goes on from call to call, with a seed that is known."""
    own = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return good(model, batch) * (torch.rand((), generator=own) - 0.5).sign()

    return small(), loss


@pytest.mark.parametrize("engine", ["auto", "one-example"])
def test_a_number_for_all_from_a_generator_that_goes_on_is_refused(engine: str) -> None:
    """Taken one at a time, each record meets the number of its place."""
    model, loss = one_number_a_call()
    with pytest.raises(ValueError, match=r"own \(in .*loss\), a generator of its own"):
        Clipper(0.2, engine=engine).bind(model, loss).clip(records(), step=0)


def test_without_the_look_one_record_brings_others_to_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched_off(monkeypatch)
    sums = []
    for first in (0, 1):
        model, loss = one_number_a_call()
        bound = Clipper(0.2, engine="one-example").bind(model, loss)
        sums.append(bound.clip(rows(records(), *range(first, RECORDS))).gradients)
    moved = sum(float((g - sums[1][name]).square().sum()) for name, g in sums[0].items()) ** 0.5
    assert moved > 2 * 0.2
