"""Ordinary gradients are shortened by less than 1e-3: their certified bounds stay below the share
by which every norm is enlarged.
"""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.rounding import (
    LONGEST_CHAIN,
    SHARE,
    SQUARES_AT_ONCE,
    Norms,
    blocks,
    chain,
    squared_norms,
)
from quietgrad.tensors import full_precision


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
