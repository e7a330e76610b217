"""What is computed once of an image model and kept: cached features of a frozen body, random
features, and weights that are read back.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_model_cases import CPU, MADE_UP, OWN, images_of, noise, off_zero
from tiny_images import stripes
from tiny_runs import train
from torch import Tensor, nn

from quietgrad.tensors import trainable_parameters
from quietgrad.training.tasks.images.data import LabelledImages
from quietgrad.training.tasks.images.feature_cache import (
    BLOCK_IMAGES,
    build_feature_cache,
    embeddings,
)
from quietgrad.training.tasks.images.models import (
    FEATURES,
    RandomFeatures,
    load_image_classifier,
)
from quietgrad.training.tasks.loaded import LoadedModel, Tuning, save_weights
from quietgrad.training.tasks.records import logits_of

# ------------------------------------------------------------------------------------------------
# the feature cache


@pytest.mark.parametrize("name", [*OWN, "vit", "resnet"])
def test_the_cache_gives_the_logits_of_the_whole_model(model_of: Any, name: str) -> None:
    count = BLOCK_IMAGES + 20  # more than one block
    images = images_of(stripes(np.arange(count) % 4, 0)[:, None])
    model = off_zero(model_of(name, "head"))
    cache = build_feature_cache(model, images, CPU)
    assert cache is not None and cache.features.shape == (count, model.width) and model.training
    chosen = np.array([7, BLOCK_IMAGES + 19, 0, BLOCK_IMAGES, BLOCK_IMAGES - 1])
    batch, whole = cache.collate(chosen, CPU), images.collate(chosen, CPU)
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(cache.upper, batch), logits_of(model, whole), rtol=0, atol=1e-6
        )
    assert (
        torch.equal(batch["labels"], whole["labels"])
        and batch["labels"].dtype == whole["labels"].dtype
    )
    assert cache.upper.head is model.head  # what trains is the model's own


def test_the_cache_keeps_several_labels(model_of: Any) -> None:
    labels = np.eye(3, dtype=np.float32)[np.arange(10) % 3]
    images = LabelledImages(
        images_of(stripes(np.arange(10) % 4, 0)[:, None]).pixels, labels, ("a", "b", "c"), "made"
    )
    cache = build_feature_cache(model_of("features:random", "head"), images, CPU)
    assert cache is not None
    found = cache.collate(np.array([4, 2]), CPU)["labels"]
    assert found.dtype == torch.float32 and found.tolist() == labels[[4, 2]].tolist()


@pytest.mark.parametrize(
    ("name", "tune"),
    [("cnn:groupnorm", "full"), ("vgg:groupnorm", "full"), ("vit", "full"), ("vit", "lora")],
)
def test_where_the_body_trains_nothing_is_cached(model_of: Any, name: str, tune: str) -> None:
    assert (
        build_feature_cache(
            model_of(name, tune), images_of(stripes(np.zeros(4, int), 0)[:, None]), CPU
        )
        is None
    )


def test_only_image_classifiers_are_cached() -> None:
    assert (
        build_feature_cache(nn.Linear(2, 2), images_of(stripes(np.zeros(4, int), 0)[:, None]), CPU)
        is None
    )


def test_embedding_puts_the_mode_back_and_leaves_no_gradients(model_of: Any) -> None:
    images = images_of(stripes(np.arange(6) % 4, 0)[:, None])
    for training in (True, False):
        model = model_of("cnn:groupnorm", "full").train(training)
        found = embeddings(model, images, CPU)
        assert model.training == training and not found.requires_grad
        assert all(p.grad is None for p in model.parameters())


def test_a_run_on_cached_features_is_the_run_on_images(values: dict[str, Any], vit: Path) -> None:
    values |= {"model.name": f"image:{vit}", "model.tune": "head", "training.seed": 3}
    heads = []
    for cached in (True, False):
        changes = {
            "training.cache_frozen_layers": cached,
            "training.run_dir": values["training.run_dir"] + str(cached),
        }
        prepared, _, _ = train(values | changes)
        assert (prepared.prefix_cache() is not None) == cached
        heads.append(prepared.model.classifier.head.weight.detach().clone())
    assert heads[0].abs().max() > 1e-3
    torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------
# random features


def test_random_features_are_the_same_in_every_process() -> None:
    torch.manual_seed(5)
    one = RandomFeatures((1, 8, 8), 3).project
    torch.manual_seed(6)
    two = RandomFeatures((1, 8, 8), 7).project
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)
    code = (
        "import torch; from quietgrad.training.tasks.images.models import RandomFeatures; "
        "p = RandomFeatures((1, 8, 8), 3).project; print(p.weight.double().sum().item(), "
        "p.bias.double().sum().item())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == [str(x.double().sum().item()) for x in (one.weight, one.bias)]


def centred(pixels: Tensor) -> Tensor:
    x = pixels.flatten(1)
    return F.normalize(x - x.mean(1, keepdim=True), dim=1)


def test_random_features_stand_for_their_kernel() -> None:
    # Mixtures of two images, so that distances of all sizes are among the pairs.
    ends = noise(2, 1, 8, 8)
    share = torch.linspace(0, 1, 24)[:, None, None, None]
    pixels = torch.cat([share * ends[:1] + (1 - share) * ends[1:], noise(8, 1, 8, 8, seed=1)])
    features = RandomFeatures((1, 8, 8), 3).embed(pixels).double()
    assert features.shape == (32, FEATURES)
    x = centred(pixels).double()
    squares = torch.cdist(x, x) ** 2
    # 2 cos(a) cos(b) = cos(a - b) + cos(a + b): an inner product of features has a variance of at
    # most 1 / FEATURES.
    bound = 5 / FEATURES**0.5
    found = features @ features.T
    assert (found - torch.exp(-2 * squares)).abs().max() < bound
    for wrong in (0.5, 1.0, 4.0):
        assert (found - torch.exp(-wrong * squares)).abs().max() > bound


def test_random_features_see_neither_brightness_nor_contrast() -> None:
    model, pixels = RandomFeatures((3, 8, 8), 3), noise(4, 3, 8, 8)
    torch.testing.assert_close(
        model.embed(0.3 * pixels - 0.4), model.embed(pixels), rtol=0, atol=1e-5
    )
    assert (model.embed(-pixels) - model.embed(pixels)).abs().max() > 1e-3
    assert torch.isfinite(
        model.embed(torch.full((1, 3, 8, 8), 0.2))
    ).all()  # an image without contrast


@pytest.mark.parametrize(
    ("name", "tune"), [("vgg:groupnorm", "full"), ("vit", "lora"), ("features:random", "head")]
)
def test_weights_are_read_back_as_a_run_writes_them(
    model_of: Any, tmp_path: Path, name: str, tune: str
) -> None:
    model = off_zero(model_of(name, tune)).eval()
    save_weights(LoadedModel(model, None, name, tune, "mean"), ("a", "b", "c"), tmp_path, MADE_UP)  # type: ignore[arg-type]
    weights = str(tmp_path / "model.safetensors")
    torch.manual_seed(9)
    other = model_of(name, tune, weights=weights).eval()
    pixels = noise(3, 1, 8, 8, seed=2)
    with torch.no_grad():
        assert torch.equal(other(pixels), model(pixels))
        assert (model_of(name, tune).eval()(pixels) - model(pixels)).abs().max() > 1e-3
    assert set(trainable_parameters(other)) == set(trainable_parameters(model))
    changed = {"lora_rank": 4} if tune == "lora" else {}
    wrong = {"vgg:groupnorm": "cnn:groupnorm", "features:random": "vgg:groupnorm", "vit": "vit"}[
        name
    ]
    with pytest.raises(ValueError, match=r"model.weights='.*' are of another model"):
        model_of(wrong, "lora" if changed else "head", weights=weights, **changed)
    with pytest.raises(ValueError, match=r"model.weights='.*none.safetensors': no such file"):
        model_of(name, tune, weights=str(tmp_path / "none.safetensors"))


def test_weights_of_another_way_to_train_are_refused(model_of: Any, tmp_path: Path) -> None:
    save_weights(
        LoadedModel(model_of("vit", "full"), None, "", "full", "mean"), (), tmp_path, MADE_UP
    )
    weights = str(tmp_path / "model.safetensors")
    assert set(trainable_parameters(model_of("vit", "head", weights=weights))) == {
        "head.weight",
        "head.bias",
    }
    with pytest.raises(ValueError, match="are of another model"):  # no shape differs, only names
        model_of("vit", "lora", weights=weights)


def test_weights_of_other_channels_or_labels_are_refused(model_of: Any, tmp_path: Path) -> None:
    save_weights(
        LoadedModel(model_of("cnn:groupnorm", "full"), None, "", "full", "mean"),
        (),
        tmp_path,
        MADE_UP,
    )
    weights = str(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="are of another model"):
        model_of("cnn:groupnorm", "full", (3, 8, 8), weights=weights)
    with pytest.raises(ValueError, match="are of another model"):
        load_image_classifier("cnn:groupnorm", (1, 8, 8), 4, Tuning("full"), weights)
