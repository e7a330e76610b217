"""The frozen body of an image classifier, run once per record instead of once per step: where only
the head trains, each image is one vector.

Memory: records x width in float32. Privacy is untouched: preprocessing of each record by itself,
with weights that do not depend on private records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.tasks.images.classifier import ImageClassifier
from quietgrad.training.tasks.images.data import LabelledImages
from quietgrad.training.tasks.records import Told, unheard

BLOCK_IMAGES = 256


class HeadOnFeatures(nn.Module):
    """The classifier's own head, applied to cached embeddings."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        """[examples, width] to [examples, labels] logits."""
        return self.head(features)


@dataclass(frozen=True)
class FeatureCache:
    """Embeddings of all records, and the head that goes on from them.

    Attributes:
        upper: the head.
        features: [records, width], on the model's device.
        labels: [records], or [records, labels].
    """

    upper: HeadOnFeatures
    features: Tensor
    labels: Tensor

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """features [examples, width] and labels."""
        index = torch.from_numpy(indices).to(self.features.device)
        return {
            "features": self.features[index].to(device),
            "labels": self.labels[index].to(device),
        }


def build_feature_cache(
    classifier: nn.Module, images: LabelledImages, device: torch.device, told: Told = unheard
) -> FeatureCache | None:
    """Embeds all images; None where anything below the head trains. ``told`` hears how far it
    is.
    """
    if not isinstance(classifier, ImageClassifier):
        return None
    if any(p.requires_grad for part in classifier.body() for p in part.parameters()):
        return None
    labels = images.collate(np.arange(0), device)["labels"]  # of the right type and shape
    labels = torch.as_tensor(images.labels, dtype=labels.dtype, device=device)
    return FeatureCache(
        HeadOnFeatures(classifier.head), embeddings(classifier, images, device, told), labels
    )


def embeddings(
    classifier: ImageClassifier,
    images: LabelledImages,
    device: torch.device,
    told: Told = unheard,
) -> Tensor:
    """[images, width] in evaluation mode and without gradients, on ``device``."""
    was_training = classifier.training
    classifier.eval()
    found = torch.empty(len(images), classifier.width, device=device)
    try:
        with torch.no_grad():
            for start in range(0, len(images), BLOCK_IMAGES):
                index = np.arange(start, min(start + BLOCK_IMAGES, len(images)))
                found[start : start + len(index)] = classifier.embed(
                    images.collate(index, device)["pixels"]
                )
                told(start + len(index), len(images))
    finally:
        classifier.train(was_training)
    return found
