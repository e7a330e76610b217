"""Helpers of the image tests: small data sets of files, and Hugging Face models of a few thousand
parameters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from quietgrad.training.tasks.images.folder import FolderLayout

SIZE = 8
# A table of findings, several of which one image may have.
CHEST = FolderLayout("Image Index", "Finding Labels", separator="|", no_label="No Finding")


def stripes(kinds: np.ndarray, seed: int) -> np.ndarray:
    """[n, 8, 8] bytes: kind 0 has horizontal stripes, 1 vertical ones, 2 both, 3 none, all with
    noise.
    """
    rng = np.random.default_rng(seed)
    row, column = np.indices((SIZE, SIZE))
    across, down = row % 4 < 2, column % 4 < 2
    patterns = np.stack([across, down, across ^ down, np.zeros_like(across)]) * 160 + 40
    return (patterns[kinds] + rng.integers(-30, 31, (len(kinds), SIZE, SIZE))).astype(np.uint8)


def write_picture(path: Path, pixels: np.ndarray) -> Path:
    """[height, width] or [height, width, 3] bytes to a file whose ending says how."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_class_folders(
    folder: Path, train: int = 120, test: int = 24, seed: int = 0, coloured: bool = False
) -> Path:
    """train/across, train/down, test/across, test/down with stripes."""
    for part, count, which in (("train", train, seed), ("test", test, seed + 1000)):
        kinds = np.arange(count) % 2
        for i, picture in enumerate(stripes(kinds, which)):
            pixels = (
                np.stack([picture, 255 - picture, picture // 2], axis=-1) if coloured else picture
            )
            write_picture(
                folder / part / ("across", "down")[kinds[i]] / f"{part}{i:03}.png", pixels
            )
    return folder


FINDINGS = ("Across", "Down", "Across|Down", "No Finding")


def write_findings(folder: Path, train: int = 160, test: int = 60, seed: int = 0) -> Path:
    """Stripes in the form of ChestX-ray14: bare names in a table, files in subfolders, no label or
    several.
    """
    for part, count, which in (("train", train, seed), ("test", test, seed + 1000)):
        kinds = np.random.default_rng(which).integers(0, 4, count)
        lines = ["Image Index,Finding Labels"]
        for i, picture in enumerate(stripes(kinds, which)):
            name = f"{part}_{i:03}.png"
            write_picture(folder / f"images_{i % 3:03}" / "images" / name, picture)
            lines.append(f"{name},{FINDINGS[kinds[i]]}")
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")
    return folder


def save_tiny_vit(folder: Path, **settings: object) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "image_size": 16,
            "patch_size": 4,
        }
        | settings
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def save_tiny_resnet(folder: Path) -> Path:
    """With BatchNorm, whose statistics are those of some other images."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"
    )
    model = transformers.ResNetModel(config).train()
    with torch.no_grad():
        for _ in range(3):
            model(pixel_values=torch.randn(8, 3, 16, 16) + 0.3)
    model.save_pretrained(folder)
    return folder
