"""What all image classifiers share: a body that embeds, a linear head, and how a pretrained body is
shown an image.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """What the image models share: a linear head on an embedding.

    Attributes:
        width: of the embedding.
        head: [labels, width].
    """

    def __init__(self, width: int, num_labels: int) -> None:
        super().__init__()
        self.width = width
        self.head = nn.Linear(width, num_labels)

    def body(self) -> list[nn.Module]:
        """The modules below the head."""
        raise NotImplementedError

    def embed(self, pixels: Tensor) -> Tensor:
        """[examples, channels, height, width] pixels in -1 .. 1 to [examples, self.width]."""
        raise NotImplementedError

    def forward(self, pixels: Tensor) -> Tensor:
        """[examples, channels, height, width] to [examples, labels] logits."""
        return self.head(self.embed(pixels).to(self.head.weight.dtype))

    def train(self, mode: bool = True) -> ImageClassifier:
        """A body without trainable parameters stays in evaluation mode: no statistics of private
        images, no dropout.
        """
        super().train(mode)
        for part in self.body():
            if not any(p.requires_grad for p in part.parameters()):
                part.eval()
        return self


def as_pretrained(pixels: Tensor, size: int, mean: Tensor, std: Tensor) -> Tensor:
    """Images as a pretrained body reads them.

    Args:
        pixels: [examples, channels, height, width] in -1 .. 1.
        size: pixels a side (0: as they are).
        mean, std: [1, channels of the body, 1, 1], of pixels in 0 .. 1; grey images are repeated,
            coloured ones averaged where the body reads grey ones.

    Returns:
        [examples, channels of the body, size, size].
    """
    if pixels.shape[1] > mean.shape[1]:
        pixels = pixels.mean(dim=1, keepdim=True)
    pixels = pixels.expand(-1, mean.shape[1], -1, -1)
    if size and pixels.shape[-2:] != (size, size):
        pixels = F.interpolate(
            pixels, (size, size), mode="bilinear", align_corners=False, antialias=True
        )
    return ((pixels + 1) / 2 - mean) / std
