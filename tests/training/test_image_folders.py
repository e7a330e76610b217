"""Images in files: class folders and tables, one label or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import CHEST, write_picture
from tiny_runs import config_of

from quietgrad.training.settings.config import load_config
from quietgrad.training.sources.pictures import between_labels
from quietgrad.training.sources.proposal import propose_images
from quietgrad.training.tasks.images.folder import FolderLayout, is_image_folder, load_image_folder
from quietgrad.training.tasks.registry import load_task


def grey(value: int, height: int = 6, width: int = 6) -> np.ndarray:
    return np.full((height, width), value, dtype=np.uint8)


def coloured(red: int, green: int, blue: int, side: int = 6) -> np.ndarray:
    return np.broadcast_to(np.array([red, green, blue], dtype=np.uint8), (side, side, 3)).copy()


def write_table(folder: Path, part: str, *rows: str, head: str = "file,label") -> None:
    (folder / f"{part}.csv").write_text("\n".join((head, *rows)) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders; each image is even, so that its value names it."""
    for part in ("train", "test"):
        for i, name in enumerate(("bird", "cat")):
            for j in range(3):
                value = 20 * i + 5 * j + 100 * (part == "test")
                write_picture(tmp_path / part / name / f"{part}{name}{j}.png", grey(value))
    return tmp_path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for i in range(5):
        write_picture(tmp_path / "images" / ("low" if i < 2 else "high") / f"{i}.png", grey(50 * i))
    write_table(tmp_path, "train", "images/low/0.png,cat", "1.png,bird", "2.png,cat")
    write_table(tmp_path, "test", "3.png,bird", "4.png,cat")
    return tmp_path


def values_of(images: Any) -> list[int]:
    assert images.pixels.shape[1] == 1 and images.pixels.dtype == torch.uint8
    assert (images.pixels == images.pixels[:, :, :1, :1]).all()
    return images.pixels[:, 0, 0, 0].tolist()


def test_class_folders(folder: Path) -> None:
    (folder / "train" / "bird" / "notes.txt").write_text("not an image")
    write_picture(folder / "train" / "cat" / "deeper" / "more.png", grey(77))
    assert is_image_folder(str(folder))
    training, test = load_image_folder(str(folder), FolderLayout(), 4)
    assert training.pixels.shape == (7, 1, 4, 4) and test.pixels.shape == (6, 1, 4, 4)
    assert training.label_names == test.label_names == ("bird", "cat")
    assert values_of(training) == [0, 5, 10, 77, 20, 25, 30] and values_of(test) == [
        100,
        105,
        110,
        120,
        125,
        130,
    ]
    assert training.labels.tolist() == [0, 0, 0, 1, 1, 1, 1] and test.labels.tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    assert training.labels.dtype == np.int64


def test_the_test_part_may_be_called_val(folder: Path) -> None:
    (folder / "test").rename(folder / "val")
    assert len(load_image_folder(str(folder), FolderLayout(), 4)[1]) == 6


def test_tables_name_files_by_path_or_by_name_alone(tables: Path) -> None:
    assert is_image_folder(str(tables))
    training, test = load_image_folder(str(tables), FolderLayout(), 5)
    assert values_of(training) == [0, 50, 100] and values_of(test) == [150, 200]
    assert training.labels.tolist() == [1, 0, 1] and test.labels.tolist() == [0, 1]
    assert training.label_names == ("bird", "cat")


def test_columns_and_labels_are_those_of_the_configuration(tables: Path) -> None:
    write_table(
        tables, "train", "0.png,x,cat", "1.png,x,bird", "2.png,x,cat", head="Image Index,label,Kind"
    )
    write_table(tables, "test", "bird,x,3.png", head="Kind,label,Image Index")
    values = {
        "model.name": "cnn:groupnorm",
        "model.tune": "full",
        "data.public": True,
        "data.source": str(tables),
        "data.image_size": 4,
        "data.text": "Image Index",
        "data.label": "Kind",
        "data.labels": ["dog", "cat", "bird"],
        "data.validation_fraction": 0.5,
    }
    splits = load_task(config_of(values)).splits
    assert splits.train.label_names == ("dog", "cat", "bird")
    assert sorted([*splits.train.labels, *splits.validation.labels]) == [
        1,
        1,
        2,
    ] and splits.test.labels.tolist() == [2]


def test_tiny_imagenet_as_it_is_unpacked(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        write_picture(tmp_path / "train" / name / "images" / f"{name}_0.JPEG", coloured(10, 20, 30))
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("n01_0.JPEG\t0\t0\t1\t1\n")
    for i in range(3):
        write_picture(
            tmp_path / "val" / "images" / f"val_{i}.JPEG", coloured(40 * i, 40 * i, 40 * i)
        )
    (tmp_path / "val" / "val_annotations.txt").write_text(
        "val_2.JPEG\tn01\t0\t0\t9\t9\nval_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n"
    )
    write_picture(
        tmp_path / "test" / "images" / "test_0.JPEG", coloured(0, 0, 0)
    )  # it has no labels
    training, test = load_image_folder(str(tmp_path), FolderLayout(), 4)
    assert training.label_names == ("n01", "n02") and training.labels.tolist() == [0, 1]
    assert test.labels.tolist() == [0, 1, 0] and test.pixels[:, 0, 0, 0].tolist() == [80, 0, 40]


def test_the_first_test_image_says_whether_all_are_grey_or_coloured(folder: Path) -> None:
    write_picture(
        folder / "train" / "bird" / "trainbird0.png", coloured(1, 2, 3)
    )  # private: it says nothing
    training, test = load_image_folder(str(folder), FolderLayout(), 4)
    assert training.pixels.shape[1] == test.pixels.shape[1] == 1
    write_picture(folder / "test" / "bird" / "testbird0.png", coloured(200, 100, 0))
    training, test = load_image_folder(str(folder), FolderLayout(), 4)
    assert training.pixels[0, :, 0, 0].tolist() == [1, 2, 3]
    assert training.pixels[1, :, 0, 0].tolist() == [5, 5, 5] and test.pixels[
        0, :, 0, 0
    ].tolist() == [200, 100, 0]


def test_all_images_are_brought_to_one_size(folder: Path) -> None:
    halves = np.concatenate([grey(40, 3, 9), grey(200, 9, 9)])  # 12 x 9: a quarter is dark
    write_picture(folder / "train" / "bird" / "trainbird0.png", halves)
    training, _ = load_image_folder(str(folder), FolderLayout(), 4)
    assert training.pixels.shape == (6, 1, 4, 4)
    rows = training.pixels[0, 0].float()
    assert (rows == rows[:, :1]).all() and rows[0, 0] < 80 and rows[2:].eq(200).all()
    assert rows.mean().item() == pytest.approx(0.25 * 40 + 0.75 * 200, abs=8)


def test_one_image_may_have_several_labels_or_none(tables: Path) -> None:
    head = "Image Index,Finding Labels"
    write_table(
        tables,
        "train",
        "0.png,Mass|Effusion",
        "1.png,No Finding",
        "2.png,Effusion | Hernia",
        head=head,
    )
    write_table(tables, "test", "3.png,Hernia", "4.png,Mass|Effusion", head=head)
    training, test = load_image_folder(str(tables), CHEST, 4)
    assert (
        training.label_names == ("Effusion", "Hernia", "Mass")
        and training.labels.dtype == np.float32
    )
    assert training.labels.tolist() == [
        [1, 0, 1],
        [0, 0, 0],
        [1, 1, 0],
    ] and test.labels.tolist() == [
        [0, 1, 0],
        [1, 0, 1],
    ]
    given = FolderLayout(
        "Image Index", "Finding Labels", "|", ("Mass", "Edema", "Hernia", "Effusion"), "No Finding"
    )
    training, _ = load_image_folder(str(tables), given, 4)
    assert training.label_names == given.labels
    assert training.labels.tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]
    batch = training.collate(np.array([2, 1]), torch.device("cpu"))
    assert batch["labels"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        (lambda f: (f / "test.csv").unlink(), {}, "has no test part: add test.csv, or a folder "
                                                  "test or val"),
        (lambda f: write_table(f, "test"), {}, "test holds no images"),
        (lambda f: write_table(f, "train"), {}, "train holds no images"),
        (lambda f: write_table(f, "test", "3.png,birt"), {"labels": ("bird", "cat")},
         "label 'birt' .* did you mean 'bird'"),
        (lambda f: None, {"labels": ("bird", "dog")},
         "label 'cat' is not among the labels expected"),
        (lambda f: write_table(f, "test", "3.png,None"), {"separator": "|", "labels": ("bird",
         "cat")}, "label 'None' .* set data.no_label"),
        (lambda f: write_table(f, "test", "9.png,bird", "4.png,cat"), {},
         "test.csv names '9.png', which is not below"),
        (lambda f: write_table(f, "train", "low/0.png,bird", "nowhere.png,cat"), {},
         "no training image can be read and"),
        (lambda f: write_table(f, "test", "3.png,cat", "4.png,cat"), {},
         "has the single label 'cat'"),
        (lambda f: write_table(f, "test", '3.png,""'), {"labels": ("bird", "cat")},
         "3.png has no label; .*data.label_separator"),
        (lambda f: write_table(f, "test", "3.png,none"), {"no_label": "none", "labels": ("bird",
         "cat")}, "3.png has no label; .*data.label_separator"),
        (lambda f: None, {"file": "fil"}, "data.text='fil' is no column of train.csv; did you mean "
                                          "'file'"),
        (lambda f: write_table(f, "test", "3.png,cat", head="file,kind"), {},
         "data.label='label' is no column"),
        (lambda f: next(f.rglob("4.png")).write_bytes(b"no image"), {}, "4.png' cannot be read"),
        (lambda f: next(f.rglob("3.png")).write_bytes(b""), {}, "3.png' cannot be read"),
    ],
)  # fmt: skip
def test_tables_and_files_that_do_not_fit_are_refused(
    tables: Path, change: Change, layout: dict, message: str
) -> None:
    change(tables)
    with pytest.raises(ValueError, match=message):
        load_image_folder(str(tables), FolderLayout(**layout), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "test").rename(f / "held"), "has no test part"),
        (lambda f: (f / "test" / "cat").rename(f / "cat"), "has the single label 'bird'"),
        (lambda f: [p.unlink() for p in (f / "test").rglob("*.png")], "test holds no images"),
        (
            lambda f: (f / "test" / "cat" / "testcat1.png").write_bytes(b""),
            "testcat1.png' cannot be read",
        ),
    ],
)
def test_class_folders_that_do_not_fit_are_refused(
    folder: Path, change: Change, message: str
) -> None:
    change(folder)
    with pytest.raises(ValueError, match=message):
        load_image_folder(str(folder), FolderLayout(), 4)


def test_a_cut_file_is_refused_by_name(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    path = write_picture(folder / "test" / "cat" / "testcat2.png", noise)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(ValueError, match=r"testcat2.png' cannot be read: image file is truncated"):
        load_image_folder(str(folder), FolderLayout(), 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.image_size": 0}, "set data.image_size"),
        ({"model.name": "packaged:minilm"}, "holds images, and model.name='packaged:minilm' reads "
                                            "texts"),
        ({"model.public_head_steps": 5}, "model.public_head_steps=5 says nothing to a classifier"),
        ({"model.random_head": True}, "model.random_head=True says nothing to a classifier"),
        ({"data.source": "packaged:digits", "data.label_separator": "|"},
         "is for a folder with train.csv"),
        ({"data.source": "packaged:tweets"}, "holds texts, and model.name='cnn:groupnorm' reads "
                                             "images"),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_does_not_go_with_the_folder_is_refused(
    folder: Path, changes: dict, message: str
) -> None:
    values = {
        "model.name": "cnn:groupnorm",
        "model.tune": "full",
        "data.public": True,
        "data.source": str(folder),
        "data.image_size": 4,
        "data.validation_fraction": 0.5,
    }
    with pytest.raises(ValueError, match=message):
        load_task(config_of(values | changes))


def test_a_folder_that_lacks_its_parts_is_told_what_is_missing(tmp_path: Path) -> None:
    values = {"model.name": "cnn:groupnorm", "model.tune": "full", "data.source": str(tmp_path)}
    with pytest.raises(ValueError, match=r"is a folder without train/ and test/ .* or train\.csv"):
        load_task(config_of(values))


def test_what_is_no_image_folder(tmp_path: Path) -> None:
    write_table(tmp_path, "reviews", "a,b")
    (tmp_path / "test").mkdir()
    assert not any(
        map(
            is_image_folder,
            (str(tmp_path), str(tmp_path / "reviews.csv"), "packaged:tweets", "nowhere"),
        )
    )


def test_labels_with_a_mark_between_them_get_a_configuration_that_says_so(tables: Path) -> None:
    """`init` left it out, and `train` then refused the image without a label."""
    assert between_labels(tables, "label") == "" == between_labels(tables, "kind")
    assert "label_separator" not in propose_images(str(tables), "init")
    write_table(tables, "test", "3.png,cat|bird", '4.png,""')
    between = between_labels(tables, "label")
    written = tables / "config.toml"
    written.write_text(propose_images(str(tables), "init", between=between))
    assert load_config(written).data.label_separator == "|" == between
    (tables / "test.csv").write_bytes(b"file,label\n\xe9,cat\n")
    assert between_labels(tables, "label") == ""
