"""Image classifiers, each a body that embeds and a linear head: NoiseCurve's small CNN and VGG
(appendix D.1 of the paper, see docs/noisecurve.md), random features, Hugging Face's models, and
those of torchvision (``vision``).

With tune = "head" the body is frozen, stays in evaluation mode (so BatchNorm does no harm), and the
loss is convex.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.checks import nearest
from quietgrad.training.sources.hub import HUGGING_FACE, TORCHVISION
from quietgrad.training.tasks.images.classifier import ImageClassifier, as_pretrained
from quietgrad.training.tasks.images.vision import VisionClassifier, load_vision
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.text.models import quiet_loading

SMALL_CNN = "cnn:groupnorm"
VGG = "vgg:groupnorm"
RANDOM_FEATURES = "features:random"
IMAGE_MODELS = (SMALL_CNN, VGG, RANDOM_FEATURES)
GROUPS = 8
FEATURES = 2048
FEATURE_SEED = 20  # of the random features: public, and the same in every run


class SmallCnn(ImageClassifier):
    """Three convolutions with GroupNorm and ReLU (16, 32, 64 channels, strides 1, 2, 2), average
    pooling to 2 x 2, a hidden layer, a linear head.
    """

    def __init__(self, channels: int, num_labels: int, hidden: int = 24) -> None:
        super().__init__(hidden, num_labels)
        widths, strides = (channels, 16, 32, 64), (1, 2, 2)
        layers: list[nn.Module] = []
        for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True):
            layers += [
                nn.Conv2d(before, after, 3, stride, padding=1),
                nn.GroupNorm(GROUPS, after),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.hidden = nn.Linear(4 * widths[-1], hidden)

    def body(self) -> list[nn.Module]:
        return [self.features, self.hidden]

    def embed(self, pixels: Tensor) -> Tensor:
        return F.relu(self.hidden(self.features(pixels)))


class Vgg(ImageClassifier):
    """Four stages of one or two 3 x 3 convolutions with GroupNorm, each halved by max-pooling,
    average pooling, a linear head: 1.1 million parameters, smaller than a standard VGG.
    """

    STAGES = ((32, 32), (64, 64), (128, 128), (256, 256))

    def __init__(self, channels: int, num_labels: int) -> None:
        super().__init__(self.STAGES[-1][-1], num_labels)
        layers: list[nn.Module] = []
        before = channels
        for stage in self.STAGES:
            for after in stage:
                layers += [
                    nn.Conv2d(before, after, 3, padding=1),
                    nn.GroupNorm(16, after),
                    nn.ReLU(),
                ]
                before = after
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def body(self) -> list[nn.Module]:
        return [self.features]

    def embed(self, pixels: Tensor) -> Tensor:
        return self.features(pixels)


class RandomFeatures(ImageClassifier):
    """Random Fourier features (Rahimi and Recht 2007) of the image brought to zero mean and unit
    length: a convex problem without any pretraining.

    sqrt(2 / width) cos(A x + b), A of variance 4: inner products of features stand for the kernel
    exp(-2 |x - y|^2). Matrix and phases do not depend on any data.
    """

    def __init__(self, shape: tuple[int, ...], num_labels: int, width: int = FEATURES) -> None:
        super().__init__(width, num_labels)
        inputs = int(torch.Size(shape).numel())
        self.project = nn.Linear(inputs, width)
        generator = torch.Generator().manual_seed(FEATURE_SEED)
        with torch.no_grad():
            self.project.weight.copy_(2 * torch.randn(width, inputs, generator=generator))
            self.project.bias.copy_(2 * math.pi * torch.rand(width, generator=generator))
        self.project.requires_grad_(False)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def body(self) -> list[nn.Module]:
        return [self.project]

    def embed(self, pixels: Tensor) -> Tensor:
        x = pixels.flatten(1)
        x = F.normalize(x - x.mean(dim=1, keepdim=True), dim=1)
        return math.sqrt(2 / self.width) * torch.cos(self.project(x))


class PretrainedImageClassifier(ImageClassifier):
    """A Hugging Face vision model under a linear head.

    The embedding is a transformer's class token, and the mean over positions where there is none.
    Images are brought to the size and the normalisation that the model was trained with, grey ones
    to three channels, as part of the forward pass: a batch costs memory at that size, the data set
    does not.
    """

    def __init__(
        self, backbone: nn.Module, width: int, num_labels: int, settings: dict[str, Any]
    ) -> None:
        super().__init__(width, num_labels)
        self.backbone = backbone
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.has_class_token = any(
            n.rpartition(".")[2] == "cls_token" for n, _ in backbone.named_parameters()
        )
        self.size = int(settings["size"])
        for name in ("mean", "std"):
            self.register_buffer(
                name, torch.tensor(settings[name]).view(1, -1, 1, 1), persistent=False
            )

    def body(self) -> list[nn.Module]:
        return [self.backbone]

    def embed(self, pixels: Tensor) -> Tensor:
        mean, std = cast(Tensor, self.mean), cast(Tensor, self.std)
        brought = as_pretrained(pixels, self.size, mean, std)
        states = self.backbone(pixel_values=brought).last_hidden_state
        if states.dim() == 4:
            return states.mean(dim=(2, 3))
        return states[:, 0] if self.has_class_token else states.mean(dim=1)


def is_image_model(name: str) -> bool:
    """Whether ``load_image_classifier`` loads it."""
    return name in IMAGE_MODELS or name.startswith((HUGGING_FACE, TORCHVISION))


def load_image_classifier(
    name: str,
    shape: tuple[int, ...],
    num_labels: int,
    tuning: Tuning,
    weights: str = "",
) -> ImageClassifier:
    """Builds a classifier, and fills it with public weights where a file is given.

    Args:
        name: one of ``IMAGE_MODELS``, or ``image:`` and a folder or Hugging Face name, such as
            ``image:google/vit-base-patch16-224-in21k`` or ``image:microsoft/resnet-152``; or
            ``torchvision:`` and a classifier of torchvision, such as ``torchvision:vit_b_16``.
        shape: of one image, [channels, height, width].
        num_labels: of the data.
        tuning: what trains; "head" makes a convex problem, "lora" is for Hugging Face transformers
            (no ``lora_targets``: query and value).
        weights: safetensors file, such as ``quietgrad spectrum`` writes ("": random, or the
            pretrained ones); of a torchvision model also a state dict of torchvision's own.

    Raises:
        ValueError: unknown name or tuning, or weights of another model.
    """
    if not is_image_model(name):
        raise ValueError(
            f"model.name={name!r} is no image model; use one of {', '.join(IMAGE_MODELS)}, or "
            f"image:NAME of Hugging Face, torchvision:NAME{nearest(name, IMAGE_MODELS)}"
        )
    fitting = _fitting_tunes(name)
    if tuning.how not in fitting:
        raise ValueError(
            f"model.tune={tuning.how!r} does not fit {name!r}; use "
            f"{' or '.join(map(repr, fitting))}"
        )
    model = _built(name, shape, num_labels, tuning, weights)
    if tuning.how == "lora":
        _add_lora(cast(PretrainedImageClassifier, model), name, tuning)
    if weights:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not Path(weights).is_file():
            raise ValueError(
                f"model.weights={weights!r}: no such file; make one with quietgrad spectrum"
            )
        try:
            state = load_file(weights)
            model.load_state_dict(
                model.own_state(state) if isinstance(model, VisionClassifier) else state
            )
        except RuntimeError as error:
            raise ValueError(f"model.weights={weights!r} are of another model: {error}") from error
        except SafetensorError as error:
            raise ValueError(
                f"model.weights={weights!r} is not a safetensors file: {error}"
            ) from error
    if tuning.how == "head":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    return model.train() if model.training else model


def _fitting_tunes(name: str) -> tuple[str, ...]:
    if name == RANDOM_FEATURES:
        return ("head",)
    return ("full", "head", "lora") if name.startswith(HUGGING_FACE) else ("full", "head")


def _built(
    name: str, shape: tuple[int, ...], num_labels: int, tuning: Tuning, weights: str
) -> ImageClassifier:
    if name == SMALL_CNN:
        return SmallCnn(shape[0], num_labels)
    if name == VGG:
        return Vgg(shape[0], num_labels)
    if name == RANDOM_FEATURES:
        return RandomFeatures(shape, num_labels)
    if name.startswith(TORCHVISION):
        return load_vision(name, num_labels, pretrained=not weights, whole=tuning.how == "full")
    return _pretrained(name, num_labels)


def _pretrained(name: str, num_labels: int) -> PretrainedImageClassifier:
    import transformers

    path = name.removeprefix(HUGGING_FACE)
    with quiet_loading(name):
        try:
            backbone = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False)
        except TypeError:
            backbone = transformers.AutoModel.from_pretrained(path)
    config = backbone.config
    width = (
        getattr(config, "hidden_size", None)
        or (getattr(config, "hidden_sizes", None) or [None])[-1]
    )
    if getattr(backbone, "main_input_name", "") != "pixel_values" or width is None:
        raise ValueError(
            f"model.name={name!r} does not read images (pixel_values); use a vision model"
        )
    return PretrainedImageClassifier(backbone, int(width), num_labels, _preprocessing(path, config))


def _preprocessing(path: str, config: Any) -> dict[str, Any]:
    """Size and normalisation that the model's own preprocessing file states; without one, the
    configuration's size and a range of -1 .. 1.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    channels = int(getattr(config, "num_channels", 3))
    stated: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # a model saved without its preprocessing
        stated = ImageProcessingMixin.get_image_processor_dict(path)[0]
    size = stated.get("crop_size") or stated.get("size") or getattr(config, "image_size", 0)
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or 0
    plain = stated.get("do_normalize") is False  # then pixels are between 0 and 1

    def each(name: str, otherwise: float) -> list[float]:
        value = otherwise if plain else stated.get(name, 0.5)
        return [float(v) for v in value] if isinstance(value, list) else [float(value)] * channels

    return {"size": size or 0, "mean": each("image_mean", 0.0), "std": each("image_std", 1.0)}


def _add_lora(model: PretrainedImageClassifier, name: str, tuning: Tuning) -> None:
    import peft

    wanted = list(tuning.lora_targets) or [
        found
        for names in (("query", "value"), ("q_proj", "v_proj"))
        for found in names
        if any(n.rpartition(".")[2] == found for n, _ in model.backbone.named_modules())
    ]
    if not wanted:
        raise ValueError(
            f"model.tune='lora': {name!r} has no layers query and value; name its layers in "
            "model.lora_targets"
        )
    try:
        adapted = peft.get_peft_model(
            cast(Any, model.backbone),
            peft.LoraConfig(
                r=tuning.lora_rank,
                lora_alpha=tuning.lora_alpha or 2 * tuning.lora_rank,
                lora_dropout=0.0,
                target_modules=wanted,
            ),
        )
    except ValueError as error:
        raise ValueError(
            f"model.lora_targets={wanted!r} does not fit {name!r}: {str(error).splitlines()[0]}"
        ) from error
    model.backbone = adapted
