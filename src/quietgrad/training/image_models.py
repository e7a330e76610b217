"""Image classifiers to train from public initial weights: NoiseCurve's small CNN with GroupNorm (papers/002, table 4a)."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

SMALL_CNN = "cnn:groupnorm"
IMAGE_MODELS = (SMALL_CNN,)
GROUPS = 8


class SmallCnn(nn.Module):
    """Three convolutions with GroupNorm and ReLU (16, 32, 64 channels, strides 1, 2, 2), average pooling to 2 x 2, a hidden layer, a linear head."""

    def __init__(self, channels: int, num_labels: int, hidden: int = 24) -> None:
        super().__init__()
        widths, strides = (channels, 16, 32, 64), (1, 2, 2)
        layers: list[nn.Module] = []
        for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(GROUPS, after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.hidden = nn.Linear(4 * widths[-1], hidden)
        self.head = nn.Linear(hidden, num_labels)

    def embed(self, pixels: Tensor) -> Tensor:
        """[examples, hidden]."""
        return F.relu(self.hidden(self.features(pixels)))

    def forward(self, pixels: Tensor) -> Tensor:
        """[examples, channels, height, width] to [examples, labels] logits."""
        return self.head(self.embed(pixels))


def load_image_classifier(name: str, channels: int, num_labels: int, tune: str, weights: str = "") -> nn.Module:
    """Builds a classifier, and fills it with public weights where a file is given.

    Args:
        name: one of ``IMAGE_MODELS``.
        channels, num_labels: of the data.
        tune: "full", or "head" (the linear head alone: a convex problem).
        weights: safetensors file, such as ``quietgrad spectrum`` writes ("": random).

    Raises:
        ValueError: unknown name or tune, or weights of another model.
    """
    if name not in IMAGE_MODELS:
        raise ValueError(f"model.name={name!r} is no image model; use one of {', '.join(IMAGE_MODELS)}")
    if tune not in ("full", "head"):
        raise ValueError(f"model.tune={tune!r} does not fit {name!r}; use 'full' or 'head'")
    model = SmallCnn(channels, num_labels)
    if weights:
        from safetensors.torch import load_file

        if not Path(weights).is_file():
            raise ValueError(f"model.weights={weights!r}: no such file; make one with quietgrad spectrum")
        try:
            model.load_state_dict(load_file(weights))
        except RuntimeError as error:
            raise ValueError(f"model.weights={weights!r} are of another model: {error}") from error
    if tune == "head":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    return model
