"""Research measurements: asked for explicitly, marked, and right."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.denoising import SpectralDenoiser, detection_threshold
from quietgrad.facts import SensitivityClaim
from quietgrad.noise import NoisySum
from quietgrad.research import alignment, singular_values


def example() -> tuple[ClippedSum, NoisySum]:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.nn.functional.normalize(torch.randn(k, generator=generator), dim=0) for k in (60, 90))
    clean = {"w": 4 * detection_threshold((60, 90), 1.0) * torch.outer(u, v), "b": torch.ones(60)}
    noisy = {name: g + torch.randn(g.shape, generator=generator) for name, g in clean.items()}
    return ClippedSum(clean, SensitivityClaim(1.0)), NoisySum(noisy, 1.0)


def test_the_switch_must_be_given() -> None:
    clipped, noisy = example()
    with pytest.raises(ValueError, match="not_private=True"):
        alignment(clipped, noisy, SpectralDenoiser.paper())
    with pytest.raises(ValueError, match="not_private=True"):
        singular_values(clipped, noisy, "w")


def test_improvement_is_positive_where_a_spike_stands_out() -> None:
    clipped, noisy = example()
    found = alignment(clipped, noisy, SpectralDenoiser.paper(), not_private=True)
    assert found.improvement > 0.1 and "not private" in found.private
    (layer,) = found.layers
    assert layer.name == "w" and layer.after > layer.before and layer.ratio > 1.02
    a, b = clipped.gradients["w"].flatten(), noisy.gradients["w"].flatten()
    assert layer.before == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b, dim=0)), rel=1e-5)


def test_singular_values() -> None:
    clipped, noisy = example()
    clean, loud, edge = singular_values(clipped, noisy, "w", not_private=True)
    assert float(clean[1]) < 1e-4 * float(clean[0])
    assert float(loud[0]) > edge > 0.9 * float(loud[1])


def test_nothing_in_the_library_uses_it() -> None:
    source = Path(__file__).resolve().parents[1] / "src" / "quietgrad"
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "quietgrad.research", path
