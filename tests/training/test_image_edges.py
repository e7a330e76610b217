"""Image files and searches at their edges: what is damaged, ambiguous, or of another depth than
eight bits.
"""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_images import CHEST, save_tiny_vit, write_class_folders, write_findings, write_picture
from tiny_runs import config_of

from quietgrad.comparing.search import RATE, Range, SearchTable, propose
from quietgrad.comparing.table import load_comparison
from quietgrad.curvature import load_spectrum
from quietgrad.training.prepare import prepare
from quietgrad.training.spectrum_run import make_spectrum
from quietgrad.training.tasks.images.folder import (
    FolderLayout,
    load_image_folder,
    load_unlabelled_folder,
)
from quietgrad.training.tasks.images.models import load_image_classifier
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.splits import IGNORED
from quietgrad.training.tasks.text.saved import load_saved

SEVERAL = FolderLayout(separator="|", no_label="No Finding")


def table_of(folder: Path, rows: str) -> Path:
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text("file,label\n" + rows, encoding="utf-8")
    return folder


def test_sixteen_bits_a_pixel_keep_their_shades(tmp_path: Path) -> None:
    from PIL import Image

    for name, value in (("a", 3000), ("b", 20000), ("c", 65535)):
        Image.fromarray(np.full((4, 4), value, dtype=np.uint16)).save(tmp_path / f"{name}.png")
    table_of(tmp_path, "a.png,dark\nb.png,grey\nc.png,white\n")
    train, _ = load_image_folder(str(tmp_path), FolderLayout(), 4)
    assert train.pixels[:, 0, 0, 0].tolist() == [round(3000 / 257), round(20000 / 257), 255]


def test_a_first_picture_that_cannot_be_read(tmp_path: Path) -> None:
    write_class_folders(tmp_path, train=4, test=2)
    next(iter(sorted((tmp_path / "test").rglob("*.png")))).write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read"):
        load_image_folder(str(tmp_path), FolderLayout(), 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("x.png,one\nother.png,two\n", "there are 2 files of that name"),
        ("other.png\none/x.png,two\n", "line 2 has too few columns"),
    ],
)
def test_tables_that_leave_something_open(tmp_path: Path, rows: str, message: str) -> None:
    for name in ("one/x.png", "two/x.png", "other.png"):
        write_picture(tmp_path / name, np.zeros((4, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match=message):
        load_image_folder(str(table_of(tmp_path, rows)), FolderLayout(), 4)


def test_a_first_private_row_with_a_cell_too_many_is_no_traceback(tmp_path: Path) -> None:
    table_of(tmp_path, "a.png,x\n")
    (tmp_path / "train.csv").write_text("file,label\na.png,x,secret\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is no column of train\.csv; did you") as told:
        load_image_folder(str(tmp_path), FolderLayout(label="lable"), 4)
    assert "secret" not in str(told.value)


def test_a_table_of_another_encoding(tmp_path: Path) -> None:
    write_picture(tmp_path / "x.png", np.zeros((4, 4), dtype=np.uint8))
    (tmp_path / "train.csv").write_bytes("file,label\nx.png,grün\n".encode("latin-1"))
    (tmp_path / "test.csv").write_bytes(b"file,label\nx.png,a\n")
    with pytest.raises(ValueError, match=r"train\.csv.* cannot be read as a table in UTF-8"):
        load_image_folder(str(tmp_path), FolderLayout(), 4)


def test_a_private_quotation_mark_does_not_swallow_other_records(tmp_path: Path) -> None:
    """Before: one row more, with a mark that is left open, and N fell from 40 to 4."""
    names = [f"p{i:02}.png" for i in range(40)]
    for i, name in enumerate(names):
        write_picture(tmp_path / name, np.full((4, 4), i, dtype=np.uint8))
    rows = [f"{name},{'ab'[i % 2]}" for i, name in enumerate(names)]
    table_of(tmp_path, "\n".join(rows) + "\n")
    private = tmp_path / "train.csv"
    private.write_text("\n".join(["file,label", *rows[:3], '"secret.png,a', *rows[3:]]) + "\n")
    with pytest.raises(ValueError, match="quotation mark that is not closed") as refused:
        load_image_folder(str(tmp_path), FolderLayout(), 4)
    assert "secret" not in str(refused.value) and "quietgrad check" in str(refused.value)
    quoted = [f'"{name}",{"ab"[i % 2]}' for i, name in enumerate(names)]
    private.write_text("\n".join(["file,label", *quoted]))
    found, _ = load_image_folder(str(tmp_path), FolderLayout(), 4)
    assert len(found) == 40 and (found.labels >= 0).all()


@pytest.mark.parametrize(
    "error", [KeyError("private.png"), IndexError(), EOFError(), MemoryError(), RuntimeError()]
)
def test_whatever_pillow_raises_of_a_private_image_it_is_ignored(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    write_class_folders(tmp_path, train=4, test=2)
    private = next(iter(sorted((tmp_path / "train").rglob("*.png"))))
    right = Image.open

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        if Path(path) == private:
            raise error
        return right(path, *args, **options)

    monkeypatch.setattr(Image, "open", opened)
    found, _ = load_image_folder(str(tmp_path), FolderLayout(), 4)
    assert (found.labels == IGNORED).sum() == 1


def test_pillow_says_nothing_of_private_images(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: "Image size (101000000 pixels) exceeds limit", of one private picture."""
    from PIL import Image

    write_class_folders(tmp_path, train=4, test=2)
    private = next(iter(sorted((tmp_path / "train").rglob("*.png"))))
    Image.new("RGB", (37, 41)).save(private)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 37 * 41 - 1)
    right = Image.open

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        if Path(path) == private:  # as Pillow does of TIFF files with more than it can decode
            logging.getLogger("PIL.TiffImagePlugin").error("More samples per pixel: %s", 1517)
        return right(path, *args, **options)

    monkeypatch.setattr(Image, "open", opened)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, _ = load_image_folder(str(tmp_path), FolderLayout(), 4)
    assert not said and "1517" not in "".join(capfd.readouterr())
    assert (found.labels >= 0).all()  # it is read


def test_several_labels_need_one(tmp_path: Path) -> None:
    write_picture(tmp_path / "x.png", np.zeros((4, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match="no test image has a label"):
        load_image_folder(str(table_of(tmp_path, "x.png,No Finding\n")), SEVERAL, 4)


def findings(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.name": "cnn:groupnorm", "model.tune": "full",
        "data.public": True,
        "data.source": str(folder), "data.label_separator": "|", "data.no_label": "No Finding",
        "data.text": CHEST.file, "data.label": CHEST.label, "data.image_size": 8,
        "privacy.target_epsilon": 8.0, "optimizer.name": "sgd", "optimizer.learning_rate": 0.1,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "training.expected_batch_size": 16, "training.steps": 2,
        "training.run_dir": str(tmp_path / "run"),
        "spectrum.public": str(folder.parent / "public"),
        "spectrum.output": str(tmp_path / "s.npz"),
        "spectrum.weights_output": str(tmp_path / "w.safetensors"), "spectrum.simclr_epochs": 0,
        "spectrum.head_epochs": 3, "spectrum.top": 5, "spectrum.hessian_records": 20,
    }  # fmt: skip


def test_too_few_records_for_a_curve_are_found_before_training(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    write_findings(folder)
    with pytest.raises(
        ValueError, match=r"no label divides the 1 validation records \(training.eval_records\)"
    ):
        prepare(config_of(findings(folder, tmp_path) | {"training.eval_records": 1}))
    assert not (tmp_path / "run").exists()


def test_several_labels_have_a_spectrum_of_their_own_loss(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    write_findings(folder)
    write_findings(tmp_path / "public", train=30, test=4, seed=7)  # its labels are not looked at
    values = findings(folder, tmp_path)
    made = make_spectrum(config_of(values | {"model.tune": "head"}), lambda line: None)
    assert load_spectrum(made.spectrum_path).facts["loss"].startswith("binary cross entropies")
    # Of a linear head the mean of binary cross entropies has one block for each label: curvature at
    # most 1/4 of the features' second moment, over the labels.
    labels = len(prepare(config_of(values)).task.label_names)
    model = load_image_classifier(
        "cnn:groupnorm", (1, 8, 8), labels, Tuning("head"), str(made.weights_path)
    )
    images = load_unlabelled_folder(values["spectrum.public"], CHEST, 8, channels=1)
    with torch.no_grad():
        features = model.embed(images.collate(np.arange(20), torch.device("cpu"))["pixels"])
    extended = torch.cat([features, torch.ones(20, 1)], dim=1).double()
    limit = torch.linalg.eigvalsh(extended.T @ extended / 20)[-1] / 4 / labels
    assert 0.5 * limit < made.spectrum.top[0] <= limit * (1 + 1e-6)


def test_weights_that_are_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_image_classifier(
            "cnn:groupnorm", (1, 8, 8), 2, Tuning("full"), str(tmp_path / "w.safetensors")
        )


def test_preprocessing_as_the_model_states_it(tmp_path: Path) -> None:
    path = save_tiny_vit(tmp_path / "plain")
    (path / "preprocessor_config.json").write_text(
        json.dumps({"do_normalize": False, "image_mean": [0.5] * 3})
    )
    plain: Any = load_image_classifier(f"image:{path}", (3, 16, 16), 2, Tuning("head"))
    assert plain.mean.flatten().tolist() == [0.0] * 3 and plain.std.flatten().tolist() == [1.0] * 3
    (path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": 0.25, "image_std": 0.5})
    )
    one: Any = load_image_classifier(f"image:{path}", (1, 16, 16), 2, Tuning("head"))
    assert one.mean.flatten().tolist() == [0.25] * 3
    assert one(torch.zeros(2, 1, 16, 16)).shape == (2, 2)


def test_a_grey_model_reads_coloured_images(tmp_path: Path) -> None:
    model = load_image_classifier(
        f"image:{save_tiny_vit(tmp_path / 'grey', num_channels=1)}", (3, 16, 16), 2, Tuning("head")
    )
    grey = torch.rand(2, 1, 16, 16)
    assert torch.allclose(model.embed(grey.expand(-1, 3, -1, -1)), model.embed(grey), atol=1e-6)


def test_a_saved_image_model_says_how_it_is_loaded(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "quietgrad.json").write_text(
        json.dumps({"base": "cnn:groupnorm", "tune": "full", "labels": ["a"]})
    )
    with pytest.raises(
        ValueError, match=r"holds an image model; give its model\.safetensors to model\.weights"
    ):
        load_saved(tmp_path)


def test_random_trials_agree_whatever_the_order_of_ranges() -> None:
    rate, norm = Range(RATE, 1e-3, 1.0, log=True), Range("privacy.max_grad_norm", 0.1, 10.0)
    bands = Range("noise.bands", 1, 20, variants=("b",))
    table = SearchTable(5, ranges=(bands, rate, norm))
    assert dict(propose(table, "a", [])).items() <= dict(propose(table, "b", [])).items()
    again = SearchTable(9, ranges=(bands, rate, norm))  # more trials go on from fewer
    narrower = SearchTable(5, ranges=(rate, replace(bands, high=10)))
    assert table.signature_of("a") == again.signature_of("a") != narrower.signature_of("a")
    assert table.signature_of("b") != narrower.signature_of("b")
    without = SearchTable(5, ranges=(rate, norm))  # what others search is nothing to a variant
    assert table.signature_of("a") == without.signature_of("a") != table.signature_of("b")
    shared = SearchTable(5, ranges=(replace(bands, variants=("b", "c")), rate, norm))
    assert table.signature_of("b") == shared.signature_of("b") == shared.signature_of("c")
    renamed = SearchTable(5, ranges=(rate, replace(norm, key="optimizer.momentum")))
    assert table.signature_of("a") != renamed.signature_of("a")


RECIPE = """
[comparison]
reference = "plain"
[variants.plain.noise]
method = "noisecurve"
spectrum = "s.npz"
[search]
trials = 2
[search.ranges."optimizer.learning_rate"]
low = 0.1
high = 1.0
{}
[model]
name = "cnn:groupnorm"
tune = "full"
[data]
public = true
[training]
expected_batch_size = 8
steps = 2
"""


@pytest.mark.parametrize(
    ("range_", "message"),
    [
        ('[search.ranges."noise.clamp"]\nlow = 1.0\nhigh = 5.0', "noise.clamp=5.0 must be in"),
        (
            '[search.ranges."denoising.method"]\nchoices = ["none", "papr"]',
            "denoising.method='papr'",
        ),
        (
            '[search.ranges."noise.bands"]\nlow = 1\nhigh = 4.5',
            "noise.bands=4.5 must be a whole number",
        ),
        ('[search.ranges."noise.bands"]\nchoices = "none"', "choices='none' must be a list"),
        ('[search.ranges."noise.floor"]\nlow = 0.0\nhigh = inf', "low < high"),
        ('variants = ["plain"]', "every variant needs a rate of its own"),
    ],
)
def test_what_no_run_could_take_is_refused_before_the_first(
    tmp_path: Path, range_: str, message: str
) -> None:
    path = tmp_path / "compare.toml"
    path.write_text(RECIPE.format(range_))
    with pytest.raises(ValueError, match=message):
        load_comparison(path)


def test_the_head_has_one_rate(tmp_path: Path) -> None:
    text = RECIPE.format('[search.ranges."optimizer.head_learning_rate"]\nlow = 0.1\nhigh = 1.0')
    path = tmp_path / "compare.toml"
    path.write_text(text.replace('reference = "plain"', 'reference = "plain"\nhead_rate = 2.0'))
    with pytest.raises(ValueError, match="both set the head's rate"):
        load_comparison(path)


def test_a_private_picture_does_not_change_how_the_others_are_read(tmp_path: Path) -> None:
    write_class_folders(tmp_path, train=6, test=2, coloured=True)
    before, _ = load_image_folder(str(tmp_path), FolderLayout(), 8)
    write_picture(
        tmp_path / "train" / "across" / "aaa.png", np.zeros((8, 8), dtype=np.uint8)
    )  # grey, and the first
    after, _ = load_image_folder(str(tmp_path), FolderLayout(), 8)
    assert after.pixels.shape[1] == 3 and set(before.record_ids) < set(after.record_ids)


def test_private_pictures_among_the_public_are_found_whatever_else_lies_there(
    tmp_path: Path,
) -> None:
    private, public = tmp_path / "private", tmp_path / "public"
    write_class_folders(private, train=30, test=4)
    write_class_folders(public, train=30, test=4, coloured=True)
    shared = sorted((public / "train").rglob("*.png"))
    for i, file in enumerate(shared[5:9]):  # coloured files among grey ones
        (private / "train" / "down" / f"zz{i}.png").write_bytes(file.read_bytes())
    values = {
        "model.name": "cnn:groupnorm", "model.tune": "full", "data.source": str(private),
        "data.image_size": 8,
        "spectrum.public": str(public), "spectrum.output": str(tmp_path / "s.npz"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="public images are among the private training records"):
        make_spectrum(config_of(values), lambda line: None)


def test_a_spectrum_of_images_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    write_findings(folder)
    write_findings(tmp_path / "public", train=30, test=4, seed=7)
    values = findings(folder, tmp_path)
    make_spectrum(config_of(values), lambda line: None)
    used = values | {
        "noise.method": "noisecurve",
        "noise.spectrum": values["spectrum.output"],
        "noise.bands": 2,
    }
    prepare(config_of(used))
    with pytest.raises(
        ValueError, match=r"images of the form \[1, 8, 8\], the private ones have \[1, 12, 12\]"
    ):
        prepare(config_of(used | {"data.image_size": 12}))


def test_without_a_class_token_the_embedding_is_the_mean(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2
    )
    transformers.SwinModel(config).save_pretrained(tmp_path / "swin")
    model = load_image_classifier(
        f"image:{tmp_path / 'swin'}", (3, 16, 16), 2, Tuning("head")
    ).eval()
    pixels = torch.rand(1, 3, 16, 16)
    corner = pixels.clone()
    corner[..., 8:, 8:] = 0
    assert not torch.allclose(model.embed(pixels), model.embed(corner), atol=1e-4)
