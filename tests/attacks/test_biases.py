"""Records whose biases cancel, measured with their layers' weights and apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.factors import SummedRows
from quietgrad.clipping.norms.rules.normalisations import layer_norm_rule


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_a_bias_has_one_least_divisor_with_its_weight_and_apart(
    autocast: torch.dtype | None,
) -> None:
    """Beside a longer record weights are materialized, and biases measured apart. Before: 40 texts
    moved by 4 C, under bfloat16 by 33 C.
    """
    crowd, longer, width = 40, 300, 64
    source = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    u, v = torch.nn.functional.normalize(torch.randn(2, width, generator=source), dim=1)
    x, g = torch.zeros(crowd + 1, longer, width), torch.zeros(crowd + 1, longer, width)
    if autocast is None:  # positions of the bias alone, and positions of the weight
        g[:crowd, 0], g[:crowd, 1] = u, u * (2.0**-13 - 1)
        g[:crowd, 4], g[:crowd, 5], x[:crowd, 4:6] = u / 1024, -u / 1024, 1024 * v
    else:
        g[:crowd, :8] = u
        g[:crowd, 1:8:2] *= -1
        g[:crowd, 7] *= 1 - 1 / 8
    x[crowd], g[crowd] = 1e-6, 1e-12

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return (model(batch[0]).float() * batch[1]).flatten(1).sum(1)

    limit = 1e-6 if autocast is None else 1e-3
    bound = Clipper(limit, engine="bookkeeping", physical_batch_size=64).bind(model, loss)
    one, beside = (
        torch.cat([s.double().flatten() for s in bound.clip(batch, step=2).gradients.values()])
        for batch in ((x[:crowd, :8], g[:crowd, :8]), (x, g))
    )
    assert float(one.norm()) > 5 * limit
    assert float((beside - one).norm()) < 5e-3 * limit


@pytest.mark.parametrize(("shape", "dims"), [((6,), 1), ((5, 6), 1), ((5, 6), 2), ((2, 5, 6), 2)])
def test_the_spread_of_a_norms_bias_is_that_of_its_gradients_rows(
    shape: tuple[int, ...], dims: int
) -> None:
    """Measured for the means, too: a tenth of them would be a tenth of the least divisor."""
    module = nn.LayerNorm(shape[len(shape) - dims :])
    x, grad = torch.randn(3, *shape), torch.randn(3, *shape)
    bias = layer_norm_rule(module, x, grad, ("weight", "bias"))["bias"]
    assert isinstance(bias, SummedRows)
    rows = grad.double().flatten(grad.dim() - dims).reshape(3, -1, math.prod(shape[-dims:]))
    torch.testing.assert_close(bias.spread(), rows.norm(dim=2).sum(1), rtol=1e-6, atol=0)
