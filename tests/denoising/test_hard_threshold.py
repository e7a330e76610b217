"""Truncation at the optimal hard threshold, against a full decomposition and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quietgrad.denoising.formulas import bulk_edge, observed_singular_values, shrink
from quietgrad.denoising.rules.hard_threshold import HardThreshold, hard_threshold
from quietgrad.noise import NoisySum

STD = 0.7


def released(matrix: torch.Tensor) -> NoisySum:
    return NoisySum({"w": matrix}, STD, expected_batch_size=10.0)


def spiked(m: int, n: int, edges: list[float], seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, len(edges), generator=source)).Q
    right = torch.linalg.qr(torch.randn(n, len(edges), generator=source)).Q
    values = torch.tensor(edges) * bulk_edge((m, n), STD)
    return (left * values) @ right.T + STD * torch.randn(m, n, generator=source)


@pytest.mark.parametrize(("m", "n"), [(60, 60), (40, 160), (150, 30)])
def test_it_is_the_decomposition_cut_at_the_threshold(m: int, n: int) -> None:
    noisy = spiked(m, n, [3.0, 1.8, 0.9])
    u, s, v = torch.linalg.svd(noisy, full_matrices=False)
    kept = torch.where(s >= hard_threshold((m, n), STD), s, 0.0)
    assert 2 <= int((kept > 0).sum()) < 6
    found = HardThreshold().denoise(released(noisy))
    assert found.denoised
    torch.testing.assert_close(found.gradients["w"], (u * kept) @ v, rtol=2e-3, atol=2e-3)


def test_where_nothing_is_above_the_threshold_the_matrix_stays() -> None:
    noisy = spiked(60, 60, [0.2])
    assert HardThreshold().denoise(released(noisy)).gradients["w"] is noisy


def test_a_square_has_the_published_constant() -> None:
    assert hard_threshold((400, 400), 1.0) == pytest.approx(4 / np.sqrt(3) * 20)
    assert hard_threshold((100, 400), 2.0) == hard_threshold((400, 100), 2.0)


@pytest.mark.parametrize(("m", "n"), [(100, 100), (50, 200)])
def test_a_spike_is_kept_where_keeping_it_costs_less(m: int, n: int) -> None:
    """In the limit a spike costs lam^2 where it is dropped, and where it is kept what its cosines
    leave (``formulas``); the two meet at the threshold.
    """
    signal = torch.linspace(0.5, 6.0, 2000, dtype=torch.float64) * (m * n) ** 0.25
    observed = observed_singular_values(signal, (m, n), 1.0)
    kept = signal**2 + observed**2 - 2 * observed * shrink(observed, (m, n), 1.0)
    above = observed >= hard_threshold((m, n), 1.0)
    assert above.any() and (~above).any()
    assert bool((kept[above] <= signal[above] ** 2).all())
    assert bool((kept[~above] > signal[~above] ** 2).all())


def test_a_flag_must_be_one() -> None:
    with pytest.raises(TypeError, match="embeddings"):
        HardThreshold(embeddings=1)  # type: ignore[arg-type]
