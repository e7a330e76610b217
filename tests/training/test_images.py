"""Images of known data sets: read in both forms of the files, split, digits from a wheel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from idx_images import SIZE, TEST, TRAIN, write_idx

from quietgrad.training.tasks.images.data import load_images, split_images


def test_both_forms_of_the_files_read_alike_and_splits_hold_each_record_once(
    tmp_path: Path, images: Path
) -> None:
    plain = write_idx(tmp_path / "plain", compressed=False)
    (one, test), (two, _) = load_images(str(images)), load_images(str(plain))
    assert torch.equal(one.pixels, two.pixels) and np.array_equal(one.labels, two.labels)
    assert one.pixels.shape == (TRAIN, 1, SIZE, SIZE) and len(test) == TEST
    splits, public = split_images(one, test, 0.2, 0.2)
    ids = [set(part.record_ids) for part in (splits.train, splits.validation, public, splits.test)]
    assert sum(map(len, ids)) == len(set().union(*ids)) == TRAIN + TEST
    smaller = one.resized(4)
    assert smaller.pixels.shape[-2:] == (4, 4) and smaller.pixels.dtype == torch.uint8
    # A record's side does not depend on which others there are.
    half, _ = split_images(one.subset(np.arange(100)), test, 0.2, 0.2)
    assert set(half.train.record_ids) <= ids[0]


def test_digits_come_from_the_wheel_or_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata as metadata

    rng = np.random.default_rng(0)
    table = np.hstack([rng.integers(0, 17, (20, 64)), np.arange(20)[:, None] % 10])
    np.savetxt(tmp_path / "digits.csv.gz", table, delimiter=",", fmt="%d")

    class Held:
        name = "digits.csv.gz"

        def locate(self) -> Path:
            return tmp_path / self.name

    monkeypatch.setattr(
        metadata, "files", lambda package: [Held()] if package == "scikit-learn" else []
    )
    train_part, test = load_images("packaged:digits", 14)
    assert train_part.pixels.shape == (16, 1, 14, 14) and len(test) == 4
    whole, _ = load_images("packaged:digits")
    assert np.array_equal(
        whole.pixels[0, 0].numpy().ravel(), np.round(table[1, :64] * 255 / 16).astype(np.uint8)
    )
    assert whole.labels[0] == table[1, 64]
    monkeypatch.setattr(metadata, "files", lambda package: None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        load_images("packaged:digits")


def test_a_training_image_that_is_in_the_test_set_is_left_out(images: Path) -> None:
    train_part, _ = load_images(str(images))
    splits, public = split_images(train_part, train_part.subset(np.arange(10)), 0.2, 0.2)
    kept = set(splits.train.record_ids) | set(splits.validation.record_ids) | set(public.record_ids)
    assert not kept & set(train_part.subset(np.arange(10)).record_ids)
