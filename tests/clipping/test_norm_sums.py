"""Bounds of norms whose parts are known: what is added in squares, what is not, and which of them
decides.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quietgrad.clipping.norms.estimators import ghost
from quietgrad.clipping.norms.estimators.materialized import materialized_norms
from quietgrad.clipping.norms.factors.dense import DenseFactors
from quietgrad.clipping.norms.rounding import (
    APART,
    LARGEST_NORM,
    OF_TERMS,
    SHARE,
    SMALLEST_NORMAL,
    SQUARES_AT_ONCE,
    Measured,
    Norms,
    NormSums,
)
from quietgrad.clipping.norms.spread import Spread, spread_of


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_two(entries: tuple[int, int] = (6, 3)) -> tuple[Measured, Measured, tuple[int, int]]:
    one = Measured(column(9.0), column(3.0), column(3.0), column(0.3), column(0.5))
    two = Measured(column(16.0), column(8.0), column(4.0), column(0.4), column(1.2))
    return one, two, entries


@pytest.mark.parametrize("at_once", [False, True])
def test_parameters_are_orthogonal_and_every_part_of_the_bound_counts(at_once: bool) -> None:
    one, two, entries = of_two()
    sums = NormSums.empty(1, 1, torch.device("cpu"))
    if at_once:
        pairs = zip(vars(one).values(), vars(two).values(), strict=True)
        sums.add_several([0, 0], Measured(*map(torch.cat, pairs)), entries)
    else:
        sums.add(0, one, entries[0])
        sums.add(0, two, entries[1])
    floor = math.sqrt(9 * SMALLEST_NORMAL)
    found = sums.norms()
    assert float(found.estimate) == 5.0
    assert float(found.certified) == pytest.approx(6.0 + 5.0 + floor, rel=1e-15)
    assert float(found.own) == pytest.approx(5.0 * (1 + SHARE) + floor, rel=1e-15)
    assert float(found.least) == pytest.approx(0.5, rel=1e-15) and found.single is None
    coarse = sums.norms(least_times=600.0)
    assert float(coarse.least) == pytest.approx(max(600 * 0.5, 600 * OF_TERMS * 1.3))
    assert coarse.single is not None and float(coarse.single) == pytest.approx(0.5)


def test_of_terms_that_know_nothing_of_each_other_the_root_may_decide() -> None:
    sums = NormSums.empty(1, 1, torch.device("cpu"))
    sums.add(0, Measured(column(9.0), column(0.0), column(0.0), column(1e-6), column(2.0)), 4)
    assert float(sums.norms(least_times=600.0).least) == pytest.approx(600 * OF_TERMS * 2.0)


def test_where_squares_may_have_vanished_the_floor_is_left() -> None:
    sums = NormSums.empty(1, 1, torch.device("cpu"))
    sums.add(0, Measured(column(0.0), column(0.0), column(0.0)), 10**6)
    assert float(sums.norms().certified) == float(sums.norms().own) >= 1e3 * 2.0**-63


def test_far_out_norms_grow_and_then_are_none() -> None:
    def own(norm: float) -> float:
        sums = NormSums.empty(1, 1, torch.device("cpu"))
        sums.add(0, Measured(column(norm**2), column(0.0), column(0.0)), 1)
        return float(sums.norms().own)

    assert own(2.0**50) == pytest.approx(2.0**50 * (1 + SHARE))
    assert own(2.0**62) >= 2.0**32 * 2.0**62
    assert own(2 * LARGEST_NORM) == math.inf


def norms(
    estimate: float = 10.0,
    certified: float | None = None,
    least: float = 0.0,
    single: float | None = None,
) -> Norms:
    def each(value: float) -> Tensor:
        return column(value).unsqueeze(0)

    return Norms(
        each(estimate),
        each(estimate * (1 + SHARE)),
        each(estimate if certified is None else certified),
        each(least),
        None if single is None else each(single),
    )


LIMITS = column(1.0)


def test_doubt_begins_where_a_bound_is_above_what_divides() -> None:
    def doubtful(some: Norms) -> bool:
        return bool(some.doubtful(LIMITS, 0.0))

    assert not doubtful(norms())
    assert doubtful(norms(certified=10.0 * (1 + 2 * SHARE)))  # more than the share
    assert not doubtful(norms(0.1, certified=0.9 * APART))  # not shortened in any case
    assert doubtful(norms(0.1, certified=0.1 + 1.1 * APART))  # but rounded by more than it may be
    assert doubtful(norms(least=11.0)) and not doubtful(norms(least=9.0))
    assert doubtful(norms(least=30.0, single=11.0))
    assert not doubtful(norms(least=30.0, single=9.0))  # half precision alone decides
    assert doubtful(norms(math.inf))


def test_doubt_about_one_group_is_doubt_about_the_example() -> None:
    one, two = norms(), norms(certified=20.0)
    both = (torch.cat([a, b]) for a, b in zip(fields(one), fields(two), strict=True))
    assert bool(Norms(*both).doubtful(column(1.0, 1.0), 0.0))
    both = (torch.cat([a, b]) for a, b in zip(fields(one), fields(two), strict=True))
    assert bool(Norms(*both).apart(column(1.0, 1.0).unsqueeze(1), column(1.0, 1.0)))


def fields(some: Norms) -> tuple[Tensor, ...]:
    return some.estimate, some.own, some.certified, some.least


def test_what_divides_is_the_largest_of_all_that_is_known() -> None:
    assert float(norms(least=11.0).enlarged) == 11.0
    assert float(norms(least=2.0).above(column(12.0).unsqueeze(0)).enlarged) == 12.0
    assert float(norms(least=12.0).above(column(2.0).unsqueeze(0)).enlarged) == 12.0
    assert float(norms(certified=15.0, least=11.0).divisors()) == 15.0
    assert float(norms(certified=15.0, least=16.0).divisors()) == 16.0
    assert float(norms().divisors()) == 10.0 * (1 + SHARE)


def test_of_a_ghost_norm_both_gram_matrices_and_the_cancelled_spread_count() -> None:
    """Mutants: the left Gram's error, that of both at once, or what is lost left out."""
    sums = torch.tensor([[7.0], [2.0], [4.0]], dtype=torch.float64)
    none = column(0.0)
    spread = Spread(column(8.0), column(0.25), none, none, none)
    found = ghost.slack_of(sums.clone(), spread, ghost.Errors(0.1, 0.2, 0.01, 0.5))
    by_hand = 2.0 * (0.1 + 0.01) + 4.0 * 0.2 + 8.0 * 3 * 0.1 * (0.2 + 0.1) + 0.25 + 0.5
    assert float(found) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("cross", [False, True])
def test_bounds_over_pairs_of_positions_add_up_what_cancels(cross: bool) -> None:
    """Mutant: without the absolute values of the Gram matrix; positions of either sign cancel."""
    torch.manual_seed(0)
    rows = torch.randn(3, 40, 6)
    rows[0, 1::2] = -rows[0, ::2]
    other = rows.flip(1)[:, :17] if cross else rows
    gram, one, two = rows @ other.mT, rows.norm(dim=2), other.norm(dim=2)
    true = torch.einsum("xij,xi,xj->x", *(x.double().abs() for x in (gram, one, two)))
    assert bool((ghost._between(gram, one, two) >= true).all())


@pytest.mark.parametrize("uses", [1, 3])
def test_margins_of_formed_gradients_count_every_addition_twice(uses: int) -> None:
    """Measured and summed are two roundings of one product; and of tied weights every use has its
    own additions.
    """
    some = [DenseFactors(torch.ones(1, 1, 50, 2), torch.ones(1, 1, 50, 2)) for _ in range(uses)]
    found = materialized_norms(some, torch.float32)
    additions = 2 * sum(use.additions for use in some)
    assert additions == 2 * 50 * uses
    spread = spread_of(some, torch.float32)
    assert float(spread.norm) >= 100 * uses
    roundoff = 2.0**-24
    assert float(found.margin) >= additions * roundoff * float(spread.norm)
    squares = float(found.squared)
    assert float(found.slack) >= 2 * SQUARES_AT_ONCE * roundoff * squares
