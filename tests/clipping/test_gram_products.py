"""Inner products of long rows are added up in pieces, so that a record of a language model is not
in doubt because its head has as many rows as the vocabulary has words.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.factors import products
from quietgrad.clipping.norms.factors.dense import DenseFactors
from quietgrad.clipping.norms.factors.products import (
    GRAM_COLUMNS,
    gram_chain,
    gram_products,
    write_gram_products,
)
from quietgrad.clipping.norms.rounding import Norms, gamma

LENGTHS = [1, GRAM_COLUMNS, GRAM_COLUMNS + 1, 3 * GRAM_COLUMNS + 17]


@pytest.mark.parametrize("entries", LENGTHS)
def test_inner_products_are_over_all_entries(entries: int) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 1, 5, entries), torch.randn(2, 1, 7, entries)
    found = gram_products(left, right, torch.float32)
    exact = left.double() @ right.double().mT
    allowed = gamma(gram_chain(entries), left, torch.float32) * (
        left.double().abs() @ right.double().abs().mT
    )
    assert found.dtype == torch.float32
    assert bool(((found - exact).abs() <= allowed).all())
    # Without its last entries it would be elsewhere.
    short = left[..., :-1].double() @ right[..., :-1].double().mT
    assert bool(((short - exact).abs() > allowed).any())


def test_the_path_of_additions_grows_by_the_piece() -> None:
    assert [gram_chain(n) for n in (1, GRAM_COLUMNS)] == [1, GRAM_COLUMNS]
    assert gram_chain(GRAM_COLUMNS + 1) == GRAM_COLUMNS + 2
    assert gram_chain(100 * GRAM_COLUMNS) == GRAM_COLUMNS + 100


def test_rounding_that_adds_up_stays_below_the_bound() -> None:
    """A running sum of equal products loses the same way at every addition: what pieces promise is
    kept, and one sum of all would not keep it.
    """
    entries = 256 * GRAM_COLUMNS
    row = torch.full((1, 1, 1, entries), 1.1)
    exact = entries * float(torch.tensor(1.1).double().square())
    bound = gamma(gram_chain(entries), row, torch.float32) * exact
    found = float(gram_products(row, row, torch.float32))
    running = float(np.cumsum((row * row).flatten().numpy(), dtype=np.float32)[-1])
    assert abs(found - exact) <= bound < abs(running - exact)


@pytest.mark.parametrize(
    ("blocks", "positions", "entries"),
    [(1, 256, 512), (1, 512, 1100), (2, 516, 600), (1, 258, 512), (1, 257, 512), (1, 1024, 512)],
)
@pytest.mark.parametrize("written", [True, False], ids=["in out", "anew"])
def test_of_many_rows_half_of_the_products_are_formed(
    blocks: int, positions: int, entries: int, written: bool
) -> None:
    """Rows are slices of wider ones, as factors are; halves of halves are halved too."""
    torch.manual_seed(0)
    rows = torch.randn(2, blocks, positions, entries + 24)[..., 8:-16]
    out = torch.full((2, blocks, positions, positions), math.nan) if written else None
    formed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        product = products.block_products

        def counted(left: Tensor, right: Tensor, *more: object) -> Tensor:
            formed.append(left.shape[:-1].numel() * right.shape[3])
            return product(left, right, *more)  # type: ignore[arg-type]

        patch.setattr(products, "block_products", counted)
        if out is not None and blocks == 1:
            write_gram_products(rows, out[:, 0])
            found = out
        else:
            found = gram_products(rows, rows, torch.float32)
    exact = rows.double() @ rows.double().mT
    lengths = rows.double().norm(dim=3)
    allowed = (
        gamma(gram_chain(entries), rows, torch.float32)
        * lengths.unsqueeze(3)
        * lengths.unsqueeze(2)
    )
    assert bool(((found - exact).abs() <= allowed).all())
    assert torch.equal(found, found.mT) or positions % 2
    share = sum(formed) / (found.numel() * -(-entries // GRAM_COLUMNS))
    assert share <= 0.75 or positions % 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("entries", LENGTHS)
def test_products_that_are_written_are_those_that_are_returned(
    entries: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 1, 6, entries + 8)[..., 4:-4].to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.full((3, 6, 6), math.nan, dtype=wide)
    write_gram_products(rows, out)
    assert torch.equal(out, gram_products(rows, rows, wide)[:, 0])


@pytest.mark.parametrize("positions", [3, 64, 512])
def test_an_example_has_the_same_products_in_any_company(positions: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 1, positions, 2 * GRAM_COLUMNS + 40)
    together = gram_products(rows, rows, torch.float32)
    for i in range(9):
        alone = gram_products(rows[i : i + 1], rows[i : i + 1], torch.float32)
        torch.testing.assert_close(together[i], alone[0], rtol=1e-6, atol=1e-4)


def test_certified_norms_of_long_rows_are_no_less_than_the_true_ones() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(4, 1, 20, 3000), torch.randn(4, 1, 20, 700)
    left[1] = left[1, :, :1]  # positions add up
    left[2, :, 10:] = -left[2, :, :10]  # and cancel, but for what the inputs leave
    right[2, :, 10:] = right[2, :, :10] + 1e-3 * torch.randn(1, 10, 700)
    measured = ghost_norms([DenseFactors(left, right)], torch.float32)
    true = (left.double().mT @ right.double()).square().sum((1, 2, 3))
    assert bool((measured.squared + measured.slack >= true).all())
    assert bool((measured.squared - measured.slack <= true).all())


class Head(nn.Module):
    """Words to words, with a large vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 32)
        self.head = nn.Linear(32, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(ids))
        return logits


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none").mean(dim=1)


@pytest.mark.parametrize("words", [4096, 32768])
def test_records_of_a_language_model_are_not_in_doubt(
    words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, ids = Head(words), torch.randint(0, words, (4, 65))
    seen: list[Norms] = []
    right = Work.doubtful

    def noting(self: Work, norms: Norms) -> Tensor | None:
        seen.append(norms)
        return right(self, norms)

    monkeypatch.setattr(Work, "doubtful", noting)
    bound = Clipper(1e-6, "ghost", engine="bookkeeping", physical_batch_size=4).bind(model, loss)
    bound.clip(ids, step=0)
    assert seen
    for norms in seen:
        assert bool((norms.certified <= norms.enlarged).all())
