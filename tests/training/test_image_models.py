"""Image classifiers: our own, random features, tiny Hugging Face models; what of them trains, what
they read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_images import save_tiny_resnet, save_tiny_vit, stripes, write_class_folders
from tiny_runs import config_of, train
from torch import Tensor, nn

from quietgrad.clipping.soundness.refusals import refuse_cross_example_layers
from quietgrad.clipping.verify import verify_clipping
from quietgrad.tensors import trainable_parameters
from quietgrad.training.files.provenance import provenance
from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.images.data import LabelledImages
from quietgrad.training.tasks.images.feature_cache import (
    BLOCK_IMAGES,
    build_feature_cache,
    embeddings,
)
from quietgrad.training.tasks.images.models import (
    FEATURES,
    PretrainedImageClassifier,
    RandomFeatures,
    is_image_model,
    load_image_classifier,
)
from quietgrad.training.tasks.loaded import LoadedModel, Tuning, save_weights
from quietgrad.training.tasks.records import classification_loss, logits_of

CPU = torch.device("cpu")
MADE_UP = provenance("made up", None, data_are_public=True)
OWN = ("cnn:groupnorm", "vgg:groupnorm", "features:random")
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved with its preprocessing, as models on the hub are."""
    folder = save_tiny_vit(tmp_path_factory.mktemp("vit"))
    stated = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(stated | {"image_mean": MEAN, "image_std": STD})
    )
    return folder


@pytest.fixture(scope="session")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_resnet(tmp_path_factory.mktemp("resnet"))


@pytest.fixture
def model_of(vit: Path, resnet: Path) -> Any:
    """Builds "vit", "resnet" or one of our own models for images of a shape, with three labels."""

    def build(
        name: str, tune: Any, shape: tuple[int, ...] = (1, 8, 8), weights: str = "", **changes: Any
    ) -> Any:
        torch.manual_seed(0)
        folders = {"vit": f"image:{vit}", "resnet": f"image:{resnet}"}
        return load_image_classifier(
            folders.get(name, name), shape, 3, Tuning(tune, **({"lora_rank": 2} | changes)), weights
        )

    return build


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Pixels in -1 .. 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def off_zero(model: nn.Module) -> nn.Module:
    """Heads and adapters start at zero, where most gradients vanish."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in trainable_parameters(model).items():
            if name.startswith("head.") or "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


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


# ------------------------------------------------------------------------------------------------
# what they read


def images_of(pixels: np.ndarray) -> LabelledImages:
    """[n, channels, height, width] bytes."""
    return LabelledImages(
        torch.from_numpy(pixels), np.arange(len(pixels)) % 3, ("a", "b", "c"), "made"
    )


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


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class_folders(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def values(pictures: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.lora_rank": 2,
        "data.public": True,
        "data.source": str(pictures),
        "data.image_size": 8,
        "data.validation_fraction": 0.2,
        "privacy.target_epsilon": 8.0,
        "optimizer.learning_rate": 0.1,
        "training.expected_batch_size": 24,
        "training.steps": 3,
        "training.precision": "float32",
        "training.run_dir": str(tmp_path / "run"),
    }


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


# ------------------------------------------------------------------------------------------------
# clipping, weights


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
