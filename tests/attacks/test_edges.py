"""Where a gradient jumps, rounding decides on which side a record is: what remains, and its remedy
(docs/privacy/clipping.md).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper

COPIES, SHORT, LONG, C = 16, 9, 250, 1e-3
Texts = tuple[Tensor, Tensor, Tensor]  # positions, which of them are padding, targets


class Pooled(nn.Module):
    """One number of a text: its positions, weighted by a softmax over them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weigh, self.out = nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.weigh(x).squeeze(2).masked_fill(padding, -torch.inf)
        pooled = in_quarters(scores.softmax(1).unsqueeze(2) * x)
        return self.out(pooled).squeeze(1)


def in_quarters(x: Tensor) -> Tensor:
    """[b, t, n] -> [b, n], in an order that follows from the length, as some processors' products
    have it; others add up alike whatever the padding.
    """
    quarters = [part.unbind(1) for part in x.split(-(-x.shape[1] // 4), dim=1)]
    return sum_in_turn([sum_in_turn(list(quarter)) for quarter in quarters])


def sum_in_turn(parts: list[Tensor]) -> Tensor:
    total, *others = parts
    for part in others:
        total = total + part
    return total


def absolute_error(model: nn.Module, texts: Texts) -> Tensor:
    x, padding, target = texts
    return (model(x, padding) - target).abs()


def copies(seed: int, width: int, longer: int, target: float = 0.0) -> Texts:
    """Of one short text, and a longer one or none behind them, padded to a width."""
    source = torch.Generator().manual_seed(seed)
    x = torch.zeros(COPIES + longer, width, 8)
    x[:, :SHORT] = torch.randn(1, SHORT, 8, generator=source)
    if longer:
        x[COPIES:] = torch.randn(longer, width, 8, generator=source)
    padding = (torch.arange(width) >= SHORT).repeat(COPIES + longer, 1)
    padding[COPIES:] = False
    return x, padding, torch.full((COPIES + longer,), target)


def looked_at(model: nn.Module) -> BoundClipper:
    bound = Clipper(C, engine="bookkeeping").bind(model, absolute_error)
    x = torch.randn(6, SHORT, 8, generator=torch.Generator().manual_seed(1))
    bound.clip((x, torch.zeros(6, SHORT, dtype=torch.bool), torch.zeros(6)), step=0)
    return bound


def sum_of(bound: BoundClipper, texts: Texts) -> Tensor:
    found = bound.clip(texts, step=4).gradients
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


@pytest.mark.parametrize("fixed", [False, True], ids=["to the longest", "to one fixed size"])
def test_copies_at_their_target_turn_round_unless_all_are_padded_to_one_size(fixed: bool) -> None:
    model = Pooled()
    bound, moved = looked_at(model), []
    for seed in range(20):
        with torch.no_grad():
            short, padded = (
                float(model(*copies(seed, width, 0)[:2])[0]) for width in (SHORT, LONG)
            )
        target = min(short, padded)
        without = copies(seed, LONG if fixed else SHORT, 0, target)
        beside = copies(seed, LONG, 1, target)
        moved.append(float((sum_of(bound, beside) - sum_of(bound, without)).norm()) / C)
    if fixed:
        assert max(moved) < 1.01
    else:
        assert max(moved) > 5  # what remains
