"""Records whose inputs and output gradients are of sizes at which squares overflow or are flushed,
while their products are ordinary gradients: measured alike in any company.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.work import ENGINES, Engine

CROWD, LONGER = 20, 300


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def clipped(model: nn.Module, limit: float, engine: Engine, x: Tensor, g: Tensor) -> Tensor:
    """A sum, in units of C."""
    bound = Clipper(
        limit, engine=engine, physical_batch_size=None if engine == "one-example" else 64
    )
    found = bound.bind(model, loss).clip((x, g), step=2).gradients.values()
    return torch.cat([s.double().flatten() for s in found]) / limit


def in_companies(model: nn.Linear, limit: float, x: Tensor, g: Tensor) -> list[Tensor]:
    """The sum of some records, as short as they are, one by one, and beside longer records of
    zeros, of which some are measured from Gram matrices and some are formed.
    """
    t = x.shape[1]
    found = [clipped(model, limit, e, x, g) for e in ENGINES[1:]]
    for longer in (2, 40, LONGER):
        if longer > t:
            more = (
                torch.zeros(len(x) + 1, longer, x.shape[2]),
                torch.zeros(len(g) + 1, longer, g.shape[2]),
            )
            for some, own in zip(more, (x, g), strict=True):
                some[: len(own), :t] = own
            found.append(clipped(model, limit, "bookkeeping", *more))
    return found


@pytest.mark.parametrize("value", [7e17, 5e17, 3e16, 1e9])
def test_rows_whose_squares_overflow_in_one_way_and_not_in_another(value: float) -> None:
    """Before: at 7e17 the records added C each where they stood alone, and nothing one by one or
    beside a record of two positions.
    """
    torch.manual_seed(0)
    x = torch.full((CROWD, 1, 1024), value)
    g = torch.full((CROWD, 1, 4), 1.0 / value)
    one, *others = in_companies(nn.Linear(1024, 4), 1e-3, x, g)
    assert float(one.norm()) > 0.99 * CROWD or value > 1e9
    assert max(float((other - one).norm()) for other in others) < 5e-3


def test_one_output_whose_square_overflows_fades_in_all_ways() -> None:
    """A row of one entry has its norm without a square. Before: C each, and 0 from squares."""
    torch.manual_seed(0)
    x, g = torch.full((CROWD, 1, 64), 1e-26), torch.full((CROWD, 1, 1), 1e25)
    one, *others = in_companies(nn.Linear(64, 1, bias=False), 1e-3, x, g)
    assert max(float((other - one).norm()) for other in others) < 5e-3


@pytest.mark.parametrize("size", [1e-16, 1e-18, 1e-19, 1e-21])
def test_rows_next_to_nothing_have_their_least_divisor_in_every_way(size: float) -> None:
    """Positions that cancel. Before: 20 texts moved by 17 C beside a longer record, where output
    gradients were of 1e-19: as roots of enlarged squares their norms were hidden by what makes up
    for flushed ones.
    """
    torch.manual_seed(0)
    u, v = nn.functional.normalize(torch.randn(2, 64), dim=1)
    x, g = torch.zeros(CROWD, 2, 64), torch.zeros(CROWD, 2, 64)
    x[:], g[:, 0], g[:, 1] = 2e16 * v, size * u, -size * (1 - 2.0**-15) * u
    limit = 2e16 * size * 2.0**-17
    one, *others = in_companies(nn.Linear(64, 64, bias=False), limit, x, g)
    assert float(one.norm()) > 1.0
    assert max(float((other - one).norm()) for other in others) < 5e-3


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_gradient_fades_before_its_norm_is_called_infinite(engine: Engine) -> None:
    """A bias, of which no product is formed: at 2^63 one rounding decides, and would by C."""
    model = nn.Linear(1, 4)
    model.weight.requires_grad_(False)
    for norm, most in ((2.0**50, 1.0), (2.0**62.9, 1e-6), (2.0**64, 0.0)):
        g = torch.tensor([[norm, 0.0, 0.0, 0.0]])
        found = float(clipped(model, 1.0, engine, torch.ones(1, 1), g).norm())
        assert found <= most and (found > 0.99 or norm > 2.0**50)
