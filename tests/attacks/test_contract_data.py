"""Private records under attack: what one of them says of itself, what it changes of the others, and
starts from what was trained on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quietgrad.clipping import clipped_gradients
from quietgrad.curvature.spectrum import Spectrum, record_hash
from quietgrad.tensors import batch_size_of
from quietgrad.training.files.provenance import (
    EPSILONS_ADD,
    WITHOUT_PRIVACY,
    check_start,
    provenance,
    read_provenance,
    stamp_weights,
    start_warnings,
)
from quietgrad.training.tasks.answers.pairs import TextPairs, load_pairs, require_answers
from quietgrad.training.tasks.images.data import LabelledImages, split_images
from quietgrad.training.tasks.images.folder import FolderLayout, load_image_folder
from quietgrad.training.tasks.images.public_weights import check_public_weights, save_public_weights
from quietgrad.training.tasks.records import classification_loss
from quietgrad.training.tasks.splits import (
    IGNORED,
    Splits,
    split,
    split_with_test,
    with_public_labels,
)
from quietgrad.training.tasks.text.data import LabelledTexts, load_texts

SECRET = "syphilis"  # a label, or a text, that one private record has


def texts_of(count: int = 200, labels: tuple[str, ...] = ("good", "bad")) -> list[tuple[str, str]]:
    return [(f"text number {i} of many", labels[i % len(labels)]) for i in range(count)]


def csv_of(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text(
        "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows), encoding="utf-8"
    )
    return str(path)


def read(
    path: Path, rows: list[tuple[str, str]], given: tuple[str, ...] = ()
) -> Splits[LabelledTexts]:
    return with_public_labels(
        split(load_texts(csv_of(path, rows), "text", "label"), 0.2, 0.2), given
    )


def side_of(text: str) -> str:
    """The part that a text falls into at these fractions, whatever else is there."""
    parts = split(load_texts_of([(text, "good"), *texts_of()]), 0.2, 0.2)
    return next(
        name for name in ("train", "validation", "test") if text in getattr(parts, name).texts
    )


def load_texts_of(rows: list[tuple[str, str]]) -> LabelledTexts:
    return LabelledTexts(
        tuple(t for t, _ in rows), np.zeros(len(rows), dtype=np.int64), ("good", "bad"), "made up"
    )


PRIVATE_TEXT = next(t for t in (f"a private text {i}" for i in range(99)) if side_of(t) == "train")
PUBLIC_TEXT = next(t for t in (f"a public text {i}" for i in range(99)) if side_of(t) == "test")


# Labels


@pytest.mark.parametrize("label", [SECRET, "", "  "])
def test_a_private_label_stays_out_of_the_list_and_changes_no_other_record(
    label: str, tmp_path: Path
) -> None:
    # The width of the head, its index order and the saved list of labels told that one patient has
    # it.
    without = read(tmp_path / "without.csv", texts_of())
    beside = read(tmp_path / "with.csv", [(PRIVATE_TEXT, label), *texts_of()])
    assert beside.train.label_names == without.train.label_names == ("bad", "good")
    assert len(beside.train) == len(without.train) + 1  # it stays a record, and counts
    place = beside.train.texts.index(PRIVATE_TEXT)
    assert beside.train.labels[place] == IGNORED
    assert np.array_equal(np.delete(beside.train.labels, place), without.train.labels)
    for part in ("validation", "test"):
        assert np.array_equal(getattr(beside, part).labels, getattr(without, part).labels)


def test_the_old_list_of_labels_told_of_it(tmp_path: Path) -> None:
    # A mutant: labels of all records, as before.
    found = load_texts(
        csv_of(tmp_path / "with.csv", [(PRIVATE_TEXT, SECRET), *texts_of()]), "text", "label"
    )
    assert SECRET in found.label_names and len(found.label_names) == 3


def test_a_public_label_outside_the_setting_is_named_and_a_private_one_is_not(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ValueError, match=r"label 'odd' of a validation or test record is not in data\.labels"
    ):
        read(tmp_path / "a.csv", [(PUBLIC_TEXT, "odd"), *texts_of()], ("good", "bad"))
    found = read(
        tmp_path / "b.csv", [(PRIVATE_TEXT, SECRET), *texts_of()], ("good", "bad", "other")
    )
    assert (
        found.train.label_names == ("good", "bad", "other")
        and (found.train.labels == IGNORED).sum() == 1
    )


def test_a_public_record_that_cannot_be_used_is_refused_without_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="a validation or test record lacks a text or a label"
    ) as refused:
        read(tmp_path / "a.csv", [(PUBLIC_TEXT, ""), *texts_of()])
    assert "record 1" not in str(refused.value)


def test_training_labels_that_no_public_record_has_are_refused_all_together(tmp_path: Path) -> None:
    train, test = (
        load_texts(csv_of(tmp_path / f"{n}.csv", texts_of(99, labels)), "text", "label")
        for n, labels in (("a", ("x", "y")), ("b", ("good", "bad")))
    )
    parts = split(train, 0.2, 0.2)
    with pytest.raises(
        ValueError,
        match="no training record has a text and a label that validation or test records have",
    ):
        with_public_labels(Splits(parts.train, test, test))


def test_labels_of_a_test_source_count_as_public(tmp_path: Path) -> None:
    train = load_texts(
        csv_of(tmp_path / "a.csv", [(PRIVATE_TEXT, "rare"), *texts_of(99)]), "text", "label"
    )
    test = load_texts(
        csv_of(tmp_path / "b.csv", [(f"another {i}", ("good", "rare")[i % 2]) for i in range(20)]),
        "text",
        "label",
    )
    found = with_public_labels(split_with_test(train, test, 0.2))
    assert (
        found.train.label_names == ("bad", "good", "rare")
        and not (found.train.labels == IGNORED).any()
    )


@pytest.mark.parametrize("several", [False, True])
def test_a_record_that_is_ignored_contributes_exactly_zero(several: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    labels = (
        torch.tensor([[1, 0, 1], [0, 0, 0], [-1, -1, -1], [1, 1, 1], [0, 1, 0]])
        if several
        else torch.tensor([0, 1, IGNORED, 2, 1])
    )
    kept = [0, 1, 3, 4]
    whole = clipped_gradients(model, classification_loss, {"x": x, "labels": labels}, 1.0)
    rest = clipped_gradients(
        model, classification_loss, {"x": x[kept], "labels": labels[kept]}, 1.0
    )
    alone = clipped_gradients(model, classification_loss, {"x": x[2:3], "labels": labels[2:3]}, 1.0)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(gradient, rest.gradients[name])
        assert not alone.gradients[name].any()
    assert alone.private.examples == 1


# Answers


def test_a_private_record_without_an_answer_stays_and_is_not_named(tmp_path: Path) -> None:
    rows = [(PRIVATE_TEXT, ""), *texts_of()]
    found = load_pairs(csv_of(tmp_path / "a.csv", rows), "{text}", " {label}")
    parts = split(found, 0.2, 0.2)
    require_answers(parts)
    assert parts.train.answers[parts.train.texts.index(PRIVATE_TEXT)] == ""
    public = split(
        load_pairs(
            csv_of(tmp_path / "b.csv", [(PUBLIC_TEXT, ""), *texts_of()]), "{text}", "{label}"
        ),
        0.2,
        0.2,
    )
    with pytest.raises(ValueError, match="a validation or test record has an empty answer"):
        require_answers(public)
    none = TextPairs(("a",), ("",), "made up")
    with pytest.raises(ValueError, match="no training record has an answer"):
        require_answers(Splits(none, parts.validation, parts.test))


# What parsers say


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "fine", "label": "a"}\n{"text": "' + SECRET + '"'),
        ("a.json", '[{"text": "' + SECRET + '",, }]'),
        ("a.csv", 'text,label\na,b\n"' + SECRET + '",b,c,d,e,f\n'),
        ("a.parquet", SECRET),
    ],
)
def test_files_that_cannot_be_read_quote_no_record(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="cannot be read as") as refused:
        load_texts(str(tmp_path / name), "text", "label")
    said = str(refused.value).replace(str(tmp_path), "")
    assert SECRET not in said and not any(c.isdigit() for c in said)
    assert refused.value.__suppress_context__  # and no traceback prints the parser's own words


def test_a_ragged_batch_does_not_print_its_sizes() -> None:
    # "[36, 37]", the realised batch size and one more, went into logs.
    with pytest.raises(ValueError, match="different first dimensions") as refused:
        batch_size_of({"x": torch.zeros(36, 2), "y": torch.zeros(37)})
    assert not any(c.isdigit() for c in str(refused.value))


def test_refusals_of_overlapping_public_data_do_not_count(tmp_path: Path) -> None:
    ids = [bytes([i]) * 32 for i in range(9)]
    spectrum = Spectrum(np.ones(2), np.zeros(2), 5, {"w": (3,)}, tuple(record_hash(i) for i in ids))
    path = tmp_path / "weights.safetensors"
    save_public_weights({"w": torch.zeros(3)}, path, ids, (1, 2, 2))
    said = set()
    for private in (ids[:1], ids[:7]):
        for refuse in (
            lambda private=private: spectrum.require_disjoint(record_hash(i) for i in private),
            lambda private=private: check_public_weights(str(path), private, (1, 2, 2)),
        ):
            with pytest.raises(ValueError, match="private training records") as refused:
                refuse()
            said.add(str(refused.value))
    assert len(said) == 2  # the same words for one record and for seven


# Images


def picture(path: Path, value: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(value)
    Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)


def folders(folder: Path, train: int = 40, test: int = 8) -> Path:
    for part, count in (("train", train), ("test", test)):
        for i in range(count):
            picture(
                folder / part / ("cat", "dog")[i % 2] / f"{part}{i:02}.png",
                i + 1000 * (part == "test"),
            )
    return folder


def table(folder: Path, train: list[tuple[str, str]], test: list[tuple[str, str]]) -> Path:
    for part, rows in (("train", train), ("test", test)):
        (folder / f"{part}.csv").write_text(
            "file,label\n" + "".join(f"{file},{label}\n" for file, label in rows)
        )
    return folder


def damage(folder: Path) -> None:
    (folder / "train" / "cat" / "zz-private.png").write_bytes(b"\x89PNG broken")


def rare_class(folder: Path) -> None:
    picture(folder / "train" / SECRET / "zz-private.png", 7777)


@pytest.mark.parametrize("private", [damage, rare_class])
def test_a_private_image_raises_nothing_and_changes_no_other(private: Any, tmp_path: Path) -> None:
    without, test = load_image_folder(str(folders(tmp_path / "a")), FolderLayout(), 8)
    private(folders(tmp_path / "b"))
    beside, test_beside = load_image_folder(str(tmp_path / "b"), FolderLayout(), 8)
    assert (
        beside.label_names == without.label_names == ("cat", "dog")
        and len(beside) == len(without) + 1
    )
    place = int(np.flatnonzero(beside.labels == IGNORED)[0])
    assert (beside.labels == IGNORED).sum() == 1
    kept = np.delete(np.arange(len(beside)), place)
    assert torch.equal(beside.pixels[kept], without.pixels) and np.array_equal(
        beside.labels[kept], without.labels
    )
    assert torch.equal(test.pixels, test_beside.pixels)


def test_private_rows_of_a_table_are_named_nowhere(tmp_path: Path) -> None:
    folders(tmp_path)
    train = [
        (f"train/{('cat', 'dog')[i % 2]}/train{i:02}.png", ("a", "b|a")[i % 2]) for i in range(40)
    ]
    test = [(f"test/{('cat', 'dog')[i % 2]}/test{i:02}.png", ("a", "b")[i % 2]) for i in range(8)]
    wrong = [("missing.png", "a"), (train[0][0], SECRET), (train[1][0], f"a|{SECRET}")]
    table(tmp_path, [*train, *wrong], test)
    with open(tmp_path / "train.csv", "a") as file:
        file.write("only-one-column\n")
    layout = FolderLayout(separator="|")
    found, _ = load_image_folder(str(tmp_path), layout, 8)
    assert found.label_names == ("a", "b") and found.labels.shape == (44, 2)
    assert (found.labels[40:] == -1).all() and (found.labels[:40] >= 0).all()
    one_each, _ = load_image_folder(
        str(table(tmp_path, [(f, "a") for f, _ in train[:-1]] + wrong, test)), FolderLayout(), 8
    )
    assert (one_each.labels[-3:] == IGNORED).all() and (one_each.labels[:-3] == 0).all()
    table(tmp_path, train, [*test, ("missing.png", "a")])
    with pytest.raises(
        ValueError, match=r"test\.csv names 'missing\.png'"
    ):  # public: said as before
        load_image_folder(str(tmp_path), layout, 8)
    table(tmp_path, wrong, test)
    with pytest.raises(
        ValueError, match="no training image can be read and has a label"
    ) as refused:
        load_image_folder(str(tmp_path), layout, 8)
    assert SECRET not in str(refused.value)


def test_a_validation_image_that_cannot_be_used_is_refused() -> None:
    pixels = torch.arange(40 * 4, dtype=torch.uint8).reshape(40, 1, 2, 2)
    labels = np.arange(40) % 2
    test = LabelledImages(
        torch.full((4, 1, 2, 2), 250, dtype=torch.uint8), np.arange(4) % 2, ("a", "b"), "made up"
    )
    whole = LabelledImages(pixels, labels, ("a", "b"), "made up")
    positions = np.array([int.from_bytes(i[:8], "big") / 2**64 for i in whole.record_ids])
    for place, refused in ((int(positions.argmin()), True), (int(positions.argmax()), False)):
        changed = labels.copy()
        changed[place] = IGNORED
        images = LabelledImages(pixels, changed, ("a", "b"), "made up")
        if refused:
            with pytest.raises(
                ValueError, match="a validation image cannot be read, or has a label"
            ):
                split_images(images, test, 0.3)
        else:
            assert (split_images(images, test, 0.3)[0].train.labels == IGNORED).sum() == 1


# Starts


SPENT = {"epsilon": 2.0, "delta": 1e-5, "steps": 10, "neighbouring": "add-remove"}


def output(folder: Path, record: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(
        {"w": torch.arange(6.0).reshape(2, 3)}, str(folder / "model.safetensors"), {"format": "pt"}
    )
    stamp_weights(folder, record)
    (folder / "quietgrad.json").write_text(
        json.dumps({"base": "x", "quietgrad_trained_on": record})
    )
    return folder


PLAIN, PRIVATE, PUBLIC = (
    provenance("records.csv", None, False),
    provenance("records.csv", SPENT, False),
    provenance("tweets.csv", None, True),
)


@pytest.mark.parametrize(
    ("record", "accepted", "refused"),
    [
        (PLAIN, "", WITHOUT_PRIVACY),
        (PLAIN, EPSILONS_ADD, WITHOUT_PRIVACY),
        (PLAIN, WITHOUT_PRIVACY, None),
        (PRIVATE, "", EPSILONS_ADD),
        (PRIVATE, EPSILONS_ADD, None),
        (PRIVATE, WITHOUT_PRIVACY, None),
        (PUBLIC, "", None),
        # What it started from counts: privacy does not come back.
        (provenance("b.csv", SPENT, False, (PLAIN,)), EPSILONS_ADD, WITHOUT_PRIVACY),
        (provenance("b.csv", None, True, (PRIVATE,)), "", EPSILONS_ADD),
        (provenance("b.csv", None, True, (PUBLIC,)), "", None),
    ],
)
def test_a_start_from_an_output_is_refused_unless_asked_for_by_name(
    record: dict[str, Any], accepted: str, refused: str | None, tmp_path: Path
) -> None:
    folder = output(tmp_path / "run" / "model", record)
    alone = tmp_path / "copied.safetensors"
    alone.write_bytes(
        (folder / "model.safetensors").read_bytes()
    )  # without the folder's quietgrad.json
    for name, weights in (
        (str(folder), ""),
        (f"image:{folder}", ""),
        ("cnn", str(folder / "model.safetensors")),
        ("cnn", str(alone)),
    ):
        if refused is None:
            assert check_start(name, weights, accepted, True) == (record,)
            continue
        with pytest.raises(ValueError, match=f'set model.accept_start = "{refused}"'):
            check_start(name, weights, accepted, True)
        assert check_start(name, weights, accepted, False) == (
            record,
        )  # a reference run may start anywhere, and says so
    (folder / "model.safetensors").unlink()
    assert read_provenance(folder) == record  # an adapter in another format: quietgrad.json alone


def test_public_models_start_freely(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "quietgrad.json").write_text("{}")
    for name in (
        str(tmp_path),
        "packaged:minilm",
        "sentence-transformers/all",
        str(tmp_path / "missing"),
    ):
        assert check_start(name, "", "", True) == ()
    for damaged in (
        "{",
        '{"quietgrad_trained_on": 3}',
        '{"quietgrad_trained_on": {"private": "no"}}',
    ):
        (tmp_path / "quietgrad.json").write_text(damaged)
        with pytest.raises(ValueError, match="cannot be told from a run's output"):
            check_start(str(tmp_path), "", "", True)


def test_stamped_weights_hold_the_same_tensors(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    file = output(tmp_path / "model", PRIVATE) / "model.safetensors"
    assert torch.equal(load_file(file)["w"], torch.arange(6.0).reshape(2, 3))
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert json.loads(opened.metadata()["quietgrad_trained_on"]) == PRIVATE


def test_provenance_names_no_record_and_no_path() -> None:
    assert PRIVATE["data"] == "records.csv" and PRIVATE["epsilon"] == 2.0
    assert provenance("/home/someone/patients/records.csv", None, False)["data"] == "records.csv"
    assert provenance("packaged:tweets", None, False)["data"] == "packaged:tweets"
    assert set(PRIVATE) == {
        "private",
        "data",
        "data_declared_public",
        "started_from",
        "quietgrad",
        *SPENT,
    }


def test_results_say_what_a_start_costs() -> None:
    assert start_warnings(()) == [] and start_warnings((PUBLIC,)) == []
    assert "epsilon covers no record that those have seen" in start_warnings((PLAIN,))[0]
    assert "their epsilons and deltas add" in start_warnings((PRIVATE,))[0]
    assert len(start_warnings((PLAIN, PRIVATE))) == 2
