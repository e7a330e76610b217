"""Labelled images: files in the format of MNIST, the Debian package of Fashion-MNIST, and
torchvision's data sets; split by a hash of the pixels.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.checks import how_many
from quietgrad.training.sources.hub import TORCHVISION
from quietgrad.training.tasks.packages import packaged_file
from quietgrad.training.tasks.records import InOrder
from quietgrad.training.tasks.splits import IGNORED, Splits

PACKAGED_FASHION = "packaged:fashion-mnist"
PACKAGED_DIGITS = "packaged:digits"
DIGITS_PACKAGE = "scikit-learn"
FASHION_PACKAGE = "dataset-fashion-mnist"
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class LabelledImages(InOrder):
    """Images with integer labels.

    Attributes:
        pixels: [n, channels, height, width] uint8.
        labels: [n], indices into ``label_names``; or [n, labels] of zeros and ones, where a record
            has several. Negative where a record is ignored.
        label_names: names, or the numbers as words.
        source: where they came from.
    """

    pixels: Tensor
    labels: NDArray[Any]
    label_names: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: NDArray[np.int64]) -> LabelledImages:
        return LabelledImages(
            self.pixels[torch.from_numpy(indices)],
            self.labels[indices],
            self.label_names,
            self.source,
        )

    def resized(self, size: int) -> LabelledImages:
        """Averaged down (or interpolated up) to size x size pixels; 0 leaves them."""
        if not size or self.pixels.shape[-2:] == (size, size):
            return self
        smooth = F.interpolate(
            self.pixels.float(), (size, size), mode="bilinear", antialias=True, align_corners=False
        )
        return LabelledImages(
            smooth.round().clamp(0, 255).byte(), self.labels, self.label_names, self.source
        )

    def with_channels(self, channels: int) -> LabelledImages:
        """Grey images repeated to three channels, or coloured ones averaged to one."""
        if self.pixels.shape[1] == channels:
            return self
        grey = self.pixels.float().mean(dim=1, keepdim=True).round().byte()
        return LabelledImages(
            grey.repeat(1, channels, 1, 1), self.labels, self.label_names, self.source
        )

    @cached_property
    def record_ids(self) -> tuple[bytes, ...]:
        """[n] what identifies each record: its pixels. An image under two labels counts as one
        record's content.
        """
        return tuple(hashlib.sha256(image.numpy().tobytes()).digest() for image in self.pixels)

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """pixels [examples, channels, height, width] in -1 .. 1, labels [examples]."""
        pixels = self.pixels[torch.from_numpy(indices)].to(device).float() / 127.5 - 1
        return {"pixels": pixels, "labels": torch.from_numpy(self.labels[indices]).to(device)}


def is_image_source(source: str) -> bool:
    """Whether ``load_images`` reads it."""
    return (
        source in (PACKAGED_FASHION, PACKAGED_DIGITS)
        or source.startswith(TORCHVISION)
        or _idx_file(Path(source), "train", 0) is not None
    )


def load_images(source: str, size: int = 0) -> tuple[LabelledImages, LabelledImages]:
    """Training and test records of a data set.

    Args:
        source: ``packaged:fashion-mnist`` (the Debian package dataset-fashion-mnist),
            ``packaged:digits`` (1797 handwritten digits of 8 x 8 pixels in scikit-learn's wheel), a
            folder with the four files of MNIST's format (.gz or not), or
            ``torchvision:NAME:FOLDER`` (such as ``torchvision:CIFAR10:data``; needs torchvision).
        size: pixels a side (0: as they are).

    Raises:
        ValueError: if the source is not there or not of that kind.
    """
    if source == PACKAGED_DIGITS:
        train, test = _digits()
    elif source.startswith(TORCHVISION):
        train, test = (_torchvision(source, train) for train in (True, False))
    else:
        folder = _fashion_folder() if source == PACKAGED_FASHION else Path(source)
        train, test = (_idx(folder, part, source) for part in ("train", "test"))
        train = _with_labels_of(test, train)
    return train.resized(size), test.resized(size)


def split_images(
    train: LabelledImages,
    test: LabelledImages,
    validation_fraction: float,
    public_fraction: float = 0.0,
) -> tuple[Splits[LabelledImages], LabelledImages]:
    """Private training records, validation and test records (declared public), and public records
    without use of their labels; by a hash of the pixels.

    Raises:
        ValueError: for fractions that leave no part for training or validation.
    """
    for name, fraction, least in (
        ("data.validation_fraction", validation_fraction, 1e-9),
        ("data.public_fraction", public_fraction, 0.0),
    ):
        if not least <= fraction < 1:
            raise ValueError(f"{name}={fraction!r} must be in {'(' if least else '['}0, 1)")
    if validation_fraction + public_fraction >= 1:
        raise ValueError(
            "data.validation_fraction and data.public_fraction leave no training records; choose "
            "smaller ones"
        )
    # Records equal to a test record would be trained on and tested on. Files that cannot be read
    # are all one black image: whatever its hash is, they are private records.
    unread = _unread(train)
    held = set(test.record_ids)
    position = np.array([int.from_bytes(i[:8], "big") / 2**64 for i in train.record_ids])
    seen = ~unread & np.array([i in held for i in train.record_ids], dtype=bool)
    validation = ~seen & ~unread & (position < validation_fraction)
    public = ~seen & ~unread & ~validation & (position < validation_fraction + public_fraction)
    kept = ~seen & ~validation & ~public
    if not validation.any() or not kept.any():
        raise ValueError(
            f"data.source={train.source!r} has {how_many(len(train), 'record')}, too few for a "
            "training and a validation part; those that equal a test record are left out of both"
        )
    if (np.asarray(train.labels)[validation].reshape(int(validation.sum()), -1) < 0).any():
        raise ValueError(
            f"data.source={train.source!r}: a validation image cannot be read, or has a label that "
            "no test image has; remove it, or list all labels in data.labels"
        )
    parts = [train.subset(np.flatnonzero(chosen)) for chosen in (kept, validation, public)]
    return Splits(parts[0], parts[1], test), parts[2]


def _unread(images: LabelledImages) -> NDArray[np.bool_]:
    """[n] whether an image is black and ignored, as one is whose file cannot be read."""
    ignored = np.asarray(images.labels) < 0
    dark = (images.pixels.flatten(1).amax(dim=1) == 0).numpy()
    return dark & (ignored if ignored.ndim == 1 else ignored.any(axis=1))


def _fashion_folder() -> Path:
    if shutil.which("dpkg") is not None:
        listed = subprocess.run(["dpkg", "-L", FASHION_PACKAGE], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            if Path(line).name.startswith(IDX_FILES["train"][0]):
                return Path(line).parent
    raise ValueError(
        f"data.source={PACKAGED_FASHION!r} needs the Debian package {FASHION_PACKAGE} (apt-get "
        f"install {FASHION_PACKAGE}); elsewhere give the folder of the four files, "
        "or torchvision:FashionMNIST:FOLDER"
    )


def _digits() -> tuple[LabelledImages, LabelledImages]:
    """The table in scikit-learn's wheel, read as data: 64 grey values 0 to 16 and a label a line.
    Every fifth record is for testing.
    """
    path = packaged_file(
        DIGITS_PACKAGE,
        "digits.csv.gz",
        f"data.source={PACKAGED_DIGITS!r}",
        f"pip install {DIGITS_PACKAGE}",
        "digits",
    )
    table = np.loadtxt(path, delimiter=",")
    pixels = torch.from_numpy((table[:, :64] * (255 / 16)).round().astype(np.uint8)).reshape(
        -1, 1, 8, 8
    )
    everything = LabelledImages(
        pixels, table[:, 64].astype(np.int64), tuple(map(str, range(10))), PACKAGED_DIGITS
    )
    index = np.arange(len(everything))
    return everything.subset(index[index % 5 != 0]), everything.subset(index[index % 5 == 0])


def _idx_file(folder: Path, part: str, which: int) -> Path | None:
    for ending in (".gz", ""):
        file = folder / (IDX_FILES[part][which] + ending)
        if file.is_file():
            return file
    return None


def _idx(folder: Path, part: str, source: str) -> LabelledImages:
    found = [_idx_file(folder, part, which) for which in (0, 1)]
    if None in found:
        raise ValueError(
            f"data.source={source!r} lacks the files of MNIST's format, such as "
            f"{IDX_FILES[part][0]}(.gz)"
        )
    images, labels = (_read_idx(file) for file in found if file is not None)
    names = tuple(str(i) for i in range(int(labels.max()) + 1))
    return LabelledImages(
        torch.from_numpy(images[:, None].copy()), labels.astype(np.int64), names, source
    )


def _with_labels_of(test: LabelledImages, train: LabelledImages) -> LabelledImages:
    """Training records under the test records' list of labels, which is
    public; others are ignored.
    """
    labels = np.where(train.labels < len(test.label_names), train.labels, IGNORED)
    return LabelledImages(train.pixels, labels, test.label_names, train.source)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes: two zero bytes, the type (8), the number of dimensions, their sizes, the
    entries.
    """
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"data.source: {path.name} is not a file of bytes in MNIST's format")
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def _torchvision(source: str, train: bool) -> LabelledImages:
    _, name, folder = [*source.split(":", 2), ""][:3]
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"data.source={source!r} needs torchvision, in the build that goes with torch: {error}"
        ) from error
    if not folder or not hasattr(datasets, name):
        raise ValueError(
            f"data.source={source!r} must be torchvision:NAME:FOLDER with a data set of torchvision"
        )
    try:
        held: Any = getattr(datasets, name)(folder, train=train, download=False)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"data.source={source!r} cannot be read: {error}") from error
    pixels = torch.as_tensor(np.asarray(held.data))
    pixels = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return LabelledImages(
        pixels, np.asarray(held.targets, dtype=np.int64), tuple(map(str, held.classes)), source
    )
