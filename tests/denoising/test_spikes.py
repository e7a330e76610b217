"""The fast search for what stands out of the noise, against a full decomposition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quietgrad.denoising import ConstantAmplification, spikes
from quietgrad.denoising.formulas import bulk_edge, detection_threshold, shrink
from quietgrad.denoising.spikes import (
    DENSE_SIDE,
    MISSED,
    Spikes,
    degree_of_test,
    detect,
    find_spikes,
    has_spike,
)

SHAPES = [(16, 384), (384, 16), (200, 300), (384, 384), (384, 1536), (1536, 384)]


def spiked(shape: tuple[int, int], times: list[float], seed: int, count: int = 1) -> Tensor:
    """[count, m, n]: unit noise and signals of so many detection thresholds."""
    m, n = shape
    generator = torch.Generator().manual_seed(seed)
    stack = torch.randn(count, m, n, generator=generator)
    for one in stack:
        u = torch.linalg.qr(torch.randn(m, len(times), generator=generator)).Q
        v = torch.linalg.qr(torch.randn(n, len(times), generator=generator)).Q
        one += (u * torch.tensor(times) * detection_threshold(shape, 1.0)) @ v.T
    return stack


def shrunk(spikes: Spikes, shape: tuple[int, int]) -> Tensor:
    weights = shrink(spikes.values_lp, shape, 1.0)
    return torch.bmm(spikes.left_lmp * weights.unsqueeze(1), spikes.right_lnp.transpose(1, 2))


def oracle(stack: Tensor) -> Tensor:
    """The same from a full decomposition in float64."""
    u, y, vh = torch.linalg.svd(stack.double(), full_matrices=False)
    weights = shrink(y, stack.shape[1:], 1.0)
    return ((u * weights.unsqueeze(1)) @ vh).float()


@pytest.mark.grid(5, "shapes and strengths between the extremes")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "times",
    [[1.5], [4.0, 2.0, 1.3], [300.0, 2.0], [1e4, 100.0, 3.0, 1.4], [3.0] * 6],
    ids=["one", "three", "strong-and-weak", "four-orders", "equal"],
)
def test_like_a_full_decomposition(shape: tuple[int, int], times: list[float]) -> None:
    """The values found are the decomposition's to 1e-3, and so is what the shrinker makes of them,
    up to what lies within 2 % of the edge.
    """
    stack = spiked(shape, times, seed=0, count=3)
    found = find_spikes(stack, 1.0)
    exact = torch.linalg.svdvals(stack.double())
    clear = exact > 1.02 * bulk_edge(shape, 1.0)
    clear &= exact > 1e-3 * exact[:, :1]  # float32 keeps no more digits beside the strongest
    assert bool(clear.any(1).all())  # else nothing would be tested
    width = found.values_lp.shape[1]
    assert not bool(clear[:, width:].any())
    torch.testing.assert_close(
        torch.where(clear[:, :width], found.values_lp.double(), 0.0),
        torch.where(clear, exact, 0.0)[:, :width],
        rtol=1e-3,
        atol=0,
    )
    # What may be missed: the shrinker's value at 2 % above the edge, for every value between the
    # edge and there.
    near = ((exact > bulk_edge(shape, 1.0)) & ~clear).sum(1)
    allowed = shrink(torch.tensor(1.02 * bulk_edge(shape, 1.0)), shape, 1.0) * near.sqrt()
    error = torch.linalg.vector_norm(shrunk(found, shape) - oracle(stack), dim=(1, 2))
    scale = torch.linalg.vector_norm(oracle(stack), dim=(1, 2))
    assert bool((error <= 0.01 * scale + allowed).all()), (error / scale, allowed)


@pytest.mark.parametrize("rank", [7, 20, 60])
def test_more_spikes_than_the_subspace_holds(rank: int) -> None:
    stack = spiked((200, 300), [3.0] * rank, seed=1, count=2)
    error = torch.linalg.vector_norm(shrunk(find_spikes(stack, 1.0), (200, 300)) - oracle(stack))
    assert float(error) < 0.02 * float(torch.linalg.vector_norm(oracle(stack)))


def test_vectors_are_orthonormal_where_values_are() -> None:
    found = find_spikes(spiked((384, 384), [5.0, 3.0, 2.0], seed=2), 1.0)
    count = int((found.values_lp > 0).sum())
    assert count == 3
    for vectors in (found.left_lmp, found.right_lnp):
        v = vectors[0, :, :count]
        torch.testing.assert_close(v.T @ v, torch.eye(count), rtol=0, atol=1e-3)


def test_noise_scale_does_not_matter() -> None:
    stack = spiked((384, 384), [3.0], seed=4)
    one, small = find_spikes(stack, 1.0), find_spikes(1e-6 * stack, 1e-6)
    torch.testing.assert_close(small.values_lp, 1e-6 * one.values_lp, rtol=1e-4, atol=0)


@pytest.mark.grid(1, "two shapes")
@pytest.mark.parametrize("shape", [(384, 384), (384, 1536)])
def test_pure_noise_passes_the_test_and_a_spike_does_not(shape: tuple[int, int]) -> None:
    """Fifty draws each; a false alarm of the test costs time only, a miss has probability
    ``MISSED`` each: all fifty must be found.
    """
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(50, *shape, generator=generator)
    assert int(has_spike(noise, 1.0, 1.02).sum()) <= 8
    # A signal whose observed value is just above kappa times the edge.
    u = torch.nn.functional.normalize(torch.randn(50, shape[0], 1, generator=generator), dim=1)
    v = torch.nn.functional.normalize(torch.randn(50, shape[1], 1, generator=generator), dim=1)
    spiked_noise = noise + 1.5 * detection_threshold(shape, 1.0) * u @ v.transpose(1, 2)
    top = torch.linalg.matrix_norm(spiked_noise, ord=2)
    assert bool(has_spike(spiked_noise, 1.0, 1.02)[top >= 1.02 * bulk_edge(shape, 1.0)].all())


@pytest.mark.parametrize("shape", [(384, 384), (768, 3072), (100, 2000)])
def test_the_degree_bounds_the_probability_of_a_miss(shape: tuple[int, int]) -> None:
    """All p vectors stay short only if each has |u^T w| below length / T_k(x): p independent normal
    variables.
    """
    degree, longest = degree_of_test(shape, 1.02)
    m, n = shape
    x = (1.02**2 * (math.sqrt(m) + math.sqrt(n)) ** 2 - (m + n)) / (2 * math.sqrt(m * n))
    gain = math.cosh(degree * math.acosh(x))
    assert math.erf(longest / gain / math.sqrt(2)) ** 8 <= MISSED
    assert 4 <= degree <= 40


@pytest.mark.parametrize("times", [30.0, 1e3, 1e6, 1e12])
def test_a_strong_signal_does_not_overflow_the_test(times: float) -> None:
    assert bool(has_spike(spiked((384, 384), [times], seed=3), 1.0, 1.02).all())


def test_small_matrices_are_always_looked_at() -> None:
    assert bool(has_spike(torch.randn(3, DENSE_SIDE, 500), 1.0, 1.02).all())


@pytest.mark.parametrize("shape", [(100, 300), (200, 200)])
def test_the_formed_operator_is_the_one_applied_factor_by_factor(shape: tuple[int, int]) -> None:
    stack = 0.1 * spiked(shape, [4.0, 1.5], seed=4, count=2)
    block = torch.randn(2, 5, shape[0], generator=torch.Generator().manual_seed(5))
    thin, formed = spikes.Operator(stack, 0.1), spikes.Operator(stack, 0.1).formed()
    torch.testing.assert_close(
        formed.apply(block, 2.0), thin.apply(block, 2.0), rtol=1e-4, atol=1e-4
    )
    # Both map the edges of the bulk to -1 and 1: those of G G^T lie at s^2 (sqrt(n) -+ sqrt(m))^2.
    m, n = shape
    assert formed.x_lmm is not None
    for side, x in ((-1, -1.0), (1, 1.0)):
        assert (
            0.1**2 * (n**0.5 + side * m**0.5) ** 2 - thin.centre
        ) / thin.half_width == pytest.approx(x)
    gram = stack[0].double() @ stack[0].double().T
    expected = (gram - thin.centre * torch.eye(m, dtype=torch.float64)) / thin.half_width
    torch.testing.assert_close(formed.x_lmm[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("times", "shape", "formed"),
    [(3.0, (100, 300), True), (3.0, (200, 200), False), (1e3, (100, 300), False)],
)
def test_the_operator_is_formed_for_wide_matrices_without_strong_signals(
    times: float, shape: tuple[int, int], formed: bool
) -> None:
    stack = spiked(shape, [times], seed=6)
    assert (spikes.Operator.of(stack, 1.0).x_lmm is not None) == formed
    of_some = spikes.Operator.of(stack.expand(3, -1, -1), 1.0).some(
        torch.tensor([True, False, True])
    )
    assert (of_some.x_lmm is not None) == formed and of_some.stack.shape[0] == 2


@pytest.mark.parametrize("shape", [(384, 384), (384, 100), (100, 300)])
def test_a_search_that_goes_on_from_the_test_finds_what_a_decomposition_finds(
    shape: tuple[int, int],
) -> None:
    """One stack with pure noise, three spikes, six equal ones, and seven (a
    second, wider block).
    """
    times: tuple[list[float], ...] = (
        [],
        [4.0, 2.0, 1.5],
        [6.0] * 6,
        [5.0, 4.0, 3.0, 2.5, 2.0, 1.8, 1.6],
    )
    stack = torch.cat([spiked(shape, some, seed=10 + i) for i, some in enumerate(times)])
    found = detect(stack, 1.0, 1.02)
    assert found is not None
    candidates, triplets = found
    assert candidates.tolist() == [False, True, True, True]
    for row, index in enumerate(candidates.nonzero()[:, 0].tolist()):
        u, y, vh = torch.linalg.svd(stack[index].double(), full_matrices=False)
        count = len(times[index])
        values = triplets.values_lp[row].double()
        torch.testing.assert_close(values[:count], y[:count], rtol=1e-3, atol=0)
        best = (u * shrink(y, shape, 1.0)) @ vh
        ours = (triplets.left_lmp[row].double() * shrink(values, shape, 1.0)) @ triplets.right_lnp[
            row
        ].double().T
        assert float((ours - best).norm() / best.norm()) < 0.01


@pytest.mark.grid(4, "shapes and strengths between the extremes")
@pytest.mark.parametrize("times", [1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e12])
@pytest.mark.parametrize("shape", [(128, 128), (100, 300)])
def test_a_signal_of_any_strength_is_found_and_harms_no_other_matrix(
    shape: tuple[int, int], times: float
) -> None:
    """Of what lies beside it in the same matrix float32 has no digit left; the others of its stack
    keep theirs.
    """
    stack = torch.cat([spiked(shape, [times], seed=20), spiked(shape, [4.0, 2.0], seed=21)])
    found = detect(stack, 1.0, 1.02)
    assert found is not None and found[0].all()
    y = torch.linalg.svdvals(stack.double())
    torch.testing.assert_close(found[1].values_lp[0, 0].double(), y[0, 0], rtol=1e-3, atol=0)
    torch.testing.assert_close(found[1].values_lp[1, :2].double(), y[1, :2], rtol=1e-3, atol=0)
    changed = ConstantAmplification().amplified(
        {str(i): matrix for i, matrix in enumerate(stack)}, 1.0
    )
    for i, matrix in enumerate(stack):
        assert not torch.equal(changed[str(i)], matrix) and bool(
            torch.isfinite(changed[str(i)]).all()
        )


def test_the_search_begins_with_the_vectors_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.cat([spiked((384, 384), [], seed=30), spiked((384, 384), [3.0], seed=31)])
    starts: list[Tensor] = []
    search = spikes._search

    def watched(operator: spikes.Operator, start: Tensor) -> Spikes:
        starts.append(start)
        return search(operator, start)

    monkeypatch.setattr(spikes, "_search", watched)
    assert detect(stack, 1.0, 1.02) is not None
    (start,) = starts
    top = torch.linalg.svd(stack[1].double(), full_matrices=False).U[:, 0]
    assert (
        start.shape[0] == 1 and float((start[0].double() @ top).norm()) > 0.999
    )  # eight random vectors: 0.14


@pytest.mark.grid(4, "shapes and strengths between the extremes")
@pytest.mark.parametrize("strongest", [4.0, 8.0, 12.0, 20.0, 30.0, 50.0, 200.0])
@pytest.mark.parametrize("shape", [(384, 384), (420, 900)])
def test_a_strong_spike_hides_no_weak_ones(shape: tuple[int, int], strongest: float) -> None:
    """Three equal ones just above the edge beside it, as the test's vectors lead to them and
    without.
    """
    for seed in range(3):
        noisy = spiked(shape, [strongest, 1.3, 1.3, 1.3], seed)
        exact = torch.linalg.svdvals(noisy[0].double())
        exact = exact[exact > 1.02 * bulk_edge(shape, 1.0)]
        detected = detect(noisy, 1.0, 1.02)
        assert detected is not None
        for one in (detected[1], find_spikes(noisy, 1.0)):
            found = one.values_lp[0, : len(exact)].double()
            torch.testing.assert_close(found, exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_matrices_of_a_run_that_diverged_are_passed_over(bad: float) -> None:
    """No error of the decomposition, and their neighbours in the stack are treated as ever."""
    stack = spiked((200, 300), [3.0], seed=0, count=3)
    alone = detect(stack[:1], 1.0, 1.02)
    stack[1, 3, 5] = bad
    found = detect(stack, 1.0, 1.02)
    assert found is not None and alone is not None
    assert found[0].tolist() == [True, False, True]
    torch.testing.assert_close(
        found[1].values_lp[0, 0], alone[1].values_lp[0, 0], rtol=1e-4, atol=1e-4
    )
    assert detect(stack[1:2], 1.0, 1.02) is None
