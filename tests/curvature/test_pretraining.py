"""Pretraining without labels: views, contrast, made-up labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quietgrad.curvature.pretraining import augmented, fit_to_labels, made_up_labels, simclr
from quietgrad.training.tasks.images.models import SmallCnn


def shapes(n: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of three kinds that survive cropping and mirroring: horizontal stripes, vertical
    stripes, and checks, with noise.
    """
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(n) % 3
    i, j = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    patterns = torch.stack([(i % 4 < 2), (j % 4 < 2), ((i + j) % 4 < 2)]).float() * 2 - 1
    return patterns[kinds][:, None] + 0.2 * torch.randn(n, 1, 12, 12, generator=generator), kinds


def test_views_differ_keep_the_form_and_follow_the_generator() -> None:
    pixels, _ = shapes()
    one = augmented(pixels, torch.Generator().manual_seed(3))
    assert one.shape == pixels.shape and torch.isfinite(one).all()
    assert torch.equal(one, augmented(pixels, torch.Generator().manual_seed(3)))
    assert (one - augmented(pixels, torch.Generator().manual_seed(4))).abs().mean() > 0.1


def test_contrast_brings_views_of_one_image_together_and_finds_its_kinds() -> None:
    torch.manual_seed(0)
    pixels, kinds = shapes()
    model = SmallCnn(1, 3, hidden=8)

    def agreement() -> float:
        """How much closer two views of an image are than views of different images, in cosine."""
        with torch.no_grad():
            views = [
                F.normalize(model.embed(augmented(pixels, torch.Generator().manual_seed(s))), dim=1)
                for s in (5, 6)
            ]
            similarity = views[0] @ views[1].T
            return float(similarity.diagonal().mean() - similarity.mean())

    before, seen = agreement(), []
    encoder = nn.ModuleList([model.features, model.hidden])
    simclr(
        model.embed,
        encoder,
        pixels,
        30,
        8,
        batch_size=48,
        seed=1,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert agreement() > before + 0.1
    assert seen[-1] == (30, 30)
    assert all(p.grad is None for p in model.parameters())
    clusters = made_up_labels(model.embed, pixels, 3)
    # Every cluster is nearly of one kind, whatever its number.
    pure = sum(
        np.bincount(kinds.numpy()[clusters == c]).max() for c in range(3) if (clusters == c).any()
    )
    assert pure > 0.8 * len(pixels)


def test_made_up_labels_are_seeded_and_random_ones_know_nothing() -> None:
    pixels, _ = shapes()
    model = SmallCnn(1, 3, hidden=8)
    assert np.array_equal(
        made_up_labels(model.embed, pixels, 3), made_up_labels(model.embed, pixels, 3)
    )
    random = made_up_labels(model.embed, pixels, 3, "random")
    assert set(random) == {0, 1, 2}
    assert np.array_equal(random, made_up_labels(model.embed, -pixels, 3, "random"))
    with pytest.raises(ValueError, match="kind='true'"):
        made_up_labels(model.embed, pixels, 3, "true")


def test_fitting_moves_the_given_parameters_alone() -> None:
    pixels, kinds = shapes()
    torch.manual_seed(0)
    model = SmallCnn(1, 3, hidden=8)
    before = {name: p.clone() for name, p in model.named_parameters()}
    loss = F.cross_entropy(model(pixels), kinds).item()
    fit_to_labels(
        model, list(model.head.parameters()), pixels, kinds.numpy(), 60, learning_rate=2e-2
    )
    assert F.cross_entropy(model(pixels), kinds).item() < 0.9 * loss
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.weight", "head.bias"}


def test_contrast_needs_two_images() -> None:
    model = SmallCnn(1, 3, hidden=8)
    with pytest.raises(ValueError, match="at least two"):
        simclr(model.embed, model, torch.zeros(1, 1, 8, 8), 1, 8)
