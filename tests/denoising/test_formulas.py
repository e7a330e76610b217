"""The formulas of random matrix theory against each other and against simulation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quietgrad.denoising import (
    bulk_edge,
    detection_threshold,
    observed_singular_values,
    shrink,
    signal_singular_values,
    squared_overlaps,
)

SIDES = st.integers(2, 2000)
SCALES = st.floats(1e-6, 1e3)

settings.register_profile("here", deadline=None)
settings.load_profile("here")


def in_float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(m=SIDES, n=SIDES, s=SCALES, times=st.floats(1.001, 1e3))
def test_the_inverse_undoes_the_forward_map(m: int, n: int, s: float, times: float) -> None:
    signal = in_float64(times * detection_threshold((m, n), s))
    observed = observed_singular_values(signal, (m, n), s)
    assert float(observed) > bulk_edge((m, n), s)
    torch.testing.assert_close(
        signal_singular_values(observed, (m, n), s), signal, rtol=1e-5, atol=0
    )


@given(m=SIDES, n=SIDES, s=SCALES, times=st.floats(1.01, 1e3))
def test_the_closed_form_is_equation_8(m: int, n: int, s: float, times: float) -> None:
    signal = in_float64(times * detection_threshold((m, n), s))
    left, right = squared_overlaps(signal, (m, n), s)
    product = signal * left.sqrt() * right.sqrt()
    torch.testing.assert_close(
        shrink(observed_singular_values(signal, (m, n), s), (m, n), s), product, rtol=1e-6, atol=0
    )


@given(m=SIDES, n=SIDES, s=SCALES, share=st.floats(0, 1))
def test_nothing_is_left_below_the_edge(m: int, n: int, s: float, share: float) -> None:
    below = in_float64(share * bulk_edge((m, n), s))
    assert float(shrink(below, (m, n), s)) == 0
    assert float(signal_singular_values(below, (m, n), s)) == 0
    weak = in_float64(share * detection_threshold((m, n), s))
    assert [float(o) for o in squared_overlaps(weak, (m, n), s)] == [0, 0]
    assert float(observed_singular_values(weak, (m, n), s)) == pytest.approx(bulk_edge((m, n), s))


@given(m=SIDES, n=SIDES, y=st.floats(1e-3, 1e3), s=st.floats(0, 10))
def test_shrinking_shrinks_and_grows_with_the_value(m: int, n: int, y: float, s: float) -> None:
    low, high = shrink(in_float64(y, 1.1 * y), (m, n), s).tolist()
    assert 0 <= low <= y * (1 + 1e-12)
    assert low <= high


def test_without_noise_nothing_changes() -> None:
    values = in_float64(3.0, 1.0, 0.0)
    assert shrink(values, (5, 7), 0.0).tolist() == [3, 1, 0]


def test_scale_invariance() -> None:
    y = torch.linspace(10, 100, 50, dtype=torch.float64)
    torch.testing.assert_close(shrink(1e-4 * y, (40, 60), 1e-4), 1e-4 * shrink(y, (40, 60), 1.0))


@pytest.mark.grid(1, "a small shape with many draws, a large one with few")
@pytest.mark.parametrize("shape", [(300, 200), (768, 3072)])
def test_singular_values_and_vectors_of_a_spiked_matrix(shape: tuple[int, int]) -> None:
    """Within 3 % of eqs. 3-5, averaged over draws; signals of 1.5 to 5 times the threshold, whose
    fluctuation is small enough for it.
    """
    m, n = shape
    generator = torch.Generator().manual_seed(3)
    times = torch.tensor([5.0, 2.5, 1.5])
    signal = times * detection_threshold(shape, 1.0)
    draws = 20 if m < 500 else 3
    values, lefts, rights = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for _ in range(draws):
        u = torch.linalg.qr(torch.randn(m, 3, generator=generator)).Q
        v = torch.linalg.qr(torch.randn(n, 3, generator=generator)).Q
        noisy = (u * signal) @ v.T + torch.randn(m, n, generator=generator)
        found_u, found, found_v = torch.linalg.svd(noisy, full_matrices=False)
        values += found[:3] / draws
        lefts += (u * found_u[:, :3]).sum(0).square() / draws
        rights += (v * found_v[:3].T).sum(0).square() / draws
    left, right = squared_overlaps(signal, shape, 1.0)
    torch.testing.assert_close(
        values, observed_singular_values(signal, shape, 1.0), rtol=0.03, atol=0
    )
    torch.testing.assert_close(lefts, left, rtol=0.03, atol=0)
    torch.testing.assert_close(rights, right, rtol=0.03, atol=0)


@settings(max_examples=20)
@given(m=st.integers(1, 30), n=st.integers(1, 30))
def test_edge_and_threshold(m: int, n: int) -> None:
    assert bulk_edge((m, n), 2.0) == pytest.approx(2 * (math.sqrt(m) + math.sqrt(n)))
    assert detection_threshold((m, n), 2.0) == pytest.approx(2 * (m * n) ** 0.25)


@pytest.mark.parametrize("shape", [(3,), (0, 4), (2, 3, 4)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape="):
        shrink(torch.ones(2), shape, 1.0)


def test_a_negative_noise_level_is_refused() -> None:
    with pytest.raises(ValueError, match="noise_std=-1"):
        bulk_edge((3, 4), -1.0)
