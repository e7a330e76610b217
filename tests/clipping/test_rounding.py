"""Ordinary gradients are shortened by less than 1e-3: their certified bounds stay below the share
by which every norm is enlarged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cases import CASES, Case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.cost import Sketch
from quietgrad.clipping.norms.estimators import ghost
from quietgrad.clipping.norms.estimators.by_rows import norms_by_rows
from quietgrad.clipping.norms.estimators.hutch import Hutch
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.sketches import (
    head_margin,
    project_columns,
    project_rows,
    sketched,
    steady,
    tail_margin,
)
from quietgrad.clipping.norms.factors import DirectGradients, Kept, ListedGradients
from quietgrad.clipping.norms.factors.dense import DenseFactors
from quietgrad.clipping.norms.factors.one_hot import OneHotFactors
from quietgrad.clipping.norms.factors.rows import not_zero
from quietgrad.clipping.norms.factors.sums import columns
from quietgrad.clipping.norms.factors.sums import positions as over_positions
from quietgrad.clipping.norms.factors.sums.columns import sums_over_columns, thin_product
from quietgrad.clipping.norms.factors.sums.pairs import add_in_pairs, levels
from quietgrad.clipping.norms.factors.sums.positions import (
    GROUP,
    POSITIONS,
    add_over_positions,
    additions_over_positions,
)
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import (
    LONGEST_CHAIN,
    SHARE,
    SQUARES_AT_ONCE,
    Norms,
    blocks,
    chain,
    squared_norms,
)
from quietgrad.clipping.norms.spread import spread_of
from quietgrad.randomness import RandomKey
from quietgrad.tensors import full_precision


@pytest.mark.grid(5, "models that are not meant to be doubtful")
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "minilm"], ids=str)
def test_no_ordinary_example_is_doubtful(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, batch = case.build()
    seen: list[Norms] = []
    right = Work.doubtful

    def noting(self: Work, norms: Norms) -> torch.Tensor | None:
        seen.append(norms)
        return right(self, norms)

    monkeypatch.setattr(Work, "doubtful", noting)
    clip = 1e-6  # so that every gradient is shortened
    clipped = (
        Clipper(clip, engine="bookkeeping", physical_batch_size=1)
        .clip(model, loss, batch)
        .gradients
    )
    assert seen
    for norms in seen:
        assert bool((norms.certified <= norms.enlarged).all())
    total = float(sum(g.double().square().sum() for g in clipped.values())) ** 0.5
    assert 0 < total <= clip * sum(n.estimate.shape[1] for n in seen)
    assert SHARE < 1e-3


@pytest.mark.parametrize(
    "entries", [1, SQUARES_AT_ONCE, SQUARES_AT_ONCE + 1, 3 * SQUARES_AT_ONCE + 17]
)
def test_sums_of_many_squares_keep_small_ones(entries: int) -> None:
    """One large square first: small ones added to it in float32 one by one would all be lost."""
    values = torch.full((2, entries), 1e-4)
    values[:, 0] = 1.0
    torch.testing.assert_close(
        squared_norms(values), values.double().square().sum(1), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("positions", [1, LONGEST_CHAIN, LONGEST_CHAIN + 1, 1000])
def test_blocks_cover_every_position_once(positions: int) -> None:
    covered = [i for block in blocks(positions) for i in range(positions)[block]]
    assert covered == list(range(positions))
    assert chain(positions) <= LONGEST_CHAIN + -(-positions // LONGEST_CHAIN)


def test_products_in_full_precision_ignore_the_users_settings() -> None:
    before = torch.get_float32_matmul_precision()
    a, b = torch.randn(64, 300), torch.randn(300, 64)
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16), full_precision():
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            product = a @ b
        assert product.dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "blocks", "direct", "listed"])
def test_a_micro_batch_is_summed_before_it_is_added(kind: str) -> None:
    """Numbers below the last digit of what they are added to: as the third operand of a product
    each would be lost.
    """
    small, count = 2.0**-25, 8
    ones = torch.ones(count)
    column, row = torch.full((count, 1, 1, 1), small), torch.ones(count, 1, 1, 3)
    kept: Kept
    shape = torch.Size((1, 3))
    if kind == "dense":
        kept = DenseFactors(column, row)
    elif kind == "blocks":
        kept = DenseFactors(column.expand(-1, 2, -1, -1), row.expand(-1, 2, -1, -1))
        shape = torch.Size((2, 3))
    elif kind == "direct":
        kept = DirectGradients(torch.full((count, 3), small))
    else:
        kept = ListedGradients(tuple(torch.full((count // 4, 3), small) for _ in range(4)))
    total = kept.weighted_sum(ones, shape, torch.float32, torch.ones(shape))
    assert torch.equal(total, torch.full(shape, 1.0 + count * small))


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each its own"])
@pytest.mark.parametrize("columns", [5, 32, 33, 72, 384, 2049])
def test_a_thin_product_is_over_all_columns(columns: int, each: bool) -> None:
    source = torch.Generator().manual_seed(0)
    factor = torch.randn(3, 2, 7, columns, generator=source)
    projection = (
        torch.randn(3, 2, columns, 4, generator=source)
        if each
        else torch.randn(columns, 4, generator=source)
    )
    expected = factor.double() @ projection.double()
    found = thin_product(factor, projection, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("positions", [1, 32, 40, 64, 512, 700])
def test_a_sum_over_positions_is_over_all_of_them(positions: int) -> None:
    source = torch.Generator().manual_seed(0)
    long, small = (torch.randn(3, 2, positions, n, generator=source) for n in (9, 4))
    start = torch.randn(3, 2, 4, 9, generator=source)
    expected = start.double() + small.double().transpose(2, 3) @ long.double()
    found = add_over_positions(start.clone(), long, small)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("columns", [5, 32, 72, 384])
def test_a_row_of_a_thin_product_is_the_same_in_any_company(columns: int, threads: int) -> None:
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 1, 300, columns, generator=source)
    projection = torch.randn(8, columns, generator=source).t()
    together = thin_product(rows, projection, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (*range(1, 70), 127, 128, 129, 191, 193, 300):
            some = thin_product(rows[:, :, :count].contiguous(), projection, torch.float32)
            assert torch.equal(some, together[:, :, :count]), count
            moved = thin_product(rows[:, :, -count:], projection, torch.float32)
            assert torch.equal(moved, together[:, :, -count:]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("positions", [1, 31, 32, 33, 511, 512, 513, 1100])
def test_padding_changes_no_bit_of_a_sum_over_positions(positions: int) -> None:
    source = torch.Generator().manual_seed(0)
    long, small = (torch.randn(1, 1, 1100, n, generator=source) for n in (24, 8))
    whole = torch.zeros(1, 1, 1100, 1)
    whole[:, :, :positions] = 1.0
    alone = add_over_positions(None, long[:, :, :positions], small[:, :, :positions])
    assert torch.equal(add_over_positions(None, long * whole, small * whole), alone)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(("columns", "k"), [(3, 8), (33, 8), (64, 5), (384, 32)])
def test_a_sum_over_positions_is_the_same_in_any_company(
    columns: int, k: int, threads: int
) -> None:
    """Wherever its example stands in the batch, and whatever it was cut from."""
    source = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for positions in (1, 2, 7, 31, 33, 129):
            wide = torch.randn(9, 1, positions, columns + 1, generator=source)
            small = torch.randn(9, 1, positions, k, generator=source)
            long = wide[..., 1:].contiguous()
            together = add_over_positions(None, long, small)
            assert torch.equal(add_over_positions(None, wide[..., 1:], small), together)
            for first, last in ((0, 1), (1, 2), (3, 8), (8, 9), (2, 9)):
                some = slice(first, last)
                alone = add_over_positions(None, long[some].clone(), small[some].clone())
                moved = add_over_positions(None, long[some], small[some])
                assert torch.equal(alone, together[some]), (positions, some)
                assert torch.equal(moved, together[some]), (positions, some)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("positions", [40, 97, 512, 1300, 3 * GROUP])
def test_examples_together_and_apart_have_the_same_sums(positions: int) -> None:
    """On a processor examples whose positions are no whole runs are taken one at a time, on a GPU
    all at once and padded.
    """
    source = torch.Generator().manual_seed(0)
    long, small = (torch.randn(3, positions, n, generator=source) for n in (160, 16))
    together, apart = torch.empty(3, 16, 160), torch.empty(3, 16, 160)
    over_positions._sum_of_groups(small, long, together, Scratch())
    over_positions._all_at_once(small, long, apart, Scratch())
    assert torch.equal(together, apart)
    expected = small.double().mT @ long.double()
    torch.testing.assert_close(apart.double(), expected, atol=1e-3, rtol=1e-4)
    one_by_one = torch.empty(3, 16, 160)
    over_positions._one_after_the_other(small, long, one_by_one, Scratch())
    few = positions <= over_positions.FEW * POSITIONS
    assert torch.equal(one_by_one, apart) or not few


@given(st.integers(1, 70), st.integers(0, 9))
def test_pairs_add_up_everything_on_paths_as_short_as_stated(parts: int, padding: int) -> None:
    values = torch.randn(2, parts, 3, generator=torch.Generator().manual_seed(parts))
    found = add_in_pairs(values.clone())
    torch.testing.assert_close(found, values.sum(1))
    padded = torch.nn.functional.pad(values, (0, 0, 0, padding))
    assert torch.equal(add_in_pairs(padded), found)
    into = torch.empty(2, 3)
    assert torch.equal(add_in_pairs(values.clone(), into), found)
    assert torch.equal(into, found)
    depth, left = 0, parts
    while left > 1:
        depth, left = depth + 1, -(-left // 2)
    assert levels(parts) == depth


@pytest.mark.parametrize("first", ["head", "table"])
def test_a_sketch_of_tied_weights_has_both_uses(first: str) -> None:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (3, 6), generator=source)
    right = torch.randn(3, 1, 6, 8, generator=source)
    head = DenseFactors(torch.randn(3, 1, 6, 50, generator=source), right.flip(2))
    table = OneHotFactors(ids, right, 50)
    as_dense = DenseFactors(torch.nn.functional.one_hot(ids, 50).float().unsqueeze(1), right)
    uses, others = [head, table], [head, as_dense]
    if first == "table":
        uses, others = uses[::-1], others[::-1]
    for project, side in ((project_columns, 8), (project_rows, 50)):
        projection = torch.randn(4, side, generator=source).t()
        found, expected = (project(some, projection, torch.float32) for some in (uses, others))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def sketch_of(width: int, positions: int) -> tuple[Tensor, Tensor]:
    """[b] how far norms of sketches in float32 are from those of the same sketches in float64, and
    what their margin allows; half of the positions take back what the others gave.
    """
    source = torch.Generator().manual_seed(width + positions)
    left = 1.0 + torch.rand(4, 1, positions, width, generator=source)
    right = 1.0 + torch.rand(4, 1, positions, 2 * width, generator=source)
    left[:, :, 1::2] = -left[:, :, ::2]
    right[:, :, 1::2] = right[:, :, ::2] + 0.1
    use = DenseFactors(left, right)
    exact = DenseFactors(left.double(), right.double())
    drawn = Projections(RandomKey.from_seed(0))
    found, true = (
        Hutch().norms([factors], Sketch("w", 16, drawn), dtype)
        for factors, dtype in ((use, torch.float32), (exact, torch.float64))
    )
    return (found.squared.sqrt() - true.squared.sqrt()).abs(), found.margin


@pytest.mark.parametrize(("width", "positions"), [(40, 600), (300, 64), (700, 2)])
def test_sketches_are_off_by_less_than_their_margin(
    width: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, allowed = sketch_of(width, positions)
    assert (wrong < allowed).all()
    # The bound is no formality: products of six bits, off this way and that, are outside.
    monkeypatch.setattr(columns, "_sum_of_columns", coarse(columns._sum_of_columns))
    wrong, allowed = sketch_of(width, positions)
    assert (wrong > allowed).any()


def coarse(product: Callable[..., None]) -> Callable[..., None]:
    def off(rows: Tensor, projection: Tensor, out: Tensor, scratch: Scratch) -> None:
        product(rows, projection, out, scratch)
        if out.dtype == torch.float32:
            source = torch.Generator().manual_seed(1)
            out.add_(out * 2.0**-6 * torch.randn(out.shape, generator=source))

    return off


@pytest.mark.parametrize("positions", [2, 31, ghost.FEW_POSITIONS])
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e4])
def test_bounds_by_row_are_no_less_than_sums_over_pairs(
    positions: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with one position far above the rest, and where squares are flushed to zero; and hardly
    more than sqrt(t) times as much where positions weigh alike.
    """
    torch.manual_seed(0)
    left, right = torch.randn(2, 5, positions, 7)
    left[1, 0] *= 1e3
    right[2, 0] *= 1e3
    left[3], right[3] = left[3, :1] * torch.randn(positions, 1), right[3, :1]  # parallel rows
    left[4] *= 0
    left, right = left.mul(scale).unsqueeze(1), right.mul(scale).unsqueeze(1)
    (grams,) = DenseFactors(left, right).grams(torch.float32, 2**20) or ()
    by_row = ghost.sums_at_once(*grams)
    monkeypatch.setattr(ghost, "FEW_POSITIONS", 1)
    by_pairs = ghost.sums_at_once(*grams)
    n, m = (x[:, 0].double().norm(dim=2) for x in (right, left))
    inner = [(x[:, 0].double() @ x[:, 0].double().mT).abs() for x in (right, left)]
    true = torch.stack([torch.einsum("xij,xi,xj->x", inner[1], n, n),
                        torch.einsum("xij,xi,xj->x", inner[0], m, m)])  # fmt: skip
    assert torch.equal(by_row[0], by_pairs[0])
    assert bool((by_row[1:] >= true).all())
    if scale == 1.0:
        assert bool((by_row[1:, 0] <= 1.5 * positions**0.5 * true[:, 0]).all())
    # A bound that forgets the norm of all positions, or one of each, would be below.
    assert scale != 1e4 or bool((by_row[1:] / scale < true)[:, :4].all())


@pytest.mark.parametrize("margin, paired", [(tail_margin, True), (head_margin, False)])
def test_a_sketch_s_margin_counts_columns_and_positions(margin, paired: bool) -> None:
    """Mutants: one of the two left out. Roundings of random data are a thousandth of the bound, so
    no error that is drawn shows it; what rounding may do in the worst case is what is counted.
    """
    sums, unit = sums_over_columns(4096, paired), 2.0**-24
    assert sums.stretches == 64
    # In pairs: 32 additions, whose norms add up to sqrt(32) of the row's where all are equal, 16
    # and so on.
    across = sum(2.0 ** (n / 2) for n in range(6)) if paired else 64

    def of(positions: int) -> float:
        ones = torch.ones(2, 1, positions, 2)
        found = margin((DenseFactors(ones, ones),), sums, 16, ones, torch.float32)
        return float(torch.as_tensor(found).max())

    columns = sums.within * math.sqrt(sums.stretches) + across
    assert of(8) >= unit * (columns + POSITIONS)
    assert of(200_000) >= unit * (columns + POSITIONS + levels(200_000 // POSITIONS))
    assert additions_over_positions(2**21) == additions_over_positions(1)
    assert additions_over_positions(2**40) == POSITIONS + 35


@pytest.mark.parametrize("stretches", [1, 2, 3, 5, 12, 16, 37, 64])
def test_what_additions_of_stretches_give_is_at_most_what_is_counted(stretches: int) -> None:
    """Norms of all sums in pairs, of rows drawn and of a row whose stretches are all the same; the
    latter reaches the bound where their number is a power of two. One after the other is more.
    """
    sums = sums_over_columns(64 * stretches)
    counted, most = sums.across()
    drawn = torch.Generator().manual_seed(5)
    rows = torch.randn(64, stretches, dtype=torch.float64, generator=drawn).pow(3)
    rows[0] = 1.0
    rows[1:], rows[1, 0] = rows[1:].abs(), 1e6
    seen = torch.zeros(64, dtype=torch.float64)
    parts, depth = list(rows.square().T), 0
    while len(parts) > 1:
        pairs = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        added = len(parts) // 2
        seen += torch.stack(pairs[:added]).sqrt().sum(0)
        parts, depth = pairs, depth + 1
    share = seen / rows.norm(dim=1)
    assert (share <= counted * (1 + 1e-12)).all() and depth == most == levels(stretches)
    if stretches & (stretches - 1) == 0:
        assert float(share[0]) >= counted * (1 - 1e-12)
    assert stretches < 3 or counted < sums_over_columns(64 * stretches, paired=False).across()[0]


def test_what_the_sum_is_off_by_counts_for_sketches_that_come_out_too_long() -> None:
    """Mutant: once, not sqrt(2) times. A sketch of up to sqrt(2) |g| lets the record count for as
    much less than C, so it has to be so much above what the sum holds.
    """
    unit, positions = 2.0**-24, 400
    ones = torch.ones(2, 1, positions, 2)
    whole = (DenseFactors(ones, ones),)
    spread = spread_of(whole, torch.float32)
    once = unit * LONGEST_CHAIN * spread.norm.clone()
    estimate = torch.zeros(2, dtype=torch.float64)
    found = sketched(estimate, whole, spread, 0.0, 16, torch.float32)
    assert (found.margin >= math.sqrt(2) * once).all()
    exact = steady(found, whole, torch.float32)
    assert (exact.margin >= (1 + math.sqrt(2)) * once).all()
    table = OneHotFactors(torch.zeros(2, positions, dtype=torch.long), ones, 3)
    rows = norms_by_rows((table,), torch.float32)
    assert rows is not None
    longest = unit * positions * positions * math.sqrt(2)  # additions, and lengths to add up
    assert (rows.margin >= (1 + math.sqrt(2)) * longest).all()


def test_a_row_is_zero_where_all_its_entries_are() -> None:
    rows = torch.zeros(8, 5)
    for row, entry in enumerate((0.0, -0.0, -3.0, 3.0, -1e-40, 1e-40, math.nan, -math.inf)):
        rows[row, 2] = entry
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        some = rows.to(dtype).view(2, 1, 4, 5)
        assert torch.equal(not_zero(some), (some != 0).any(3)), dtype
