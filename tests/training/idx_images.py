"""Made-up images in the form of Fashion-MNIST."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

SIZE, TRAIN, TEST = 8, 260, 40


def stripes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy horizontal and vertical stripes: [count, 8, 8] bytes and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    row, column = np.indices((SIZE, SIZE))
    patterns = np.stack([row % 4 < 2, column % 4 < 2]) * 160 + 40
    return (patterns[labels] + rng.integers(-30, 31, (count, SIZE, SIZE))).astype(
        np.uint8
    ), labels.astype(np.uint8)


def write_idx(folder: Path, compressed: bool, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, which in (("train", TRAIN, seed), ("t10k", TEST, seed + 1)):
        images, labels = stripes(count, which)
        for name, array in (
            (f"{part}-images-idx3-ubyte", images),
            (f"{part}-labels-idx1-ubyte", labels),
        ):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(
                n.to_bytes(4, "big") for n in array.shape
            )
            content = head + array.tobytes()
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return folder
