"""Image classifiers: our own, tiny Hugging Face models; what of them trains, what they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_model_cases import CPU, MEAN, OWN, STD, images_of, noise, off_zero
from tiny_images import save_tiny_vit
from tiny_runs import config_of
from torch import Tensor, nn

from quietgrad.clipping.soundness.refusals import refuse_cross_example_layers
from quietgrad.clipping.verify import verify_clipping
from quietgrad.tensors import trainable_parameters
from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.images.models import (
    PretrainedImageClassifier,
    is_image_model,
    load_image_classifier,
)
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.records import classification_loss


@pytest.mark.grid(8, "models times sizes times colours")
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 12), (1, 28, 20)], ids=str)
@pytest.mark.parametrize(
    ("name", "tune"),
    [
        ("cnn:groupnorm", "full"),
        ("cnn:groupnorm", "head"),
        ("vgg:groupnorm", "full"),
        ("vgg:groupnorm", "head"),
        ("features:random", "head"),
        ("vit", "full"),
        ("vit", "head"),
        ("vit", "lora"),
        ("resnet", "full"),
        ("resnet", "head"),
    ],
)
def test_grey_and_coloured_images_of_any_size_get_logits(
    model_of: Any, name: str, tune: str, shape: tuple[int, ...]
) -> None:
    model = off_zero(model_of(name, tune, shape)).eval()
    pixels = noise(5, *shape)
    with torch.no_grad():
        logits = model(pixels)
        assert logits.shape == (5, 3) and model.embed(pixels).shape == (5, model.width)
        # Examples do not see each other, and are not all alike.
        torch.testing.assert_close(model(pixels[2:3]), logits[2:3], rtol=1e-4, atol=1e-5)
        assert (logits[0] - logits[1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("name", "tune", "message"),
    [
        (
            "cnn:groupnorm",
            "lora",
            "model.tune='lora' does not fit 'cnn:groupnorm'; use 'full' or 'head'",
        ),
        (
            "vgg:groupnorm",
            "lora",
            "model.tune='lora' does not fit 'vgg:groupnorm'; use 'full' or 'head'",
        ),
        ("features:random", "full", "model.tune='full' does not fit 'features:random'; use 'head'"),
        ("features:random", "lora", "use 'head'"),
        ("vit", "half", "model.tune='half' does not fit .*; use 'full' or 'head' or 'lora'"),
        ("resnet", "lora", "has no layers query and value; name its layers in model.lora_targets"),
        ("vgg:gropnorm", "full", "is no image model; .* did you mean 'vgg:groupnorm'"),
        ("image:/nowhere/at-all", "full", "model.name='image:/nowhere/at-all' cannot be loaded"),
    ],
)
def test_models_and_what_trains_of_them_are_refused(
    model_of: Any, name: str, tune: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(name, tune)


def test_adapters_need_layers_that_are_there(model_of: Any) -> None:
    with pytest.raises(ValueError, match=r"model.lora_targets=\['zzz'\] does not fit"):
        model_of("vit", "lora", lora_targets=["zzz"])
    adapted = trainable_parameters(model_of("vit", "lora", lora_targets=["projection"]))
    assert len(adapted) == 2 + 2
    assert all(
        ".patch_embeddings.projection.lora_" in name
        for name in adapted
        if not name.startswith("head.")
    )


def test_a_text_model_reads_no_images(tiny_bert: Path) -> None:
    with pytest.raises(
        ValueError, match=r"does not read images \(pixel_values\); use a vision model"
    ):
        load_image_classifier(f"image:{tiny_bert}", (1, 8, 8), 2, Tuning("head"))


def test_names_of_image_models() -> None:
    assert all(is_image_model(name) for name in (*OWN, "image:google/vit-base-patch16-224-in21k"))
    assert not any(
        is_image_model(name)
        for name in ("packaged:minilm", "vgg", "google/vit-base-patch16-224-in21k")
    )


@pytest.mark.parametrize("name", [*OWN, "vit", "resnet"])
def test_with_tune_head_the_head_alone_trains(model_of: Any, name: str) -> None:
    assert set(trainable_parameters(model_of(name, "head"))) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["cnn:groupnorm", "vgg:groupnorm", "vit", "resnet"])
def test_with_tune_full_everything_trains(model_of: Any, name: str) -> None:
    model = model_of(name, "full")
    assert set(trainable_parameters(model)) == {n for n, _ in model.named_parameters()}


def test_with_tune_lora_adapters_of_query_and_value_train_and_start_at_nothing(
    model_of: Any,
) -> None:
    model, plain = model_of("vit", "lora"), model_of("vit", "full")
    trainable = trainable_parameters(model)
    adapters = [n for n in trainable if not n.startswith("head.")]
    # transformers has renamed them.
    assert all(
        "lora_" in n and any(f".{w}." in n for w in ("query", "value", "q_proj", "v_proj"))
        for n in adapters
    )
    assert sum(trainable[n].numel() for n in adapters) == 2 * 2 * 2 * (
        16 + 16
    )  # layers, targets, rank, widths
    pixels = noise(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.embed(pixels), plain.embed(pixels))
        assert (off_zero(model).embed(pixels) - plain.embed(pixels)).abs().max() > 1e-3


def test_pretrained_models_and_features_start_with_a_head_of_zeros(model_of: Any) -> None:
    for name in ("vit", "resnet", "features:random"):
        assert not model_of(name, "head")(noise(2, 1, 8, 8)).any()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_stated_normalisation_is_that_of_the_models_own_training(
    model_of: Any, vit: Path, channels: int
) -> None:
    import transformers

    images = images_of(
        np.random.default_rng(0).integers(0, 256, (4, channels, 16, 16), dtype=np.uint8)
    )
    model = model_of("vit", "head", (channels, 16, 16)).eval()
    shares = images.pixels.float().expand(-1, 3, -1, -1) / 255
    normalised = (shares - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    own = transformers.AutoModel.from_pretrained(vit, add_pooling_layer=False).eval()
    with torch.no_grad():
        found = model.embed(images.collate(np.arange(4), CPU)["pixels"])
        torch.testing.assert_close(
            found, own(pixel_values=normalised).last_hidden_state[:, 0], rtol=1e-4, atol=1e-5
        )
        wrong = own(pixel_values=shares * 2 - 1).last_hidden_state[:, 0]
    assert (found - wrong).abs().max() > 1e-2


def test_a_convolutional_network_is_averaged_over_positions(model_of: Any, resnet: Path) -> None:
    import transformers

    pixels = noise(
        4, 1, 20, 20
    )  # without a stated size, images stay as they are; without a normalisation, in -1 .. 1
    own = transformers.AutoModel.from_pretrained(resnet).eval()
    with torch.no_grad():
        pooled = own(pixel_values=pixels.expand(-1, 3, -1, -1)).pooler_output.flatten(1)
        torch.testing.assert_close(
            model_of("resnet", "head").eval().embed(pixels), pooled, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("stated", "size"),
    [
        ({"size": 24}, 24),
        ({"size": {"height": 20, "width": 20}}, 20),
        ({"size": {"shortest_edge": 28}}, 28),
        ({"size": {"shortest_edge": 28}, "crop_size": {"height": 24, "width": 24}}, 24),
        ({"size": 28, "crop_size": 24}, 24),
        ({}, 16),  # the configuration's
        (None, 16),
    ],
    ids=str,
)
def test_the_stated_size_is_the_models(tmp_path: Path, stated: dict | None, size: int) -> None:
    folder = save_tiny_vit(tmp_path)
    if stated is not None:
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "X"} | stated)
        )
    model = load_image_classifier(f"image:{folder}", (1, 8, 8), 3, Tuning("head"))
    assert isinstance(model, PretrainedImageClassifier) and model.size == size
    for half in (model.mean, model.std):
        assert torch.equal(half.flatten(), torch.full((3,), 0.5))


def test_images_are_brought_to_the_models_size(model_of: Any) -> None:
    model = model_of("vit", "head").eval()
    small = noise(3, 1, 8, 8)
    large = small.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    with torch.no_grad():
        # Even areas stay even at any size.
        even = [model.embed(torch.full((1, 1, side, side), 0.3)) for side in (5, 16, 40)]
        torch.testing.assert_close(even[0], even[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(even[2], even[1], rtol=1e-4, atol=1e-5)
        # Averaged down, not sampled: a pattern finer than the model's pixels becomes its mean.
        fine = large + 0.4 * torch.tensor([-1.0, 1.0, 1.0, -1.0]).repeat(16)
        torch.testing.assert_close(model.embed(fine), model.embed(large), rtol=1e-2, atol=1e-2)
        sampled = F.interpolate(fine, (16, 16), mode="bilinear", align_corners=False)
        assert (model.embed(sampled) - model.embed(large)).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------
# frozen bodies


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.clone()
        for name, value in model.named_buffers()
        if "running" in name or "tracked" in name
    }


def test_a_frozen_body_stays_in_evaluation_mode(model_of: Any) -> None:
    model = model_of("resnet", "head").train()
    assert (
        model.training
        and model.head.training
        and not any(m.training for m in model.backbone.modules())
    )
    before = statistics(model)
    assert before and any(value.any() for value in before.values())
    pixels = noise(6, 1, 8, 8)
    logits = off_zero(model)(pixels)
    logits.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    torch.testing.assert_close(model(pixels[:1]), logits[:1], rtol=1e-4, atol=1e-5)
    refuse_cross_example_layers(model)

    # A body that trains would take the statistics of private images.
    open_ = model_of("resnet", "full").train()
    open_(pixels)
    assert any(not torch.equal(value, before[name]) for name, value in statistics(open_).items())
    assert not any(m.training for m in model.eval().modules())


@pytest.mark.parametrize("name", ["cnn:groupnorm", "vgg:groupnorm"])
def test_modes_of_a_body_that_trains_follow_the_model(model_of: Any, name: str) -> None:
    model = model_of(name, "full")
    assert all(m.training for m in model.train().modules()) and not any(
        m.training for m in model.eval().modules()
    )


def test_batch_norm_is_refused_where_it_would_train(values: dict[str, Any], resnet: Path) -> None:
    values |= {"model.name": f"image:{resnet}", "privacy.noise_multiplier": 1.0}
    del values["privacy.target_epsilon"]
    with pytest.raises(ValueError, match=r"BatchNorm2d\) mixes the examples of a batch"):
        prepare(config_of(values | {"model.tune": "full"}))
    with pytest.raises(ValueError, match=r"BatchNorm2d\) mixes the examples of a batch"):
        prepare(config_of(values | {"model.tune": "lora", "model.lora_targets": ["convolution"]}))
    prepared = prepare(config_of(values | {"model.tune": "head"}))
    assert not any(
        isinstance(m, nn.BatchNorm2d) and m.training for m in prepared.model.classifier.modules()
    )


# ------------------------------------------------------------------------------------------------
# clipping, weights


@pytest.mark.grid(4, "models times what trains of them")
@pytest.mark.parametrize(
    ("name", "tune"),
    [
        ("vgg:groupnorm", "full"),
        ("vit", "lora"),
        ("vit", "full"),
        ("vit", "head"),
        ("resnet", "head"),
    ],
)
@pytest.mark.parametrize("several", [False, True], ids=["one label", "several labels"])
def test_clipping_agrees_with_the_oracle(
    model_of: Any, name: str, tune: str, several: bool
) -> None:
    model = off_zero(model_of(name, tune))
    labels = (
        torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]]).float()
        if several
        else torch.tensor([0, 2, 1])
    )
    assert (
        verify_clipping(model, classification_loss, {"pixels": noise(3, 1, 8, 8), "labels": labels})
        < 1e-4
    )
