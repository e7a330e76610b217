"""What messages would say of a private record that stands where nobody expects one: in a file
without names of columns, in a file name, in an owner's name, in a label.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import labelled_texts

from quietgrad.sampling.identities import identities_of
from quietgrad.training.settings.config import config_from, load_config
from quietgrad.training.sources.pictures import inspect_folder
from quietgrad.training.tasks.columns import read_file
from quietgrad.training.tasks.images.data import LabelledImages, split_images
from quietgrad.training.tasks.images.folder import FolderLayout, load_image_folder
from quietgrad.training.tasks.registry import load_task
from quietgrad.training.tasks.splits import IGNORED
from quietgrad.training.tasks.tables.data import load_rows
from quietgrad.training.tasks.text.data import load_texts

Run = Callable[..., tuple[int, str, str]]
SECRET = "seen by the doctor for it"


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("first", [f"{SECRET},0.12", f"bob,{SECRET}", "bob,1977", "bob,yes"])
def test_a_file_without_names_is_not_told_by_its_first_record(
    first: str, quietgrad: Run, tmp_path: Path
) -> None:
    """Before: messages that list columns printed it."""
    file = written(tmp_path / "a.csv", [first, *(f"n{i},0.{i}1" for i in range(60)), "x,yes"])
    out = tmp_path / "a.toml"
    for asked in ([], ["--label", "label"], ["--text", "text"], ["--user", "who"]):
        code, _, err = quietgrad("init", file, *asked, "-o", out)
        assert code == 2 and "`quietgrad check" in err and err.count("\n") == 1
        assert not any(cell in err for cell in first.split(","))
    with pytest.raises(ValueError, match="is not a column of") as refused:
        load_rows(str(file), "label")
    assert not any(cell in str(refused.value) for cell in first.split(","))


def test_columns_are_told_where_they_are_names(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", ["age,job,pay", *(f"{i},j{i},x" for i in range(9))])
    with pytest.raises(ValueError, match="valid: age, job, pay"):
        load_rows(str(file), "zzzzzz")


def test_two_equal_cells_of_a_first_record_are_not_told(quietgrad: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", ["hiv,hiv,yes", "no,no,no"])
    with pytest.raises(ValueError, match=r"two columns of one name.*quietgrad check") as refused:
        read_file(file)
    assert "hiv" not in str(refused.value)
    assert "hiv" not in quietgrad("init", file, "-o", tmp_path / "a.toml")[2]
    assert "both are named 'hiv'" in " ".join(quietgrad("check", file)[1].split())


@pytest.mark.parametrize("labels", [["hiv positive"], [f"l{i}" for i in range(60)]])
def test_init_says_no_label_and_no_number_of_them(
    labels: list[str], quietgrad: Run, tmp_path: Path
) -> None:
    rows = [f"{i}.5,{i}.25,{labels[i % len(labels)]}" for i in range(100)]
    file = written(tmp_path / "a.csv", ["a,b,label", *rows])
    code, _, err = quietgrad("init", file, "--label", "label", "-o", tmp_path / "a.toml")
    assert code == 2 and "no class to learn" in err and "quietgrad check" in err
    assert "hiv" not in err and "60" not in err.replace(str(file), "")


# Images


def pictures(folder: Path, row: str = "") -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 8)):
        lines = [f"{part}{i}.png,{'ab'[i % 2]}" for i in range(count)]
        for i in range(count):
            pixels = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{part}{i}.png")
        more = [row] if row and part == "train" else []
        written(folder / f"{part}.csv", ["file,label", *lines, *more])
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("bob" * 100 + ".png", "bob/" * 2000 + ".png", "b" * 140_000, "b\0b.png", "", "/dev/zero"),
        '"bob"b.png',
    ],
    ids=["long", "deep", "huge", "zero", "none", "device", "marks"],
)
def test_a_private_row_that_can_name_no_file_is_ignored(name: str, tmp_path: Path) -> None:
    """Before: of a name that is too long, the system's own words, which quote it."""
    folder = pictures(tmp_path, f"{name},a")
    found, _ = load_image_folder(str(folder), FolderLayout(), 4)
    assert len(found) == 41 and (found.labels == IGNORED).sum() == 1
    if len(name) < 10_000 and "\0" not in name:
        assert len(inspect_folder(folder).damaged) == 1


def test_a_table_of_images_without_names_is_not_told(tmp_path: Path) -> None:
    folder = pictures(tmp_path)
    written(folder / "train.csv", ["bob-biopsy.png,malignant", "train1.png,b"])
    with pytest.raises(ValueError, match=r"is no column of train\.csv") as refused:
        load_image_folder(str(folder), FolderLayout(), 4)
    assert "bob" not in str(refused.value) and "malignant" not in str(refused.value)


@pytest.mark.parametrize(("channels", "size"), [(3, 224), (3, 96), (1, 28), (3, 32)])
def test_a_damaged_image_is_a_private_one_at_every_size(channels: int, size: int) -> None:
    """Before: all are one black image, whose hash at some sizes (224 in colours) is a validation
    image's: one damaged file among a million ended the run.
    """
    import torch

    rng = torch.Generator().manual_seed(1)
    shape = (60, channels, size, size)
    pixels = torch.randint(0, 255, shape, generator=rng, dtype=torch.uint8)
    labels = np.arange(60) % 2
    whole = LabelledImages(pixels, labels, ("a", "b"), "made up")
    rows = np.arange(50)
    test = whole.subset(np.arange(50, 60))
    alone, public = split_images(whole.subset(rows), test, 0.1, 0.1)
    pixels, labels = pixels.clone(), labels.copy()
    pixels[7], labels[7] = 0, IGNORED
    damaged = LabelledImages(pixels, labels, ("a", "b"), "made up")
    beside, public_beside = split_images(damaged.subset(rows), test, 0.1, 0.1)
    assert (beside.train.labels == IGNORED).sum() == 1
    others = {i for part in (alone.train, alone.validation, public) for i in part.record_ids}
    others -= {whole.record_ids[7]}
    for one, other in (
        (alone.train, beside.train),
        (alone.validation, beside.validation),
        (public, public_beside),
    ):
        assert set(one.record_ids) & others == set(other.record_ids) & others
    # Black images of the test part leave it where it is, too.
    dark = LabelledImages(test.pixels * 0, test.labels, ("a", "b"), "made up")
    assert (split_images(damaged.subset(rows), dark, 0.1)[0].train.labels == IGNORED).sum() == 1


# Cells that cannot be what they are


def test_half_a_letter_in_a_list_of_json_is_a_broken_row(quietgrad: Run, tmp_path: Path) -> None:
    """Before: a TypeError of the tokenizer in the middle of a command."""
    file = tmp_path / "a.json"
    rows = [{"text": t, "label": label} for t, label in labelled_texts()]
    file.write_text(json.dumps([*rows, {"text": "half \ud800 of bob", "label": "good"}]))
    with pytest.raises(ValueError, match="rows of it are broken") as refused:
        load_texts(str(file), "text", "label")
    assert "bob" not in str(refused.value)
    assert len(load_texts(str(file), "text", "label", skip_bad=True)) == len(rows)
    assert "half a letter" in quietgrad("check", file)[1]


def test_a_gap_of_pandas_is_an_empty_cell(tmp_path: Path) -> None:
    """Before: "boolean value of NA is ambiguous", a traceback, for one private row's gap."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1, 2, None], "t": ["a", None, "b"], "label": ["x", "y", None]})
    frame = frame.astype({"n": "Int64", "t": "string", "label": "string"})
    frame["day"] = [pandas.Timestamp("2020-01-01"), pandas.NaT, pandas.NaT]
    frame.to_parquet(tmp_path / "a.parquet")
    found = load_rows(str(tmp_path / "a.parquet"), "label")
    assert found.columns["n"] == ("1", "2", "") and found.columns["t"] == ("a", "", "b")
    assert found.columns["day"][1:] == ("", "") and found.labels.tolist() == [0, 1, IGNORED]


def test_an_owner_of_too_many_digits_is_not_measured() -> None:
    """Before: Python's own words, which say how many digits it has."""
    for long in ("9" * 5000 + ".0", "-" + "9" * 5000 + ".0"):
        with pytest.raises(TypeError, match="neither text nor whole numbers") as refused:
            identities_of(["7", "8.0", long])
        assert "5000" not in str(refused.value)
    assert len(set(identities_of(["7", "7.0", "00.0", "0" * 5000 + "7.0"]))) == 3
    with pytest.raises(TypeError):
        identities_of([f"{2**53}.0", "7"])
    assert len(identities_of([f"{2**53 - 1}.0", "7"])) == 2


@pytest.mark.parametrize("later", ['"a cell in marks",good', '"one, two",good', 'hi,"good"'])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_an_open_mark_does_not_end_at_the_mark_of_a_later_row(
    later: str, skip_bad: bool, tmp_path: Path
) -> None:
    """Before: it took the rows between for its own. Without it all of them were there."""
    rows = [f"text {i},{'good' if i % 2 else 'bad'}" for i in range(20)]
    whole = written(tmp_path / "a.csv", ["text,label", *rows, later, *rows])
    assert len(load_texts(str(whole), "text", "label")) == 41
    stray = ["text,label", '"seen by the doctor,good', *rows, later, *rows]
    for file in (written(tmp_path / "b.csv", stray), written(tmp_path / "c.csv", [*stray, later])):
        with pytest.raises(ValueError, match="cannot be told apart") as refused:
            load_texts(str(file), "text", "label", skip_bad=skip_bad)
        assert "doctor" not in str(refused.value)
    lines = ["text,label", '"two', 'lines, ""well"" closed",good', 'a "mark" inside,bad', '"a"b,x']
    assert len(load_texts(str(written(tmp_path / "d.csv", lines)), "text", "label")) == 3


@pytest.mark.parametrize("later", ["", '"a cell in marks",good\n'])
def test_an_open_mark_beside_a_broken_letter_is_an_open_mark(later: str, tmp_path: Path) -> None:
    """Before: a broken row, with which data.skip_bad left out all others that the mark took."""
    rows = "".join(f"text {i},{'good' if i % 2 else 'bad'}\n" for i in range(20)).encode()
    file = tmp_path / "a.csv"
    for mark, refused in ((b'"', True), (b"", False)):
        broken = mark + b"caf\xe9 of bob,good\n"
        file.write_bytes(b"text,label\n" + rows + broken + rows + later.encode() + rows)
        if refused:
            with pytest.raises(ValueError, match="cannot be told apart"):
                load_texts(str(file), "text", "label", skip_bad=True)
        else:
            found = load_texts(str(file), "text", "label", skip_bad=True)
            assert len(found) == 60 + bool(later)


def test_the_same_in_a_table_of_images(tmp_path: Path) -> None:
    folder = pictures(tmp_path)
    lines = (folder / "train.csv").read_text().splitlines()
    written(folder / "train.csv", [lines[0], '"gone.png,a', *lines[1:30], '"x.png",b', *lines[30:]])
    with pytest.raises(ValueError, match="cannot be told apart"):
        load_image_folder(str(folder), FolderLayout(), 4)


# Settings that say nothing


UNREAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"label_separator": "|"}, "a classifier of texts"),
    ({}, {"public_fraction": 0.2}, "a classifier of texts"),
    ({"task": {"prompt": "{text}:"}}, {}, "a classifier of texts"),
    ({"model": {"name": "table:mlp"}, "task": {"kind": "generate"}}, {}, "a classifier of rows"),
    ({"model": {"name": "table:mlp"}}, {"no_label": "none"}, "a classifier of rows"),
    ({"task": {"kind": "generate"}}, {"labels": ["a", "b"]}, "a model of answers"),
    ({"task": {"kind": "generate"}}, {"text_pair": "second"}, "a model of answers"),
    ({"model": {"name": "cnn:groupnorm"}, "task": {"decoded": "rouge1"}}, {}, "of images"),
    ({"model": {"name": "cnn:groupnorm", "max_length": 9}}, {}, "a classifier of images"),
    ({"model": {"name": "cnn:groupnorm"}}, {"test_fraction": 0.3}, "a classifier of images"),
    ({"model": {"name": "table:mlp"}}, {"text": "review"}, "a classifier of rows"),
    ({"model": {"name": "table:mlp", "max_length": 9}}, {}, "a classifier of rows"),
    ({"model": {"name": "table:mlp", "head": "auto"}}, {}, "a classifier of rows"),
    ({"model": {"name": "table:mlp", "lora_rank": 4}}, {}, "a classifier of rows"),
    ({"model": {"name": "table:mlp", "tune": "full", "weights": "a"}}, {}, "a classifier of rows"),
    ({"model": {"head": "auto"}, "task": {"kind": "generate"}}, {}, "a model of answers"),
    ({"task": {"kind": "generate"}}, {"label": "answer"}, "a model of answers"),
    ({"task": {"max_answer_length": 9}}, {}, "a classifier of texts"),
]


@pytest.mark.parametrize(("tables", "data", "what"), UNREAD)
def test_a_setting_that_nothing_reads_is_refused(
    tables: dict[str, Any], data: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """Before: passed over in silence: labels "a|b" were classes, answers were not learnt."""
    config = config_from({**tables, "data": {"source": str(tmp_path / "a.csv"), **data}})
    with pytest.raises(ValueError, match=f"says nothing to {what}" if "a " in what else what):
        load_task(config)


def test_what_the_embedded_default_says_is_nobodys() -> None:
    """It is of texts, and ``--set`` names another model."""
    named = ["model.name=cnn:groupnorm", "model.tune=full", "data.source=packaged:digits"]
    config = load_config(None, named)
    assert config.model.head == "layers"
    assert load_task(config).what == "a classifier of images"


def test_labels_of_a_set_of_images_that_brings_its_own_are_refused() -> None:
    tables = {"model": {"name": "cnn:groupnorm", "tune": "full"}}
    config = config_from({**tables, "data": {"source": "packaged:digits", "labels": ["3", "4"]}})
    with pytest.raises(ValueError, match=r"data\.labels=\['3', '4'\] is for a folder"):
        load_task(config)
