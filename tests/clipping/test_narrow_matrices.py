"""A matrix whose smaller side is at most k is formed where sketches are asked for, whatever the
micro-batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.cost import MODELLED_PROCESSOR
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.events import RandomizedClipping
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch

RANK, WIDTH, POSITIONS = 4, 256, 12


class Adapter(nn.Module):
    """An adapter of low rank, and a square layer that is sketched."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.square = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.up(self.down(batch["x"]).tanh()) + batch["x"]
        return self.square(hidden).square().sum((1, 2))


def records(n: int = 6) -> Batch:
    source = torch.Generator().manual_seed(1)
    return {"x": torch.randn(n, POSITIONS, WIDTH, generator=source)}


def clipped(clipper: Clipper, seed: int, batch: Batch) -> dict[str, Tensor]:
    drawn = Projections(RandomKey.from_seed(seed))
    model = Adapter()
    return dict(clipper.clip(model, lambda m, b: m(b), batch, projections=drawn).gradients)


def spread_of_draws(clipper: Clipper, name: str) -> float:
    """How far two draws of the projections lie apart in one parameter's sum."""
    one, other = (clipped(clipper, seed, records())[name] for seed in (3, 4))
    return float((one - other).norm() / one.norm())


ALONE = {"square.weight": "exact", "up.weight": "exact"}


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
def test_narrow_matrices_are_measured_exactly(estimator: str) -> None:
    """Where all others are exact by name, nothing of the draw is left; by name an adapter's matrix
    is sketched all the same.
    """
    left_alone = Clipper(0.5, estimator, sketch_dim=8, layers=ALONE)
    by_name = Clipper(0.5, estimator, sketch_dim=8, layers={**ALONE, "down.weight": "hutch"})
    assert spread_of_draws(left_alone, "down.weight") == 0.0
    assert spread_of_draws(by_name, "down.weight") > 1e-4
    assert spread_of_draws(Clipper(0.5, estimator, sketch_dim=8), "square.weight") > 1e-4


def test_the_claim_stays_that_of_sketches() -> None:
    assert isinstance(Clipper(1.0, "hutch", sketch_dim=8).claim.clipping, RandomizedClipping)


def test_what_is_formed_follows_from_the_shape_and_k_alone() -> None:
    def formed(shape: tuple[int, ...], k: int, estimator: str = "hutch") -> bool:
        asked = Policy(estimator, k, MODELLED_PROCESSOR, steady=True)  # type: ignore[arg-type]
        return asked.for_shape(shape).estimator == "materialized"

    assert formed((8, 256), 8) and formed((256, 8), 8) and formed((4096, 16), 32, "hutch++")
    assert not formed((9, 256), 8)  # a sketch is smaller
    assert not formed((8, 255), 8)  # small whichever way
    assert not formed((8, 4, 16, 16), 8)  # a convolution
    assert not formed((256,), 8)
    assert not formed((8, 256), 8, "exact")


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("cut", [1, 2, 6])
def test_no_cut_moves_what_a_record_adds(estimator: str, cut: int) -> None:
    whole = clipped(Clipper(0.5, estimator, sketch_dim=8), 3, records())
    small = Clipper(0.5, estimator, sketch_dim=8, engine="bookkeeping", physical_batch_size=cut)
    for name, value in clipped(small, 3, records()).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-7)
