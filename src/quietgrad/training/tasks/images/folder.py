"""Labelled images in files: class folders, or a table of file names and labels, one label an image
or several (ChestX-ray14's form).

All images are read once and kept in memory as bytes, at one size: records x channels x size^2
bytes.

Training records are private: one whose file is missing or damaged, or whose label is not in the
list (that of the settings or of the test part), stays a record, is named nowhere, and contributes
nothing.
"""

from __future__ import annotations

import csv
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import nearest
from quietgrad.training.sources.pictures import TINY_IMAGENET
from quietgrad.training.sources.quoting import any_length, is_told_apart
from quietgrad.training.tasks.columns import no_column
from quietgrad.training.tasks.images.data import LabelledImages
from quietgrad.training.tasks.images.pixels import mode_of, pixels_of
from quietgrad.training.tasks.splits import IGNORED

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
TEST_PARTS = ("test", "val")
NOWHERE = "\0"  # no file has this name: Path.is_file is False of it, and it cannot be opened


@dataclass(frozen=True)
class FolderLayout:
    """How files and labels are named.

    Attributes:
        file, label: columns of train.csv and test.csv.
        separator: between the labels of one image ("": one label each).
        labels: the labels to expect (empty: those found in the test part, which is public).
        no_label: what stands where an image has none, with a separator.
    """

    file: str = "file"
    label: str = "label"
    separator: str = ""
    labels: tuple[str, ...] = ()
    no_label: str = ""


def is_image_folder(source: str) -> bool:
    """Whether there is a folder of that name with a train.csv or class folders in train."""
    folder = Path(source)
    return (folder / "train.csv").is_file() or (folder / "train").is_dir()


def load_image_folder(
    source: str, layout: FolderLayout, size: int
) -> tuple[LabelledImages, LabelledImages]:
    """Training and test records.

    Args:
        source: a folder with train.csv and test.csv (files are named relative to it, or found below
            it by name), or with train/CLASS/... and test/CLASS/... or val/CLASS/....
        layout: names of columns and labels.
        size: pixels a side that all are brought to.

    Raises:
        ValueError: for missing parts, and for test files or labels that are missing, naming the
            first; where no training image can be used.
    """
    folder = Path(source)
    if not size:
        raise ValueError(f"data.source={source!r}: files may differ in size; set data.image_size")
    train = _listed(folder, "train", layout, public=False)
    # TinyImageNet's test folder has no labels: its val comes first.
    parts = sorted(TEST_PARTS, key=lambda p: not (folder / p / TINY_IMAGENET).is_file())
    test_part = next(
        (p for p in parts if (folder / f"{p}.csv").is_file() or (folder / p).is_dir()), None
    )
    if test_part is None:
        raise ValueError(
            f"data.source={source!r} has no test part: add test.csv, or a folder test or val "
            "beside train"
        )
    test = _listed(folder, test_part, layout)
    names = layout.labels or tuple(sorted({name for _, found in test for name in found}))
    if len(names) < 2 and not layout.separator:
        raise ValueError(
            f"data.source={source!r}: the test part has the single label {names[0]!r} (data.labels)"
            if names
            else f"data.source={source!r} has no images"
        )
    if not names:
        raise ValueError(
            f"data.source={source!r}: no test image has a label; check data.label and data.no_label"
        )
    # Test records are declared public: one private file more or less must not change how the others
    # are read.
    mode = mode_of(test[0][0])
    labels, test_labels = (
        _private_labels(train, names, layout),
        _labels(test, names, layout, source),
    )
    pixels, readable = pixels_of([file for file, _ in train], size, mode, public=False)
    labels[~readable] = _ignored(labels)
    if (labels.reshape(len(labels), -1) < 0).any(axis=1).all():
        raise ValueError(
            f"data.source={source!r}: no training image can be read and has a label that test "
            "images have; check data.text, data.label and data.labels"
        )
    return (
        LabelledImages(pixels, labels, names, source),
        LabelledImages(
            pixels_of([file for file, _ in test], size, mode)[0], test_labels, names, source
        ),
    )


def load_unlabelled_folder(
    source: str, layout: FolderLayout, size: int, channels: int
) -> LabelledImages:
    """The training part of a folder whose labels nobody asks for, read as images of so many
    channels; else as ``load_image_folder``.

    A file that is a private record too comes out with the same pixels, so the check for overlaps
    finds it.
    """
    if not size:
        raise ValueError(
            f"spectrum.public={source!r}: files may differ in size; set data.image_size"
        )
    files = [file for file, _ in _listed(Path(source), "train", layout)]
    return LabelledImages(
        pixels_of(files, size, "L" if channels == 1 else "RGB")[0],
        np.zeros(len(files), dtype=np.int64),
        ("none",),
        source,
    )


def load_pictures(
    files: Sequence[Path], form: Sequence[int]
) -> tuple[LabelledImages, NDArray[np.bool_]]:
    """New images as [channels, height, width] = ``form``, and which could be read; the others are
    black.
    """
    channels, height, width = form
    pixels, readable = pixels_of(files, (height, width), "L" if channels == 1 else "RGB", False)
    return LabelledImages(pixels, np.zeros(len(files), dtype=np.int64), (), ""), readable


Listed = list[tuple[Path, tuple[str, ...]]]


def _listed(folder: Path, part: str, layout: FolderLayout, public: bool = True) -> Listed:
    table = folder / f"{part}.csv"
    found = (
        _from_table(folder, table, layout, public)
        if table.is_file()
        else _from_folders(folder / part)
    )
    if not found:
        raise ValueError(
            f"data.source={str(folder)!r}: {part} holds no images ({', '.join(ENDINGS)})"
        )
    return found


def _from_table(folder: Path, table: Path, layout: FolderLayout, public: bool) -> Listed:
    try:
        with table.open(newline="", encoding="utf-8") as file, any_length():
            lines = list(file)
            rows = list(csv.DictReader(lines))
            apart = _are_told_apart(lines)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{str(table)!r} cannot be read as a table in UTF-8 ({type(error).__name__})"
        ) from None
    if not apart:
        # One private row would take others for its own.
        raise ValueError(
            f"{str(table)!r} has a quotation mark that is not closed, so its rows cannot be told "
            f"apart; `quietgrad check {shlex.quote(str(folder))}` says where"
        )
    for key, column in (("data.text", layout.file), ("data.label", layout.label)):
        if rows and column not in rows[0]:
            # None: what a longer row has more
            held = {name: [row[name] for row in rows] for name in filter(None, rows[0])}
            told = no_column(column, held)
            raise ValueError(f"{key}={column!r} is no column of {table.name}{told}")
    below: dict[str, list[Path]] | None = None
    found: Listed = []
    for number, row in enumerate(rows, start=2):
        if row[layout.file] is None or row[layout.label] is None:
            if not public:
                found.append((folder / NOWHERE, ()))
                continue
            raise ValueError(f"{str(table)!r}: line {number} has too few columns")
        path = folder / row[layout.file]
        if not os.path.isfile(path):  # of a name that is too long Path's raises
            if below is None:
                below = {}
                for p in folder.rglob("*"):
                    if p.suffix.lower() in ENDINGS:
                        below.setdefault(p.name, []).append(p)
            if not public and len(below.get(row[layout.file], ())) != 1:
                found.append((folder / NOWHERE, ()))
                continue
            if len(below.get(row[layout.file], ())) > 1:
                raise ValueError(
                    f"{table.name} names {row[layout.file]!r}, and there are "
                    f"{len(below[row[layout.file]])} files of that name below {str(folder)!r}; "
                    "write paths"
                )
            if row[layout.file] not in below:
                raise ValueError(
                    f"{table.name} names {row[layout.file]!r}, which is not below {str(folder)!r}"
                )
            path = below[row[layout.file]][0]
        words = (
            row[layout.label].split(layout.separator) if layout.separator else [row[layout.label]]
        )
        found.append(
            (path, tuple(w.strip() for w in words if w.strip() and w.strip() != layout.no_label))
        )
    return found


def _are_told_apart(lines: list[str]) -> bool:
    reader, begun = csv.reader(lines), 0
    for _ in reader:
        if not is_told_apart(lines[begun : reader.line_num]):
            return False
        begun = reader.line_num
    return True


def _from_folders(part: Path) -> Listed:
    annotations = part / TINY_IMAGENET
    if annotations.is_file():
        lines = [
            line.split("\t")
            for line in annotations.read_text(encoding="utf-8").splitlines()
            if line
        ]
        return [(part / "images" / line[0], (line[1],)) for line in lines]
    return [
        (path, (group.name,))
        for group in sorted(p for p in part.iterdir() if p.is_dir())
        for path in sorted(group.rglob("*"))
        if path.suffix.lower() in ENDINGS
    ]


def _private_labels(part: Listed, names: Sequence[str], layout: FolderLayout) -> NDArray[Any]:
    """As ``_labels``; a record whose labels are not among ``names`` is ignored, and nothing is said
    of it.
    """
    known = [
        set(words) <= set(names) and (bool(layout.separator) or len(words) == 1)
        for _, words in part
    ]
    kept = [
        (path, words if use else names[:1]) for (path, words), use in zip(part, known, strict=True)
    ]
    labels = _labels([(path, tuple(words)) for path, words in kept], names, layout, "")
    labels[~np.array(known)] = _ignored(labels)
    return labels


def _ignored(labels: NDArray[Any]) -> int:
    """What stands for no use: of several labels a record, a row of -1."""
    return IGNORED if labels.ndim == 1 else -1


def _labels(part: Listed, names: Sequence[str], layout: FolderLayout, source: str) -> NDArray[Any]:
    place = {name: i for i, name in enumerate(names)}
    unknown = next((word for _, words in part for word in words if word not in place), None)
    if unknown is not None:
        hint = (
            f"{nearest(unknown, names)}; if it says that an image has none, set data.no_label"
            if layout.separator
            else nearest(unknown, names)
        )
        raise ValueError(
            f"data.source={source!r}: label {unknown!r} is not among the labels expected{hint}"
        )
    if layout.separator:
        several = np.zeros((len(part), len(names)), dtype=np.float32)
        for row, (_, words) in enumerate(part):
            several[row, [place[w] for w in words]] = 1
        return several
    empty = next((path for path, words in part if len(words) != 1), None)
    if empty is not None:
        raise ValueError(
            f"data.source={source!r}: {empty.name} has no label; give it one, or say with "
            "data.label_separator what stands between the labels of images that have several, or "
            "none"
        )
    return np.array([place[words[0]] for _, words in part], dtype=np.int64)
