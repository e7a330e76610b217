"""Hutchinson estimates whose bounds wait for each other are those that each parameter has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Sketch
from quietgrad.clipping.norms.estimators.hutch import hutch_norms
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.several import hutch_together
from quietgrad.clipping.norms.estimators.several.hutch_together import HutchTogether
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import NormSums
from quietgrad.randomness import RandomKey

PROJECTIONS = Projections(RandomKey.from_seed(3), 0)
K = 8


def factors(b: int, t: int, p: int, d: int, right: Tensor | None = None) -> DenseFactors:
    left = torch.randn(b, 1, t, p)
    return DenseFactors(left, torch.randn(b, 1, t, d) if right is None else right)


def several(b: int, t: int) -> list[DenseFactors]:
    """Wide and high ones, some with one input, one whose last positions are padding, a dead one."""
    shared = torch.randn(b, 1, t, 96)
    padded = factors(b, t, 130, 20)
    padded.left_bgtp[:, :, t // 2 :] = 0.0
    return [
        factors(b, t, 40, 300),
        factors(b, t, 300, 40),
        *(factors(b, t, p, 96, shared) for p in (96, 32)),
        padded,
        DenseFactors(torch.zeros(b, 1, t, 70), torch.randn(b, 1, t, 70)),
    ]


def sketch(name: str, scratch: Scratch) -> Sketch:
    return Sketch(name, K, PROJECTIONS, scratch, "block")


def sums_of(uses: list[DenseFactors], dtype: torch.dtype = torch.float32) -> NormSums:
    """Each in a group of its own."""
    scratch = Scratch()
    sums = NormSums.empty(len(uses), uses[0].sizes.b, torch.device("cpu"))
    some = HutchTogether(scratch, sums)
    for group, use in enumerate(uses):
        some.add(group, 5, use, sketch(f"weight {group}", scratch), dtype)
    some.measure()
    some.measure()  # nothing is left
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [1, 7, 33, 130])
def test_the_same_estimates_and_bounds_as_alone(t: int, dtype: torch.dtype) -> None:
    """Estimates to the bit; more parameters than wait at once."""
    torch.manual_seed(0)
    uses = several(3, t) * 6
    assert len(uses) > hutch_together.MOST
    sums = sums_of(uses, dtype)
    assert sums.entries == [5] * len(uses)
    for group, use in enumerate(uses):
        alone = hutch_norms([use], "block", K, PROJECTIONS, dtype)
        assert torch.equal(sums.squared[group], alone.squared)
        for found, known in (
            (sums.slack, alone.slack),
            (sums.margin_squared, alone.margin**2),
            (sums.least_squared, alone.least**2),
            (sums.terms_squared, alone.terms**2),
        ):
            assert torch.allclose(found[group], known, rtol=1e-6, atol=1e-40)


def test_a_record_has_the_same_bits_in_any_company() -> None:
    """Alone, among others, and padded longer."""
    torch.manual_seed(0)
    uses = several(5, 40)
    together = sums_of(uses)
    alone = sums_of([use.examples(slice(2, 3)) for use in uses])
    longer = [
        DenseFactors(
            *(torch.nn.functional.pad(x, (0, 0, 0, 24)) for x in vars(use).values() if x != ())
        )
        for use in (use.examples(slice(2, 3)) for use in uses)
    ]
    assert torch.equal(together.squared[:, 2], alone.squared[:, 0])
    assert torch.equal(together.squared[:, 2], sums_of(longer).squared[:, 0])
    for name in ("slack", "margin_squared", "least_squared", "terms_squared"):
        one, other = getattr(together, name)[:, 2], getattr(alone, name)[:, 0]
        assert torch.allclose(one, other, rtol=1e-13, atol=0), name


def test_micro_batches_of_other_sizes_do_not_meet() -> None:
    torch.manual_seed(0)
    uses = [factors(3, 4, 80, 66), factors(3, 9, 80, 66), factors(3, 4, 80, 66)]
    sums = sums_of(uses)
    for group, use in enumerate(uses):
        alone = hutch_norms([use], "block", K, PROJECTIONS, torch.float32)
        assert torch.equal(sums.squared[group], alone.squared)
        assert torch.allclose(sums.margin_squared[group], alone.margin**2, rtol=1e-6)


def test_least_divisors_are_left_out_where_margins_do() -> None:
    scratch, use = Scratch(), factors(2, 5, 80, 66)
    sums = NormSums.empty(1, 2, torch.device("cpu"))
    some = HutchTogether(scratch, sums, least=False)
    some.add(0, 5, use, sketch("weight", scratch), torch.float32)
    some.measure()
    assert not sums.least_squared.any() and sums.terms_squared.all()
