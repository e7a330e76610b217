"""What a model itself rounds otherwise beside a longer text, before clipping sees it: a softmax
over more keys is added up in another order. Where a record's positions cancel, a sketch's margin
keeps that small, and beside exact norms what no norm is taken to be below (``rounding.OF_SPREAD``).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms import rounding
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.randomness import RandomKey

CROWD, LENGTH, WIDTH, ROWS, LIMIT = 40, 100, 64, 32, 1e-3


class Attentive(nn.Module):
    """Frozen attention below the layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, WIDTH).requires_grad_(False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).requires_grad_(False)
        self.out = nn.Linear(WIDTH, ROWS, bias=False)

    def hidden(self, x: Tensor, padding: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        mixed: Tensor = self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        return h + mixed

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(x, padding))
        return out


def sum_of(longer: int, estimator: str) -> Tensor:
    """In clipping norms: of texts whose output gradients are orthogonal to their inputs."""
    source, model = torch.Generator().manual_seed(5), Attentive()
    one = torch.randn(1, LENGTH, 4, generator=source)
    hidden = model.hidden(one, torch.zeros(1, LENGTH, dtype=torch.bool))[0].double()
    left, values, _ = torch.linalg.svd(hidden)
    null = left[:, int((values > 1e-9 * values[0]).sum()) :]
    drawn = torch.randn(null.shape[1], ROWS, generator=source, dtype=torch.float64)
    records, padded = CROWD + (longer > 0), max(longer, LENGTH)
    x, g = torch.zeros(records, padded, 4), torch.zeros(records, padded, ROWS)
    padding = torch.ones(records, padded, dtype=torch.bool)
    x[:CROWD, :LENGTH], g[:CROWD, :LENGTH] = one, (null @ drawn).float() * 1e6
    padding[:CROWD, :LENGTH] = False
    if longer:
        g[CROWD], padding[CROWD] = 1e-12, False
    bound = Clipper(LIMIT, estimator, 16, engine="bookkeeping", physical_batch_size=64).bind(
        model, lambda m, b: (m(b[0], b[2]) * b[1]).flatten(1).sum(1)
    )
    none = torch.zeros(4, 3, dtype=torch.bool)
    bound.check((torch.randn(4, 3, 4), torch.randn(4, 3, ROWS), none))
    drawn_once = Projections(RandomKey.from_seed(3), 4)
    found = bound.clip((x, g, padding), drawn_once, step=4).gradients["out.weight"]
    return found.double() / LIMIT


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
def test_a_sketchs_margin_covers_what_attention_rounds(estimator: str) -> None:
    """0.009 C with 40 texts."""
    moved = sum_of(131, estimator) - sum_of(0, estimator)
    assert float(moved.norm()) < 0.05


@pytest.mark.parametrize("estimator", ["auto", "materialized", "ghost", "ghost64"])
def test_exact_norms_divide_by_more_than_attention_rounds(estimator: str) -> None:
    """Before: 27 C with 40 texts."""
    moved = sum_of(131, estimator) - sum_of(0, estimator)
    assert float(moved.norm()) < 0.05


@pytest.mark.parametrize("estimator", ["auto", "ghost"])
def test_divided_by_what_is_left_it_is_seen(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "OF_SPREAD", 0.0)
    moved = sum_of(131, estimator) - sum_of(0, estimator)
    assert float(moved.norm()) > 1.0


def test_without_a_margin_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding.Norms, "divisors", lambda norms: norms.enlarged)
    moved = sum_of(131, "hutch") - sum_of(0, "hutch")
    assert float(moved.norm()) > 0.1
