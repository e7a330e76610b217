"""Shapes, normalisations and records for the tests of image models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.tensors import trainable_parameters
from quietgrad.training.files.provenance import provenance
from quietgrad.training.tasks.images.data import LabelledImages

CPU = torch.device("cpu")
MADE_UP = provenance("made up", None, data_are_public=True)
OWN = ("cnn:groupnorm", "vgg:groupnorm", "features:random")
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Pixels in -1 .. 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def off_zero(model: nn.Module) -> nn.Module:
    """Heads and adapters start at zero, where most gradients vanish."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in trainable_parameters(model).items():
            if name.startswith("head.") or "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


# ------------------------------------------------------------------------------------------------
# what they read


def images_of(pixels: np.ndarray) -> LabelledImages:
    """[n, channels, height, width] bytes."""
    return LabelledImages(
        torch.from_numpy(pixels), np.arange(len(pixels)) % 3, ("a", "b", "c"), "made"
    )
