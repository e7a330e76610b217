"""What a model itself rounds otherwise beside a longer text, before clipping sees it: a softmax
over more keys is added up in another order. Where a record's positions cancel, a sketch's margin
keeps that small, and beside exact norms what no norm is taken to be below (``rounding.OF_SPREAD``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms import rounding
from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.estimators.materialized import added_up, materialized_norms
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import DenseFactors, DirectGradients
from quietgrad.randomness import RandomKey

CROWD, LENGTH, WIDTH, ROWS, LIMIT = 40, 100, 64, 32, 1e-3
UNGUARDED = 5  # a release at which the guard does not look


def last() -> nn.Module:
    return nn.Linear(WIDTH, ROWS, bias=False)


class Attentive(nn.Module):
    """Frozen attention below the layer that is trained."""

    def __init__(self, out: Callable[[], nn.Module] = last) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, WIDTH).requires_grad_(False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).requires_grad_(False)
        self.out = out()

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


@pytest.mark.parametrize("norms", [ghost_norms, materialized_norms])
def test_what_stands_where_a_record_is_padded_does_not_count(norms: Any) -> None:
    """Its gradient is zero there, and its activations, a long text's padding, are what they are."""
    source = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, 1, 8, 4, generator=source) for _ in range(2))
    padded = torch.cat([right, torch.full((2, 1, 9, 4), 1e17)], dim=2)
    none = torch.cat([left, torch.zeros(2, 1, 9, 4)], dim=2)
    alone = norms([DenseFactors(left, right)], torch.float32).least
    beside = norms([DenseFactors(none, padded)], torch.float32).least
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=0.0)


def test_formed_gradients_of_which_nothing_is_known_have_no_least() -> None:
    formed = added_up([DirectGradients(torch.ones(3, 4))] * 2, torch.float32)
    assert formed.spread_b is None
    known = DirectGradients(torch.ones(3, 4), torch.full((3,), 7.0, dtype=torch.float64))
    assert added_up([known, known], torch.float32).spread_b.tolist() == [14.0] * 3


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "convolution": lambda: nn.Sequential(Turned(nn.Conv1d(6, 6, 1))),
    "layer norm": lambda: nn.LayerNorm(6),
    "group norm": lambda: nn.Sequential(Turned(nn.GroupNorm(2, 6))),
    "instance norm": lambda: nn.Sequential(Turned(nn.InstanceNorm1d(6, affine=True))),
}


class Turned(nn.Module):
    """A layer whose channels come before its positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.mT).mT
        return found


@pytest.mark.parametrize("name", ["bias", "weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_left_of_a_layer_is_next_to_nothing(kind: str, name: str) -> None:
    """Of every rule: the first half of a text's positions takes back what the second adds."""
    source, model = torch.Generator().manual_seed(0), KINDS[kind]()
    for n, parameter in model.named_parameters():
        parameter.requires_grad_(n.rpartition(".")[2] == name)
    x = torch.randn(1, 8, 6, generator=source).repeat(3, 2, 1)
    half = torch.randn(1, 8, 6, generator=source).repeat(3, 1, 1) * 1e6
    g = torch.cat([half, -half * (1.0 + 2.0**-20)], dim=1)
    for estimator in ("materialized", "ghost"):
        bound = Clipper(LIMIT, estimator, engine="bookkeeping").bind(
            model, lambda m, b: (m(b[0]) * b[1]).flatten(1).sum(1)
        )
        bound.check((torch.randn(4, 16, 6), torch.randn(4, 16, 6)))
        found = bound.clip((x, g), step=UNGUARDED).gradients.values()
        size = float(torch.cat([s.double().flatten() for s in found]).norm()) / LIMIT
        assert 0.0 < size < 0.1 * len(x)
