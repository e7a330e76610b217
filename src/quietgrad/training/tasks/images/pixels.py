"""Pixels of image files. A private file that cannot be read is black, and nothing is said of it, by
Pillow neither.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

WIDE = ("I", "I;16", "I;16B", "I;16L")  # 16 bits a pixel; Pillow cuts them off at 255 by itself


def mode_of(path: Path) -> str:
    """Pillow's mode that a file's images are brought to: "L" of grey ones, "RGB" of others."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return "L" if image.mode in ("1", "L", *WIDE) else "RGB"
    except OSError as error:
        raise ValueError(f"data.source: {str(path)!r} cannot be read: {error}") from error


def pixels_of(
    paths: Sequence[Path], size: int | tuple[int, int], mode: str, public: bool = True
) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """[n, channels, height, width] bytes, and which could be read: a private file that cannot is
    black, and not named.
    """
    from PIL import Image

    channels = 1 if mode == "L" else 3
    height, width = (size, size) if isinstance(size, int) else size
    found = torch.zeros(len(paths), channels, height, width, dtype=torch.uint8)
    readable = np.ones(len(paths), dtype=np.bool_)

    def read(index: int) -> None:
        try:
            with Image.open(paths[index]) as image:
                grey = image.mode in WIDE
                narrow = (
                    Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
                    if grey
                    else image
                )
                small = narrow.convert(mode).resize((width, height), Image.Resampling.BILINEAR)
        except Exception as error:  # Pillow raises many kinds for damaged files
            if not public:
                readable[index] = False
                return
            raise ValueError(
                f"data.source: {str(paths[index])!r} cannot be read: {error}"
            ) from error
        array = torch.from_numpy(np.array(small))
        found[index] = array[None] if mode == "L" else array.permute(2, 0, 1)

    with contextlib.nullcontext() if public else _silent_pillow(), ThreadPoolExecutor() as pool:
        list(pool.map(read, range(len(paths))))
    return found, readable


@contextlib.contextmanager
def _silent_pillow() -> Iterator[None]:
    """Pillow warns of single images, with their numbers of pixels, and logs what else is odd of
    them.
    """
    logger = logging.getLogger("PIL")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
