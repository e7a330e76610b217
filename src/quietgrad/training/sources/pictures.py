"""What the owner of a folder of images sees of it: images and classes of each part, and files that
cannot be opened. Private, as all of ``quietgrad check``.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from quietgrad.training.sources.rows import BadRow, UnreadableFile, read_rows

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
PARTS = ("train", "test", "val")
SEVERAL = "|"  # between the labels of an image, as in ChestX-ray14
TINY_IMAGENET = "val_annotations.txt"  # lists its validation labels; its test images have none


@dataclass(frozen=True)
class FolderInspection:
    """Of a folder with train and test images.

    Attributes:
        path: of the folder.
        labels: part -> label -> images; of a table, the words in its column.
        damaged: files that cannot be opened, or are not there, relative to the folder.
        broken: part -> rows of its table that cannot be read.
        notes: what is missing, which training refuses.
        unlearnt: labels of training images that no test image has: such images contribute nothing,
            since which labels there are has to follow from public images.
    """

    path: str
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    broken: dict[str, list[BadRow]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unlearnt: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether something of it cannot be used."""
        return bool(self.damaged or any(self.broken.values()) or self.notes)


def is_picture_folder(folder: Path) -> bool:
    """Whether there are tables or class folders of a training part."""
    return (folder / "train.csv").is_file() or (folder / "train").is_dir()


def between_labels(folder: Path, label: str) -> str:
    """What stands between the labels of an image in the table of public images; "" where each has
    one, or there is no such table.
    """
    for part in PARTS[1:]:
        if (folder / f"{part}.csv").is_file():
            try:
                words = read_rows(folder / f"{part}.csv").columns.get(label, ())
            except UnreadableFile:  # which training will say
                return ""
            return SEVERAL if any(SEVERAL in str(word) for word in words) else ""
    return ""


def inspect_folder(
    folder: Path, file: str = "file", label: str = "label", one_label: bool = True
) -> FolderInspection:
    """Opens every image.

    Args:
        folder: with train/CLASS/* and test/CLASS/* (or val), or train.csv and test.csv.
        file, label: columns of the tables.
        one_label: whether a label is one word of the test part's, as where a configuration neither
            lists labels nor says what stands between several.

    Raises:
        ValueError: if Pillow is missing.
    """
    found = FolderInspection(str(folder))
    for part in PARTS:
        table = folder / f"{part}.csv"
        if table.is_file():
            files = _from_table(found, part, table, file, label)
        elif (folder / part).is_dir():
            files = [p for p in sorted((folder / part).rglob("*")) if _is_picture(p)]
            classes = Counter(p.relative_to(folder / part).parts[0] for p in files)
            found.labels[part] = dict(sorted(classes.items()))
        else:
            continue
        found.damaged.extend(_below(folder, p) for p in files if not _opens(p))
    if not {"test", "val"} & found.labels.keys():
        found.notes.append("there is no test part: add test.csv, or a folder test or val")
    for part, counts in found.labels.items():
        if not sum(counts.values()):
            found.notes.append(f"{part} holds no images ({', '.join(PICTURES)})")
    if one_label and not list(folder.glob(f"*/{TINY_IMAGENET}")):
        _compare_labels(found)
    return found


def _compare_labels(found: FolderInspection) -> None:
    """Notes what follows from the test part's labels, which are those that are learnt."""
    test = next((found.labels[part] for part in PARTS[1:] if part in found.labels), {})
    if any(SEVERAL in word for part in found.labels.values() for word in part):
        return
    if len(test) == 1:
        only = next(iter(test))
        found.notes.append(
            f"every test image has the label {only!r}: the labels to learn are those of the test "
            "part, and one alone cannot be learnt"
        )
    elif test:
        found.unlearnt.extend(word for word in found.labels.get("train", {}) if word not in test)


def _from_table(
    found: FolderInspection, part: str, table: Path, file: str, label: str
) -> list[Path]:
    try:
        rows = read_rows(table)
    except UnreadableFile as error:
        found.notes.append(
            f"{table.name}: it {error}" + (f" ({error.place})" if error.place else "")
        )
        return []
    found.broken[part] = rows.bad
    missing = [name for name in (file, label) if name not in rows.columns]
    if missing:
        found.notes.append(f"{table.name} has no column {missing[0]!r}")
        return []
    found.labels[part] = dict(sorted(Counter(rows.columns[label]).items()))
    below = {p.name: p for p in table.parent.rglob("*") if _is_picture(p)}
    places = [table.parent / name for name in rows.columns[file]]
    return [p if os.path.isfile(p) else below.get(p.name, p) for p in places]


def _below(folder: Path, path: Path) -> str:
    """A path in the folder; a table may name files of other places."""
    inside = path.is_relative_to(folder)
    return (path.relative_to(folder) if inside else path).as_posix()


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and path.is_file()


def _opens(path: Path) -> bool:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images need Pillow: pip install 'quietgrad[images]'") from None
    try:
        with Image.open(path) as image:
            image.load()
    except Exception:  # Pillow raises many kinds
        return False
    return True
