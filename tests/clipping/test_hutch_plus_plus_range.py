"""What Hutch++'s basis spans in float32: the bound on what rounding hides holds for rank-deficient
and nearly deficient sketches, and where it says little the norm is raised above the truth.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quietgrad.clipping.norms.estimators import hutch_plus_plus
from quietgrad.clipping.norms.estimators.hutch_plus_plus import hutch_plus_plus_norms
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.sums.columns import ROWS_EACH, thin_product
from quietgrad.clipping.norms.factors.sums.positions import add_over_positions
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import Measured
from quietgrad.events import HIDDEN_SHARE
from quietgrad.randomness import RandomKey

KEY = RandomKey.from_seed(5)
P, D, T = 48, 40, 64


def factors(kind: str, tall: bool = True) -> tuple[Tensor, Tensor]:
    """[2, 1, t, p] output gradients and [2, 1, t, d] inputs."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    p, d = (P, D) if tall else (D, P)
    g, a = drawn(2, 1, T, p), drawn(2, 1, T, d)
    if kind == "rank one":
        g, a = drawn(2, 1, 1, p).expand(-1, -1, T, -1), drawn(2, 1, 1, d).expand(-1, -1, T, -1)
    elif kind == "rank three":
        g, a = g[:, :, :3], a[:, :, :3]
    elif kind.startswith("falling"):
        scales = float(kind.split()[1]) ** torch.arange(T)
        g = torch.linalg.qr(g[:, :, :D].mT).Q.mT * scales[:D, None]
        a = torch.linalg.qr(a[:, :, :D].mT).Q.mT
    elif kind == "common part":
        a = a + 30.0
    elif kind == "cancelling":  # positions are opposite but for 1e-4 of them
        half = T // 2
        g = torch.cat([g[:, :, :half], -g[:, :, :half] * (1 + 1e-4)], dim=2)
        a = torch.cat([a[:, :, :half], a[:, :, :half]], dim=2)
    return g.contiguous(), a.contiguous()


KINDS = [
    "full",
    "rank one",
    "rank three",
    "falling 0.5",
    "falling 0.05",
    "common part",
    "cancelling",
]


class Seen:
    """What the estimator bounded, beside what it is in float64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bound: Tensor | None = None
        self.basis: Tensor | None = None
        right = hutch_plus_plus._hidden

        def watched(uses, range_bgsk, basis_bgsk, *others):
            self.bound, self.basis = right(uses, range_bgsk, basis_bgsk, *others), basis_bgsk
            return self.bound

        monkeypatch.setattr(hutch_plus_plus, "_hidden", watched)


def truth(g: Tensor, a: Tensor, basis: Tensor, k: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """[2] each, float64: ||M||, sqrt(k) ||(I - QQ^T) M^T S||, the ideal estimate with that Q."""
    m = (g.double().mT @ a.double())[:, 0]
    m = m if g.shape[3] >= a.shape[3] else m.mT  # [2, longer, shorter]
    source = Projections(KEY, step)
    s, p = (source.gaussian("w", role, m.shape[1], k).double() for role in ("range", "tail"))
    own, beyond = basis[:, 0, : m.shape[2]], basis[:, 0, m.shape[2] :]
    assert not beyond.any()  # rows of zeros, by which all matrices begin alike
    q = torch.linalg.qr(own.double()).Q
    rest = m.mT - q @ (q.mT @ m.mT)
    hidden = math.sqrt(k) * (rest @ s).norm(dim=(1, 2))
    squared = (m @ q).square().sum((1, 2)) + (rest @ p).square().sum((1, 2))
    return m.norm(dim=(1, 2)), hidden, squared.sqrt()


def certified(measured: Measured) -> Tensor:
    return (measured.squared + measured.slack).sqrt() + measured.margin


@pytest.mark.parametrize("tall", [True, False])
@pytest.mark.parametrize("k", [2, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_hides_is_below_its_bound(kind, k, tall, monkeypatch) -> None:
    g, a = factors(kind, tall)
    for step in range(3):
        seen = Seen(monkeypatch)
        uses = [DenseFactors(g, a)]
        measured = hutch_plus_plus_norms(uses, "w", k, Projections(KEY, step), torch.float32)
        norm, hidden, ideal = truth(g, a, seen.basis, k, step)
        assert torch.all(hidden <= seen.bound[:, 0])
        # Either the envelope has allowed for it, or the gradient counts as no shorter than it is.
        assert torch.all((hidden <= HIDDEN_SHARE * norm) | (certified(measured) >= norm))
        assert torch.all(certified(measured) >= ideal)
        if kind == "full":
            assert torch.all(seen.bound[:, 0] < HIDDEN_SHARE * norm)  # it costs nothing
            assert torch.all(certified(measured) <= ideal * (1 + 2e-3))


@pytest.mark.parametrize("k", [2, 8])
def test_cancelling_positions_count_as_no_shorter_than_they_are(k, monkeypatch) -> None:
    g, a = factors("cancelling")
    seen = Seen(monkeypatch)
    uses = [DenseFactors(g, a)]
    measured = hutch_plus_plus_norms(uses, "w", k, Projections(KEY), torch.float32)
    norm, _, _ = truth(g, a, seen.basis, k, 0)
    assert torch.all(seen.bound[:, 0] > HIDDEN_SHARE * norm)
    assert torch.all(certified(measured) >= norm)


@pytest.mark.parametrize("wrong", ["another span", "a column twice", "stretched"])
def test_a_factorisation_that_is_wrong_is_noticed(wrong, monkeypatch) -> None:
    """No theorem about the routine is relied upon: the norm is then raised, or not finite."""
    right = torch.linalg.qr

    def broken(matrix: Tensor) -> tuple[Tensor, Tensor]:
        q, r = right(matrix)
        if wrong == "another span":
            q = right(torch.randn(q.shape, generator=torch.Generator().manual_seed(1)))[0]
            return q, q.mT @ matrix
        if wrong == "a column twice":
            q = q.clone()
            q[..., -1] = q[..., 0]
            return q, r
        return q * 1.01, r / 1.01

    monkeypatch.setattr(torch.linalg, "qr", broken)
    g, a = factors("full")
    uses = [DenseFactors(g, a)]
    measured = hutch_plus_plus_norms(uses, "w", 8, Projections(KEY), torch.float32)
    monkeypatch.undo()
    norm = (g.double().mT @ a.double()).flatten(1).norm(dim=1)
    assert torch.all(certified(measured) >= norm * (1 - 0.03 * (wrong == "stretched")))
    if wrong == "stretched":
        assert torch.all(measured.slack >= 0.02 * measured.squared)


def test_what_the_second_product_of_the_tail_loses_is_in_the_margin(monkeypatch) -> None:
    g, a = factors("full")

    def margin(share: float) -> Tensor:
        monkeypatch.setattr(hutch_plus_plus, "_thin_error", lambda *_: share)
        uses = [DenseFactors(g, a)]
        return hutch_plus_plus_norms(uses, "w", 8, Projections(KEY), torch.float32).margin

    norm = (g.double().mT @ a.double()).flatten(1).norm(dim=1)
    more = margin(1.0) - margin(0.0)  # as much as the sketch is long, about the norm
    assert torch.all(more >= norm / 3) and torch.all(more <= norm * 3)


def test_a_basis_of_everything_leaves_nothing_to_estimate() -> None:
    g, a = factors("full")
    uses = [DenseFactors(g, a)]
    measured = hutch_plus_plus_norms(uses, "w", D + 5, Projections(KEY), torch.float32)
    norm = (g.double().mT @ a.double()).flatten(1).norm(dim=1)
    assert torch.allclose(measured.squared.sqrt(), norm, rtol=1e-5)
    assert torch.all(certified(measured) >= norm)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    ("t", "p", "d", "k"),
    [
        (129, 100, 70, 7),
        (33, 512, 512, 32),
        (33, 768, 768, 32),
        (5, 30, 90, 3),
        (17, 31, 16, 8),
        (100, 71, 768, 8),
    ],
)
def test_a_record_has_the_same_bits_in_any_company(
    t: int, p: int, d: int, k: int, threads: int
) -> None:
    """Its estimate and what it may be wrong by. Mutants: matrices that lie where they come;
    products of a whole basis, which two threads divide where an example is the only one.
    """
    source = torch.Generator().manual_seed(0)
    g, a = (torch.randn(7, 1, t, n, generator=source) for n in (p, d))
    drawn = Projections(RandomKey.from_seed(0))

    def measured(some: slice) -> Tensor:
        use = DenseFactors(g[some].clone(), a[some].clone())
        found = hutch_plus_plus_norms([use], "w", k, drawn, torch.float32)
        return torch.stack([found.squared, found.slack, found.margin])

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = measured(slice(7))
        for first, last in (*((i, i + 1) for i in range(7)), (0, 2), (2, 5), (3, 7)):
            assert torch.equal(measured(slice(first, last)), together[:, first:last]), first
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("k", [3, 8, 20])
@pytest.mark.parametrize("t", [1, 2, 7, 17, 34, 250])
def test_padding_changes_no_bit_of_the_head(t: int, k: int) -> None:
    """Products with a basis of a record's own, and over positions. Mutants: positions not filled up
    to whole runs; rows over positions of sixteen entries.
    """
    source = torch.Generator().manual_seed(t)
    for p, d in ((16, 16), (70, 31), (768, 100)):
        g, a = (torch.randn(3, 1, t, n, generator=source) for n in (p, d))
        basis = torch.randn(3, 1, d, k, generator=source)

        together = _head(g, a, basis)
        for extra in (0, 1, 2, 13, 64, 600):
            longer = [torch.nn.functional.pad(x, (0, 0, 0, extra)) for x in (g, a)]
            assert torch.equal(_head(*longer, basis), together), (p, d, extra)
            alone = (x[1:2].clone() for x in (*longer, basis))
            assert torch.equal(_head(*alone), together[1:2]), (p, d, extra)


@pytest.mark.parametrize("n", [31, 70, 600])
def test_products_find_the_norms_of_rows_to_the_bit(n: int) -> None:
    """With a projection for all, and with one each, at lengths that are taken in either way; of
    this factor as it is, not of one that was written into.
    """
    source = torch.Generator().manual_seed(n)
    for t in (5, 100, 300, 1025):
        rows = torch.randn(3, 1, t, n, generator=source)
        basis, scratch = torch.randn(3, 1, n, 8, generator=source), Scratch()
        thin_product(rows, basis[0, 0].contiguous(), torch.float32, scratch, "all")
        thin_product(rows, basis, torch.float32, scratch, "each")
        for name in ("all", "each") if t >= ROWS_EACH else ("all",):
            found = scratch.norms_of(name, rows)
            assert found is not None
            assert torch.equal(found, torch.linalg.vector_norm(rows, dim=3))
            assert scratch.norms_of(name, rows.clone()) is None
        rows.mul_(2.0)
        assert scratch.norms_of("all", rows) is None


def _head(g: Tensor, a: Tensor, basis: Tensor) -> Tensor:
    return add_over_positions(None, g, thin_product(a, basis, torch.float32))
