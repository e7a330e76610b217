"""A batch of nothing but empty texts: it adds zero, and is no error that tells of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from attacks.test_clipping import EXACT, SKETCHES, UNGUARDED, given_gradients
from quietgrad.clipping import Clipper

LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, int]] = {
    "linear": (lambda: nn.Linear(8, 6), torch.zeros(4, 0, 8), 6),
    "wide": (lambda: nn.Linear(40, 60), torch.zeros(4, 0, 40), 60),
    "embedding": (lambda: nn.Embedding(8, 6), torch.zeros(4, 0, dtype=torch.int64), 6),
    "normalisation": (lambda: nn.LayerNorm(8), torch.zeros(4, 0, 8), 8),
}


@pytest.mark.grid(7, "layers times estimators")
@pytest.mark.parametrize("estimator", [*EXACT, *SKETCHES])
@pytest.mark.parametrize("layer", LAYERS)
def test_texts_without_a_word_add_zero(layer: str, estimator: str) -> None:
    """Before: an AssertionError, in the release that met them."""
    make, x, features = LAYERS[layer]
    bound = Clipper(1.0, estimator, engine="bookkeeping").bind(make(), given_gradients)
    for step in (0, UNGUARDED):
        sums = bound.clip((x, torch.zeros(4, 0, features)), step=step).gradients
        assert all(not bool(s.any()) for s in sums.values())
