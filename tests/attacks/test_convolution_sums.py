"""An image whose positions cancel, beside a sketch: a convolution's native routine adds one output
position after the other, and what that rounds away or adds is what the sum holds.

The sketch sees other roundings of the same products. So its margin has to count every position.
Fixed projections: nothing here is left to chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.estimators import sketches
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import MatrixFactors
from quietgrad.clipping.norms.factors.convolution import ConvolutionFactors
from quietgrad.clipping.norms.factors.patches import Geometry
from quietgrad.clipping.norms.rounding import Measured
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch

SIDE, CHANNELS, LIMIT = 130, 8, 1e-9

# Roundings are aligned where the clip factor is near a power of two, as with these projections.
KEYS = {"hutch": (0, 5), "hutch++": (0, 12, 14)}


def rounded_up(terms: int) -> np.ndarray:
    """Numbers of sum zero, half of them rising, half falling; added up in float32 one after the
    other, nearly every addition rounds up by half a unit.
    """
    found, total = np.zeros(terms, np.float32), np.float32(0)
    for i in range(terms):
        ulp = float(np.spacing(max(total, np.float32(1e-3))))
        units = max(round(2.0 / terms / ulp), 1) * (1 if i < terms // 2 else -1)
        choices = [np.float32((units + part) * ulp) for part in (0.51, 0.6, 0.75, 0.5, 0.26)]
        found[i] = max(
            choices, key=lambda x: float(np.float32(total + x)) - float(total) - float(x)
        )
        total = np.float32(total + found[i])
    found[-1] -= np.float32(found.astype(np.float64).sum())
    return found


def cancelling() -> dict[str, Tensor]:
    """An image, and gradients at a convolution's outputs that sum to zero under every tap."""
    inner = SIDE - 2
    at_outputs = torch.zeros(1, CHANNELS, SIDE, SIDE)
    at_outputs[:, :, 1:-1, 1:-1] = torch.from_numpy(rounded_up(inner**2)).view(inner, inner)
    return {"x": torch.ones(1, CHANNELS, SIDE, SIDE), "g": at_outputs}


def contribution(estimator: str, key: int) -> float:
    """Of one image, in clipping norms."""
    torch.manual_seed(0)
    model, batch = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), cancelling()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) * batch["g"]).flatten(1).sum(1)

    bound = Clipper(LIMIT, estimator).bind(model, loss)
    bound.check({name: torch.randn(2, *value.shape[1:]) for name, value in batch.items()})
    found = bound.clip(batch, Projections(RandomKey.from_seed(key)), step=2).gradients["weight"]
    return float(found.double().norm()) / LIMIT


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
def test_an_image_whose_positions_cancel_stays_within_its_norm(estimator: str) -> None:
    """With a margin of two stretches (before: one): 3.4 C and 3.2 C."""
    assert max(contribution(estimator, key) for key in KEYS[estimator]) < 0.5


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
def test_a_margin_of_two_stretches_of_positions_is_too_small(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_two_stretches(
        uses: Sequence[MatrixFactors], like: Tensor, dtype: torch.dtype
    ) -> sketches.OwnRounding:
        return sketches.OwnRounding(sketches.gamma(256, like, dtype), 0.0)

    if not one_after_the_other():
        pytest.skip("this processor's routine adds positions in another order")
    monkeypatch.setattr(sketches, "own_rounding", of_two_stretches)
    assert max(contribution(estimator, key) for key in KEYS[estimator]) > 1.05


def one_after_the_other() -> bool:
    batch = cancelling()
    x, g = batch["x"], batch["g"]
    weight = torch.zeros(CHANNELS, CHANNELS, 3, 3, requires_grad=True)
    nn.functional.conv2d(x, weight, padding=1).backward(g)
    assert weight.grad is not None
    spread = float(g.double().abs().sum()) * 3 * CHANNELS**0.5
    return float(weight.grad.double().norm()) > 500 * 2.0**-24 * spread


@pytest.mark.parametrize("side", [8, 40, 200])
def test_every_output_position_counts(side: int) -> None:
    """Of n terms: n u (S + |M|) / 2, whatever the order; the same for all small images."""
    x, g = torch.ones(2, 3, side, side), torch.ones(2, 4, side, side)
    use = ConvolutionFactors(x, g, Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1))
    found = sketches.own_rounding([use], g, torch.float32)
    half = 2.0**-24 * side**2 / 2
    for share in found:
        assert bool((torch.as_tensor(share) >= half).all())
        assert bool((torch.as_tensor(share) <= 2.1 * max(half, 2.0**-24 * 512)).all())
    twice = sketches.own_rounding([use, use], g, torch.float32)
    assert (
        bool((torch.as_tensor(twice.of_spread) >= 4 * half).all())
        and not torch.as_tensor(twice.of_norm).any()
    )


def test_padding_an_image_changes_nothing_of_its_margin() -> None:
    geometry = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
    g = torch.zeros(1, 2, 64, 64)
    g[:, :, :40] = 1.0
    wider = torch.cat([g, torch.zeros(1, 2, 64, 64)], dim=2)
    shares = [
        sketches.own_rounding(
            [ConvolutionFactors(torch.ones_like(one), one, geometry)], one, torch.float32
        )
        for one in (g, wider)
    ]
    assert torch.equal(*(torch.as_tensor(share.of_spread) for share in shares))


def test_a_share_of_the_norm_lengthens_what_was_measured() -> None:
    """|M| (1 + e), whatever was allowed for before."""
    squared, slack = torch.tensor([4.0, 0.0, 1.0]).double(), torch.tensor([0.0, 9.0, 3.0]).double()
    measured = Measured(squared, slack, torch.ones(3).double())
    found = sketches.OwnRounding(0.0, 1e-3).beside(measured)
    lengthened = (squared + slack) * (1 + 1e-3) ** 2
    assert torch.allclose(found.squared + found.slack, lengthened, rtol=1e-14)
    assert torch.equal(found.squared, squared) and torch.equal(found.margin, measured.margin)
