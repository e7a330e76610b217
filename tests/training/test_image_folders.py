"""Images in files: class folders and tables, one label or several; mean AUC; a run on images with
several labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny_images import SIZE, write_class_folders, write_findings, write_picture
from tiny_runs import config_of, train
from torch import nn

from quietgrad.comparing.comparison import read_results
from quietgrad.comparing.table import load_comparison
from quietgrad.training.tasks.images.folder import FolderLayout, is_image_folder, load_image_folder
from quietgrad.training.tasks.images.models import load_image_classifier
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.metrics import ACCURACY, MEAN_AUC, mean_auc, metric_for
from quietgrad.training.tasks.records import classification_loss
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


CHEST = FolderLayout("Image Index", "Finding Labels", separator="|", no_label="No Finding")


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
         "3.png has no label"),
        (lambda f: write_table(f, "test", "3.png,none"), {"no_label": "none", "labels": ("bird",
         "cat")}, "3.png has no label"),
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
        ({"model.public_head_steps": 5}, "model.public_head_steps and model.random_head are for "
                                         "texts"),
        ({"model.random_head": True}, "public_head_steps and model.random_head are for texts"),
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


def test_what_is_no_image_folder(tmp_path: Path) -> None:
    write_table(tmp_path, "reviews", "a,b")
    (tmp_path / "test").mkdir()
    assert not any(
        map(
            is_image_folder,
            (str(tmp_path), str(tmp_path / "reviews.csv"), "packaged:tweets", "nowhere"),
        )
    )


# ------------------------------------------------------------------------------------------------
# scores


def area_by_pairs(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs that are ordered rightly; ties count a half."""
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    return float(np.mean(pairs))


@given(st.data(), st.integers(2, 12), st.integers(1, 4))
@settings(deadline=None)
def test_mean_auc_counts_pairs(data: st.DataObject, records: int, labels: int) -> None:
    scores = data.draw(
        arrays(np.float32, (records, labels), elements=st.sampled_from([-1.5, 0.0, 0.25, 3.0]))
    )
    truth = data.draw(arrays(np.float32, (records, labels), elements=st.sampled_from([0.0, 1.0])))
    divided = [j for j in range(labels) if 0 < truth[:, j].sum() < records]
    assume(divided)
    expected = np.mean([area_by_pairs(scores[:, j], truth[:, j] > 0) for j in divided])
    assert mean_auc(scores, truth) == pytest.approx(expected, abs=1e-12)


def test_mean_auc_needs_a_label_that_divides_the_records() -> None:
    scores = np.zeros((3, 2), dtype=np.float32)
    with pytest.raises(ValueError, match="no label divides the records"):
        mean_auc(scores, np.array([[1.0, 0.0]] * 3))
    assert mean_auc(scores, np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])) == 0.5


def test_the_score_follows_the_form_of_the_labels() -> None:
    logits = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]], dtype=np.float32)
    single, several = np.array([1, 0, 0]), np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert metric_for(single) is ACCURACY and metric_for(single)(logits, single) == pytest.approx(
        2 / 3
    )
    assert metric_for(several) is MEAN_AUC and metric_for(several)(logits, several) == 1.0


def test_the_loss_of_several_labels_is_the_mean_of_their_binary_cross_entropies() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    batch = {
        "x": torch.randn(4, 5),
        "labels": torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]]).float(),
    }
    probabilities = model(batch["x"]).sigmoid()
    wrong = torch.where(batch["labels"] > 0, probabilities, 1 - probabilities)
    found = classification_loss(model, batch)
    assert found.shape == (4,)
    torch.testing.assert_close(found, -wrong.log().mean(dim=1))
    one = {"x": batch["x"], "labels": torch.tensor([2, 0, 1, 1])}
    expected = F.cross_entropy(model(one["x"]), one["labels"], reduction="none")
    torch.testing.assert_close(classification_loss(model, one), expected)


# ------------------------------------------------------------------------------------------------
# runs


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_findings(tmp_path_factory.mktemp("findings"))


@pytest.fixture
def values(findings: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.name": "cnn:groupnorm",
        "model.tune": "full",
        "data.public": True,
        "data.source": str(findings),
        "data.text": "Image Index",
        "data.label": "Finding Labels",
        "data.label_separator": "|",
        "data.no_label": "No Finding",
        "data.image_size": SIZE,
        "data.validation_fraction": 0.25,
        "privacy.target_epsilon": 8.0,
        "optimizer.learning_rate": 1e-3,
        "training.expected_batch_size": 40,
        "training.steps": 4,
        "training.eval_every": 2,
        "training.precision": "float32",
        "training.seed": 0,
        "training.run_dir": str(tmp_path / "run"),
    }


def test_a_run_with_several_labels_reports_its_mean_auc(
    quietgrad: Any, values: dict, write_config: Any
) -> None:
    code, out, err = quietgrad("train", write_config(values), "--json")
    assert code == 0, err
    result, folder = json.loads(out), Path(values["training.run_dir"])
    assert (
        set(result["metrics"]) == {"mean_auc", "validation_mean_auc"}
        and "majority_accuracy" not in result
    )
    _, test = load_image_folder(values["data.source"], CHEST, SIZE)
    weights = str(folder / "model" / "model.safetensors")
    model = load_image_classifier(
        "cnn:groupnorm", (1, SIZE, SIZE), 2, Tuning("full"), weights
    ).eval()
    scores = (
        model(test.collate(np.arange(len(test)), torch.device("cpu"))["pixels"]).detach().numpy()
    )
    areas = [area_by_pairs(scores[:, j], test.labels[:, j] > 0) for j in range(2)]
    assert (
        result["metrics"]["mean_auc"] == pytest.approx(np.mean(areas), abs=1e-3) and min(areas) < 1
    )
    assert result["private"] and result["epsilon"] <= 8.0
    said = " ".join(err.split())
    assert "test mean AUC" in said and "accuracy" not in said.lower().replace("accuracy.png", "")
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == [2, 4] and all(
        "validation_mean_auc" in line for line in curve
    )
    described = json.loads(next((folder / "model").glob("*.json")).read_text())
    assert described["labels"] == ["Across", "Down"]


def test_labels_that_can_be_seen_are_learnt(values: dict) -> None:
    changes = {"privacy.enabled": False, "training.steps": 40, "optimizer.learning_rate": 0.01}
    _, outcome, _ = train(
        {k: v for k, v in values.items() if k != "privacy.target_epsilon"} | changes
    )
    assert outcome.result["metrics"]["mean_auc"] > 0.95  # guessing: 0.5
    assert "majority_accuracy" not in outcome.result and not outcome.result["private"]


def test_a_comparison_scores_several_labels_as_a_run_does(
    quietgrad: Any, values: dict, tmp_path: Path
) -> None:
    keys = {
        k: v
        for k, v in values.items()
        if k not in ("privacy.target_epsilon", "training.run_dir", "training.seed")
    }
    lines = [
        "[comparison]",
        "epsilons = [8.0]",
        "seeds = 1",
        "tuning_seeds = 1",
        "learning_rates = [1e-3]",
    ]
    lines += ["protocol_rate = 1e-3", "eval_every = 2", "[variants.baseline]"]
    for table in sorted({k.partition(".")[0] for k in keys}):
        lines.append(f"[{table}]")
        lines += [
            f"{k.partition('.')[2]} = {json.dumps(v)}"
            for k, v in keys.items()
            if k.startswith(f"{table}.")
        ]
    path = tmp_path / "comparison.toml"
    path.write_text("\n".join(lines) + "\n")
    code, out, err = quietgrad("compare", path, "--json")
    assert code == 0, err
    assert "test mean AUC" in json.loads(out)["tables"]["one rate"]
    (record,) = read_results(load_comparison(path)).values()
    _, outcome, _ = train(values)
    metrics = outcome.result["metrics"]
    assert 0 < record["test"] < 1
    assert record["test"] == pytest.approx(metrics["mean_auc"], abs=1e-6)
    assert record["curve"][-1] == [4, pytest.approx(metrics["validation_mean_auc"], abs=1e-6)]


def test_class_folders_are_trained_on(
    quietgrad: Any, values: dict, write_config: Any, tmp_path: Path
) -> None:
    source = write_class_folders(tmp_path / "classes", 60, 20)
    for path in [
        *sorted((source / "test" / "down").iterdir())[:5],
        *sorted((source / "train" / "down").iterdir())[:15],
    ]:
        path.unlink()
    keys = {k: v for k, v in values.items() if not k.startswith("data.")}
    keys |= {
        "data.public": True,
        "data.source": str(source),
        "data.image_size": 10,
        "data.validation_fraction": 0.25,
    }
    keys |= {"training.expected_batch_size": 12, "training.steps": 2}
    code, out, err = quietgrad("train", write_config(keys), "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result["metrics"]) == {"accuracy", "validation_accuracy"}
    assert result["majority_accuracy"] == pytest.approx(10 / 15) and result["records"]["test"] == 15
