"""Public weights without labels: SimCLR (Chen et al. 2020), then a head for labels made from the
images themselves, so that there is a loss whose Hessian can be taken.

NoiseCurve (section 4.2) assigns labels at random. Random labels ask nothing of the features, and
the Hessian's top comes out too small; labels that name clusters of the features have the structure
of classes without any being known. Both are here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_positive, require_word

Labels = Literal["clusters", "random"]
LABELS: tuple[Labels, ...] = get_args(Labels)
Embedding = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], None]


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """A random view of every image: resized crop (area 40 to 100 %, aspect 3/4 to 4/3), mirror,
    brightness and contrast, in one resampling.

    Args:
        pixels: [n, channels, height, width].
        generator: on the same device.
    """
    n = len(pixels)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, device=pixels.device).uniform_(low, high, generator=generator)

    area, aspect = uniform(0.4, 1.0), torch.exp(uniform(-0.288, 0.288))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    theta = torch.zeros(n, 2, 3, device=pixels.device)
    theta[:, 0, 0], theta[:, 1, 1] = width * mirror, height
    theta[:, 0, 2], theta[:, 1, 2] = uniform(-1, 1) * (1 - width), uniform(-1, 1) * (1 - height)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    view = F.grid_sample(pixels, grid, align_corners=False, padding_mode="reflection")
    mean = view.mean(dim=(1, 2, 3), keepdim=True)
    contrast, brightness = (
        uniform(0.6, 1.4)[:, None, None, None],
        uniform(-0.4, 0.4)[:, None, None, None],
    )
    return (view - mean) * contrast + mean + brightness


def simclr(
    embed: Embedding,
    encoder: nn.Module,
    pixels: Tensor,
    epochs: int,
    width: int,
    batch_size: int = 256,
    learning_rate: float = 2e-3,
    temperature: float = 0.2,
    seed: int = 0,
    progress: Progress = lambda done, of: None,
) -> None:
    """Trains ``encoder`` in place so that two views of one image lie closer than views of different
    ones.

    Args:
        embed: pixels to [n, width], a method of the encoder.
        encoder: whose parameters train (Adam); a projection head of two layers is added and thrown
            away.
        pixels: [n, channels, height, width] public images.
        epochs, batch_size, learning_rate, temperature: as in the paper, smaller.
        width: of the embedding.
        seed: of views, order and projection.
        progress: (epochs done, epochs) after each.

    Raises:
        ValueError: for fewer than two images or numbers out of range.
    """
    require_at_least("epochs", epochs, 0, "0 keeps the weights as they are")
    require_positive("learning_rate", learning_rate)
    if len(pixels) < 2:
        raise ValueError(f"there are {len(pixels)} public images; contrast needs at least two")
    generator = torch.Generator(device=pixels.device).manual_seed(seed)
    projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(
        pixels.device
    )
    parameters = [*(p for p in encoder.parameters() if p.requires_grad), *projection.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    for epoch in range(epochs):
        order = torch.randperm(len(pixels), generator=generator, device=pixels.device)
        for chosen in order.split(batch_size):
            if len(chosen) < 2:
                continue
            views = torch.cat([augmented(pixels[chosen], generator) for _ in range(2)])
            z = F.normalize(projection(embed(views)), dim=1)
            similarity = z @ z.T / temperature
            similarity.fill_diagonal_(-torch.inf)
            other = torch.arange(len(z), device=pixels.device).roll(len(chosen))
            optimizer.zero_grad()
            F.cross_entropy(similarity, other).backward()
            optimizer.step()
        progress(epoch + 1, epochs)
    encoder.zero_grad(set_to_none=True)


def made_up_labels(
    embed: Embedding, pixels: Tensor, count: int, kind: str = "clusters", seed: int = 0
) -> NDArray[np.int64]:
    """[n] labels 0 .. count - 1 that nobody gave: "clusters" of the embedding (k-means), or
    "random".
    """
    require_word("kind", kind, LABELS)
    generator = np.random.default_rng(seed)
    if kind == "random":
        return generator.integers(0, count, len(pixels))
    with torch.no_grad():
        features = torch.cat([embed(part) for part in pixels.split(512)]).double().cpu().numpy()
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty cluster: a label that no image has
        _, labels = kmeans2(features, count, minit="++", seed=generator)
    return labels.astype(np.int64)


def fit_to_labels(
    model: nn.Module,
    parameters: list[nn.Parameter],
    pixels: Tensor,
    labels: NDArray[Any],
    epochs: int,
    batch_size: int = 256,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> None:
    """Trains the given parameters of a classifier on made-up labels, in place: Adam; cross entropy
    for [n] labels, the mean of binary ones for [n, labels].
    """
    loss = F.binary_cross_entropy_with_logits if labels.ndim == 2 else F.cross_entropy
    generator = torch.Generator().manual_seed(seed)
    targets = torch.from_numpy(labels).to(pixels.device)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(pixels), generator=generator).split(batch_size):
            optimizer.zero_grad()
            loss(model(pixels[chosen]), targets[chosen]).backward()
            optimizer.step()
    model.zero_grad(set_to_none=True)
