"""Bags of words, as rows of ids or by offsets, are captured row by row of their table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.engines import contributions
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.cost import MODELLED_PROCESSOR, cost_of
from quietgrad.clipping.norms.rules.linear import embedding_rule

pytestmark = pytest.mark.usefixtures("examined_once")

WORDS, EXAMPLES, LENGTH = 20, 4, 6


def bags(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    return model(ids)


def flat(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    return model(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))


def of_their_own_lengths(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    """A bag ends before its first 0, or is empty."""
    lengths = (ids == 0).float().argmax(1)
    lengths[(ids != 0).all(1)] = ids.shape[1]
    words = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return model(words, offsets if model.include_last_offset else offsets[:-1])


def flat_and_weighted(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    words = ids.flatten()
    starts = torch.arange(0, ids.numel(), ids.shape[1])
    return model(input=words, offsets=starts, per_sample_weights=1.0 + words / WORDS)


def learnt_weights(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    """Weights of words that come from the bag itself."""
    return model(ids, per_sample_weights=model(ids).mean(1, keepdim=True) * torch.ones(ids.shape))


def weighted(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    return model(ids, per_sample_weights=1.0 + ids / WORDS)


class Bags(nn.Module):
    """A mean of word vectors and a linear classifier."""

    def __init__(
        self, call: Callable[[nn.EmbeddingBag, Tensor], Tensor] = bags, **settings: object
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(WORDS, 5, **settings)
        self.head = nn.Linear(5, 3)
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.call(self.bag, ids).tanh())


def batch_of() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (EXAMPLES, LENGTH), generator=generator)
    ids[1, 3:], ids[2], ids[3, 1:4] = 0, 0, 7  # padding, nothing else, and one word often
    return {"x": ids, "y": torch.randint(0, 3, (EXAMPLES,), generator=generator)}


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(use: Any, examples: int, signs: Any) -> Any:
        raise AssertionError(f"{use.site.name} went through the fallback")

    monkeypatch.setattr(contributions, "fallback_contributions", refuse)


@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost"])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_rows(mode: str, padding: int | None, estimator: Any) -> None:
    model = Bags(mode=mode, padding_idx=padding)
    assert_equal_to_oracle(
        model, cross_entropy, batch_of(), estimator=estimator, physical_batch_size=EXAMPLES
    )


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_offsets(mode: str, last: bool, padding: int | None) -> None:
    settings = {"mode": mode, "include_last_offset": last, "padding_idx": padding}
    model, batch = Bags(of_their_own_lengths, **settings), batch_of()
    assert_equal_to_oracle(model, cross_entropy, batch, physical_batch_size=EXAMPLES)
    Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)


@pytest.mark.parametrize("call", [flat, weighted, flat_and_weighted, learnt_weights])
def test_bags_with_weights(call: Callable) -> None:
    model, batch = Bags(call, mode="sum"), batch_of()
    assert_equal_to_oracle(model, cross_entropy, batch, physical_batch_size=EXAMPLES)
    Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)


def test_two_bags_an_example_are_taken_one_at_a_time() -> None:
    def halves(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
        starts = torch.arange(0, ids.numel(), ids.shape[1] // 2)
        return model(ids.flatten(), starts).unflatten(0, (-1, 2)).sum(1)

    model, batch = Bags(halves, mode="sum"), batch_of()
    assert_equal_to_oracle(model, cross_entropy, batch)
    assert Clipper(1.0).execution_choice(model, cross_entropy, batch).engine == "one-example"
    with pytest.raises(
        NotCaptured, match=r"layer 'bag' \(EmbeddingBag\) is called with several tensors"
    ):
        Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)


def test_large_tables_cost_no_gradient_of_their_size_for_every_example() -> None:
    table = nn.EmbeddingBag(200_000, 32, mode="mean")
    ids = torch.randint(0, 200_000, (64, 20))
    found = embedding_rule(table, ids, torch.randn(64, 20, 32), ["weight"])["weight"]
    assert found.one_hot and found.right_bgtd.shape == (64, 1, 20, 32)
    choice = Policy("exact", 32, MODELLED_PROCESSOR).choose(cost_of([found]))
    # Materialized ones are measured row by row, of the rows that are read.
    assert choice.estimator in ("ghost", "materialized") and not choice.kept


def test_weighted_bags_without_a_word() -> None:
    """A batch of one record of no words: there is no weight either."""

    def weighted_words(model: nn.EmbeddingBag, ids: Tensor) -> Tensor:
        words = ids[ids > 0]
        lengths = (ids > 0).sum(1)
        starts = lengths.cumsum(0) - lengths
        return model(words, starts, per_sample_weights=1.0 + words / WORDS)

    batch = {"x": torch.zeros(2, LENGTH, dtype=torch.long), "y": torch.tensor([0, 2])}
    assert_equal_to_oracle(Bags(weighted_words, mode="sum"), cross_entropy, batch)
