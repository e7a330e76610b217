"""A record whose positions cancel leaves partial sums far above the clipping norm: what other
records add to them, within one product, must not round as coarsely.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from quietgrad.beside.values import Observed
from quietgrad.clipping import Clipper, bound
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.engines.accumulator import Accumulator, Sums
from quietgrad.clipping.engines.bookkeeping import Shares
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms import rounding
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import dense
from quietgrad.clipping.sharded import passes
from quietgrad.clipping.sharded.company import Company
from quietgrad.clipping.sharded.passes import add_scattered
from quietgrad.clipping.sharded.sums import ScatteredSums
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch

CROWD, POSITIONS = 63, 128
HUGE = 2.0**30


class Table(nn.Module):
    """An embedding that is used twice."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.inner = nn.Embedding(rows, 8)
        self.beside = nn.Linear(8, 4, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        read = batch["one"][..., 0].long() * 0
        uses = [(self.inner(read) * batch[name]).sum((1, 2)) for name in ("one", "two")]
        return uses[0] + uses[1] + 0 * self.beside(self.inner(read)).sum((1, 2))


class Layer(nn.Module):
    """A layer that is used twice."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.columns = columns
        self.inner = nn.Linear(columns, rows, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        x = batch["one"].new_ones(*batch["one"].shape[:2], self.columns)
        one, two = ((self.inner(x) * batch[name]).sum((1, 2)) for name in ("one", "two"))
        return one + two


def moved(
    model: nn.Module,
    width: int,
    entries: int,
    estimator: str,
    left: float = 0.0,
    huge: float = HUGE,
) -> float:
    """How far, in clipping norms, the sum over a crowd of copies is moved by a record that adds in
    the second use what it takes in the first, but for a share ``left``; beyond what it adds by
    itself.
    """
    record = torch.zeros(1, POSITIONS, width)
    record[0, 0] = huge
    copies = torch.full((CROWD, POSITIONS, width), 0.6 / (2 * POSITIONS * math.sqrt(entries)))
    alone = {"one": record, "two": -record * (1 - left)}
    crowd = {"one": copies, "two": copies}
    both = {name: torch.cat([alone[name], crowd[name]]) for name in alone}
    clipper = Clipper(1.0, estimator, engine="bookkeeping", physical_batch_size=64)
    bound_clipper = clipper.bind(model, lambda module, batch: module(batch))
    projections = Projections(RandomKey.from_seed(3))
    with_it, without, own = (
        bound_clipper.clip(batch, projections, step=2).gradients for batch in (both, crowd, alone)
    )
    squares = [(with_it[n] - without[n] - own[n]).double().square().sum() for n in with_it]
    return float(sum(squares)) ** 0.5


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("rows", [2, 20_000])
def test_a_table_that_is_used_twice(estimator: str, rows: int) -> None:
    assert moved(Table(rows), 8, 8, estimator) < 1e-4  # 38 C before


def test_a_table_that_is_read_at_every_position() -> None:
    assert moved(Table(20_000), 8, 8, "materialized", left=2.0**-9) < 1e-3  # 0.2 C before


@pytest.mark.parametrize("columns, rows", [(4, 4), (256, 2), (32, 32)])
def test_a_layer_that_is_used_twice(columns: int, rows: int) -> None:
    assert moved(Layer(columns, rows), rows, columns * rows, "hutch") < 1e-4  # up to 16 C before


@pytest.mark.parametrize("columns, rows", [(4, 4), (32, 32)])
def test_a_layer_that_is_used_twice_under_exact_norms(columns: int, rows: int) -> None:
    """Partial sums far above what it adds, of a record that is not shortened: 0.3 C before."""
    entries = columns * rows
    huge = 2.0**14 / math.sqrt(entries)
    assert moved(Layer(columns, rows), rows, entries, "ghost64", huge=huge) < 1e-3


@pytest.mark.parametrize("huge", [2.0**6, 2.0**7, 2.0**8])
def test_what_stays_in_the_product_under_exact_norms(huge: float) -> None:
    assert moved(Layer(4, 4), 4, 16, "ghost64", huge=huge) < 0.02


def test_a_record_of_small_norm_left_in_the_product_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounding, "APART", math.inf)
    monkeypatch.setattr(rounding, "OF_SPREAD", 0.0)
    assert moved(Layer(4, 4), 4, 16, "ghost64", huge=2.0**12) > 0.1


@pytest.mark.parametrize("left", [2.0**-7, 2.0**-8, 2.0**-9])
def test_what_stays_in_the_product(left: float) -> None:
    """Rounding just below what is formed apart."""
    assert moved(Layer(256, 2), 2, 512, "hutch", left) < 0.03


def test_sharded_sums_take_it_apart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def scattered(work: Work, batch: Examples, sums: Sums) -> Observed:
        nothing = ScatteredSums(cast(Company, SimpleNamespace(size=1)), {})
        return add_scattered(work, batch, nothing, sums)

    seen: list[int] = []
    right = passes.shares_of

    def noting(work: Work, accumulator: Accumulator) -> Shares:
        shares = right(work, accumulator)
        seen.append(len(shares.apart))
        return shares

    monkeypatch.setattr(passes, "shares_of", noting)
    monkeypatch.setattr(bound, "add_by_bookkeeping", scattered)
    assert moved(Table(2), 8, 8, "hutch") < 1e-4
    assert moved(Layer(4, 4), 4, 16, "hutch", 2.0**-11) < 1e-4
    assert sorted(seen) == [0, 0, 1, 1, 1, 1]


def test_one_product_of_all_records_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "APART", math.inf)
    monkeypatch.setattr(dense, "THIN", 0)
    assert moved(Layer(4, 4), 4, 16, "hutch") > 0.1  # 0.3 or more, 0.19 on another processor
