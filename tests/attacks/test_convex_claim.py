"""The convex envelope claimed for what runs: the real estimators, all parameters of a record in
three ways of measuring at once, against the law that the claim stands for.

Statistical: 45 means of 500 draws at five standard errors, one-sided, a few times: false alarms
below 1e-4. Fixed keys: in fact always or never.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.accounting.hutch_plus_plus.law import hull
from quietgrad.clipping import Clipper, clipper
from quietgrad.clipping.layer_overrides import LayerOverrides
from quietgrad.clipping.norms.estimators.projections import Projections, Role
from quietgrad.events import LARGEST_COUNTED_RATIO, ClippingClaim, RandomizedClipping
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch

DRAWS, K = 500, 4
LAYERS = {"layers.0.second.weight": f"hutch:{2 * K}", "third.weight": "hutch++", "rest*": "exact"}


class Four(nn.Module):
    """Two parameters of Hutch in one block, with unlike k, one of Hutch++, one that is exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.ModuleDict({
            "first": nn.Linear(24, 20, bias=False),
            "second": nn.Linear(20, 12, bias=False),
        })])  # fmt: skip
        with torch.no_grad():  # nearly all of the record is in the parameter with the smaller k
            self.layers[0]["first"].weight.mul_(0.2)
        self.third = nn.Linear(24, 24, bias=False)
        self.rest = nn.Linear(24, 2, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        x, block = batch["x"], self.layers[0]
        hidden = block["second"](block["first"](x))  # rank one each: one position
        return 3.0 * hidden.sum(1) + 0.2 * self.third(x).sum(1) + 0.3 * self.rest(x).sum(1)


def clipper_of() -> Clipper:
    return Clipper(1.0, "hutch", K, layers=LAYERS, engine="bookkeeping")


def ratios() -> np.ndarray:
    """[DRAWS] of R: what the record is divided by over its norm, squared."""
    model, batch = Four(), {"x": torch.linspace(-1.0, 1.3, 24).reshape(1, 24)}
    whole = Clipper(1e9).clip(model, lambda m, b: m(b), batch).gradients
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole.values()))
    bound, key = clipper_of().bind(model, lambda m, b: m(b)), RandomKey.from_seed(23)
    drawn = [float(bound.norms(batch, Projections(key, s), s)) for s in range(DRAWS)]
    return (np.array(drawn) / norm) ** 2


honest = cache(ratios)


def stays_below(found: np.ndarray, claim: ClippingClaim) -> bool:
    """Whether the means of (c - R)_+ are below those of the claim's law."""
    assert isinstance(claim, RandomizedClipping) and claim.envelope == "convex"
    c = np.linspace(0.2, LARGEST_COUNTED_RATIO, 45)
    terms = np.maximum(c - found[:, None], 0.0)
    error = terms.std(axis=0) / math.sqrt(found.size)
    bound = hull(claim.sketch_dim, 0.05, moments=False).at(c)
    return bool((terms.mean(axis=0) - 5 * error <= bound).all())


@pytest.mark.statistical
def test_a_record_measured_in_four_ways_stays_below_its_claim() -> None:
    assert clipper_of().claim.clipping == RandomizedClipping(K, "convex")
    assert stays_below(honest(), clipper_of().claim.clipping)


@pytest.mark.statistical
def test_a_claim_of_the_larger_k_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the claim names the largest sketch dimension of the layers, not the smallest."""

    def largest(
        estimator: str, sketch_dim: int, overrides: LayerOverrides, engine: str
    ) -> ClippingClaim:
        return RandomizedClipping(max(sketch_dim, *(k for _, _, k in overrides)), "convex")

    monkeypatch.setattr(clipper, "claim_of", largest)
    claimed = clipper_of().claim.clipping
    assert claimed == RandomizedClipping(2 * K, "convex")
    monkeypatch.undo()  # what is measured is what runs
    assert not stays_below(honest(), claimed)


@pytest.mark.statistical
def test_columns_that_are_drawn_once_and_used_twice_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: a projection of k columns that are k/2, each twice. Its mean is right."""
    drawn = Projections.gaussian

    def repeated(self: Projections, stream: str, role: Role, rows: int, columns: int) -> Tensor:
        half = drawn(self, stream, role, rows, columns // 2) * 2**-0.5
        return torch.cat([half, half], dim=1)

    monkeypatch.setattr(Projections, "gaussian", repeated)
    assert not stays_below(ratios(), clipper_of().claim.clipping)


def test_parameters_with_one_projection_meet_rows_of_one_matrix() -> None:
    """So those of one block are one stacked matrix, whose law is that of independent terms; with
    another k the projection is another one.
    """
    drawn = Projections(RandomKey.from_seed(5))
    long, short = (drawn.gaussian("block", "hutch", rows, 8) for rows in (300, 20))
    assert torch.equal(long[:20], short)
    other = drawn.gaussian("block", "hutch", 20, 16)
    assert abs(float((other[:, :8] * short).mean())) * 8 < 0.5
    assert not torch.equal(other[:, :8] * 2**0.5, short)


@pytest.mark.parametrize("k", [2, 24])
def test_overrides_that_are_given_as_they_are_kept_are_checked(k: int) -> None:
    """Before: two columns ran under the claim of 32."""
    with pytest.raises(ValueError, match=r"not a multiple of sketch_dim=32"):
        Clipper(1.0, "exact", layers=(("*", "hutch", k),), sketch_dim=32)
    fewer = Clipper(1.0, "exact", layers={"*": "hutch"}, sketch_dim=k)
    assert replace(fewer, max_grad_norm=2.0).claim.clipping == fewer.claim.clipping
    with pytest.raises(ValueError, match=r"not a multiple of sketch_dim=32"):
        replace(fewer, sketch_dim=32)
