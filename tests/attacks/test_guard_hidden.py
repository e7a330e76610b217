"""Mixing that hides: in training only, in few random numbers, in a layer of small gradients, behind
a gate; and uses of a weight that capture does not see.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, With, good, records, rows, small, switched_off, without_mean
from quietgrad.clipping import Clipper


def mixed_by_numpy(model: With, h: Tensor) -> Tensor:
    """Mixup as it is usually written: in training mode only, the share drawn by numpy."""
    import numpy as np

    if not model.training:
        return h
    share = float(np.random.beta(1, 1))
    return share * h + (1 - share) * h[torch.randperm(len(h))].detach()


def test_mixing_in_training_only_that_cannot_be_held_still_is_not_approved_by_evaluation_mode() -> (
    None
):
    together: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        together.append(len(batch["y"]))
        return good(model, batch)

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(With(mixed_by_numpy).train(), loss)
    for step in range(3):
        bound.clip(records(), step=step)
        assert together[-RECORDS:] == [1] * RECORDS
    assert not next(iter(bound._guard._verdicts.values())).together


def test_one_example_more_than_ever_before_is_examined() -> None:
    def hardest_of_thirteen(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = good(model, batch)
        return losses * (losses.detach() >= losses.detach().topk(min(len(losses), 12)).values[-1])

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), hardest_of_thirteen)
    bound.clip(rows(records(), *range(12)), step=4)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=5)  # twice as many, and not a guarded step


def test_a_guarded_step_is_examined_in_each_mode_that_it_is_made_in() -> None:
    opened = {"now": False}

    def change(model: With, h: Tensor) -> Tensor:
        return without_mean(model, h) if opened["now"] and not model.training else h

    model = With(change)
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(model, good)
    for train in (True, False):
        model.train(train)
        bound.clip(records(), step=0)
    opened["now"] = True
    bound.model.train()
    bound.clip(records(), step=1)
    bound.model.eval()
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=1)


def mean_of(h: Tensor) -> Tensor:
    return h.detach().mean(0, keepdim=True).expand_as(h)


RARE: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform-below-0.3": lambda h: h - mean_of(h) if torch.rand(1).item() < 0.3 else h,
    "uniform-above-0.8": lambda h: h - mean_of(h) if torch.rand(()).item() > 0.8 else h,
    "normal-above-1": lambda h: h - mean_of(h) if torch.randn(1).item() > 1.0 else h,
    "one-integer-in-ten": lambda h: h - mean_of(h) if int(torch.randint(0, 10, (1,))) == 9 else h,
    "entries": lambda h: torch.where(torch.rand_like(h) < 0.05, mean_of(h), h),
    "rows": lambda h: torch.where(torch.bernoulli(torch.full((len(h), 1), 0.2)) > 0, mean_of(h), h),
    "mask-in-place": lambda h: torch.where(torch.empty_like(h).bernoulli_(0.05) > 0, mean_of(h), h),
}


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("kind", RARE)
def test_mixing_that_few_random_numbers_open_is_refused(kind: str, rate: float) -> None:
    model = With(lambda model, h: RARE[kind](h) if model.training else h, dropout=rate)
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=RECORDS).bind(model.train(), good).clip(records())


def test_integers_held_still_stay_inside_their_range() -> None:
    def crop(model: With, h: Tensor) -> Tensor:
        start = int(torch.randint(0, 1, (1,)))
        return h[:, start : start + 8]

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(With(crop).train(), good)
    bound.clip(records())
    assert next(iter(bound._guard._verdicts.values())).together == RECORDS


class Side(nn.Module):
    """A branch of hardly any weight in the loss, in which the batch's mean is taken off; clipped on
    its own, it counts in full.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.side = nn.Linear(6, 3), nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.side(x - x.detach().mean(0, keepdim=True))


def test_mixing_in_a_layer_of_small_gradients_is_refused(monkeypatch) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, side = model(batch["x"])
        return F.cross_entropy(logits, batch["y"], reduction="none") + 1e-4 * side[:, 0]

    for groups in ("whole", "layer"):
        with pytest.raises(ValueError, match="depends on other examples"):
            Clipper(1e-4, groups=groups, physical_batch_size=RECORDS).bind(Side(), loss).clip(
                records()
            )
    switched_off(monkeypatch)
    bound = Clipper(1e-5, groups="layer", physical_batch_size=RECORDS).bind(Side(), loss)
    batch = records()
    batch["x"][-1] = 60.0
    whole, rest = (bound.clip(b).gradients for b in (batch, rows(batch, *range(RECORDS - 1))))
    assert sum(float((g - rest[n]).double().pow(2).sum()) for n, g in whole.items()) ** 0.5 > 5e-5


class ScaledByTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.weight * x * table


class WithTable(nn.Module):
    """Positions are weighted by a table that all examples share; the last one's weight outdoes the
    others'.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.scale = ScaledByTable()
        table = torch.ones(positions, 4)
        table[-1] = -2.0 * positions
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x, self.table).mean((1, 2))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]).mean(
            (1, 2)
        )


@pytest.mark.parametrize("positions", [1, 2, 8, 15])
@pytest.mark.parametrize(
    "model", [WithTable, lambda positions: Causal()], ids=["table", "causal-mask"]
)
def test_a_shared_table_is_not_taken_apart_when_there_are_as_many_examples_as_positions(
    model: Callable[[int], nn.Module], positions: int
) -> None:
    torch.manual_seed(1)
    x = 1 + 0.1 * torch.randn(positions + 9, positions, 4)
    limit, chosen = 1e-3, model(positions)
    bound, exact = (
        Clipper(limit, engine=engine, physical_batch_size=size).bind(
            chosen, lambda m, batch: m(batch)
        )
        for engine, size in (("bookkeeping", 64), ("one-example", None))
    )
    bound.clip(x[: positions + 9], step=0)
    sums = {n: bound.clip(x[:n], step=4).gradients for n in range(positions, positions + 3)}
    for n, found in sums.items():
        for name, expected in exact.clip(x[:n], step=4).gradients.items():
            assert float((found[name] - expected).norm()) < 1e-3 * limit
    for n in (positions, positions + 1):
        assert (
            sum(float((g - sums[n + 1][k]).pow(2).sum()) for k, g in sums[n].items()) ** 0.5
            <= 1.001 * limit
        )


# ------------------------------------------------------------------------------------------------
# a use that capture does not see


class Gated(nn.Module):
    """From some call on, a weight is also used without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.open = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        return self.head(h + (100 * F.linear(h, self.layer.weight) if self.open else 0))


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_unseen_use_of_a_weight_adds_nothing_and_is_refused_at_the_next_guarded_step(
    engine: str,
) -> None:
    model, batch = Gated(), records()
    bound = Clipper(0.1, engine=engine).bind(model, good)
    bound.clip(batch, step=4)
    model.open = True
    whole = bound.clip(
        batch, step=5
    ).gradients  # not guarded: the norm and the sum are made of the same factors
    for out in range(0, RECORDS, 6):
        rest = bound.clip(rows(batch, *(i for i in range(RECORDS) if i != out)), step=5).gradients
        assert sum(
            float((g - rest[n]).double().pow(2).sum()) for n, g in whole.items()
        ) ** 0.5 <= 0.1 * (1 + 1e-4)
    if engine == "bookkeeping":
        with pytest.raises(ValueError, match=r"'layer.weight'.*used outside its module's call"):
            bound.clip(batch, step=7)
    else:  # autograd sees every use
        bound.clip(batch, step=7)
