"""torchvision's classifiers, and the form in which torchvision alone reads them back."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from quietgrad.checks import nearest
from quietgrad.training.sources.hub import TORCHVISION, require_model
from quietgrad.training.tasks.images.classifier import ImageClassifier, as_pretrained
from quietgrad.training.tasks.loaded import WEIGHTS_FILE

FOLDER = "torchvision"  # of what torchvision reads, in that of the model
LABELS_FILE = "labels.json"
WITHOUT_BATCH_NORM = "vit_*, convnext_*"
BODY, HEAD = "backbone.", "head."  # of names in this library's own state dict
AGREEMENT = 1e-4  # of logits, relative to the largest


class VisionClassifier(ImageClassifier):
    """A model of torchvision whose last layer is the linear head.

    Images are brought to the size and the normalisation of torchvision's own weights, as part of
    the forward pass.

    Attributes:
        backbone: torchvision's model, with nothing in the last layer's place.
        name: torchvision's.
        place: the last layer's name in it.
        arguments: what it was built with, beside the number of classes.
        size: pixels a side.
    """

    def __init__(
        self,
        backbone: nn.Module,
        name: str,
        num_labels: int,
        arguments: dict[str, int],
        stated: Any,
    ) -> None:
        place, last = _last_layer(backbone, name)
        super().__init__(last.in_features, num_labels)
        self.name, self.place, self.arguments = name, place, arguments
        backbone.set_submodule(place, nn.Identity())
        self.backbone = backbone
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.size = int(stated.crop_size[0])
        for key in ("mean", "std"):
            value = torch.tensor(getattr(stated, key)).view(1, -1, 1, 1)
            self.register_buffer(key, value, persistent=False)

    def body(self) -> list[nn.Module]:
        return [self.backbone]

    def embed(self, pixels: Tensor) -> Tensor:
        mean, std = cast(Tensor, self.mean), cast(Tensor, self.std)
        return self.backbone(as_pretrained(pixels, self.size, mean, std))

    def own_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict under this class's names; one of torchvision's is renamed, and its last
        layer, where it is for another number of labels, stays as it is here.
        """
        if any(name.startswith(BODY) for name in state):
            return state
        found = {}
        for name, value in state.items():
            if name.startswith(f"{self.place}."):
                own = HEAD + name.removeprefix(f"{self.place}.")
                fits = value.shape[:1] == (self.head.out_features,)
                found[own] = value if fits else self.state_dict()[own]
            else:
                found[BODY + name] = value
        return found

    def vision_state(self) -> dict[str, Tensor]:
        """A state dict under torchvision's names, in the machine's memory."""
        return {
            f"{self.place}.{name.removeprefix(HEAD)}"
            if name.startswith(HEAD)
            else name.removeprefix(BODY): value.detach().contiguous().cpu()
            for name, value in self.state_dict().items()
        }


def check_vision(name: str) -> None:
    """Refuses a name that torchvision does not know, before any data are read.

    Raises:
        ValueError: naming the nearest, or what keeps torchvision from being imported.
    """
    models, short = _models(name), name.removeprefix(TORCHVISION)
    known = models.list_models(module=models)
    if short not in known:
        raise ValueError(
            f"model.name={name!r}: torchvision has no such classifier{nearest(short, known)}"
        )


def load_vision(name: str, num_labels: int, pretrained: bool, whole: bool) -> VisionClassifier:
    """Builds a classifier.

    Args:
        name: ``torchvision:`` and the name of one of its classifiers.
        num_labels: of the data.
        pretrained: whether it begins with torchvision's default weights; else its body begins at
            random, for weights that are put in its place.
        whole: whether all of it is going to train.

    Raises:
        ValueError: without torchvision; for an unknown name; for weights that are not here and
            cannot be fetched; for a model that mixes records, or that has not one linear head.
    """
    require_model("model.name", name, "" if pretrained else "given")
    check_vision(name)
    models, short = _models(name), name.removeprefix(TORCHVISION)
    usual = models.get_model_weights(short).DEFAULT
    stated = usual.transforms()
    arguments = {"image_size": int(stated.crop_size[0])} if short.startswith("vit_") else {}
    if pretrained:
        built = _fetched(name, usual, arguments)
    else:
        built = _built(models, short, arguments)
    if whole and (mixing := _mixing(built)):
        raise ValueError(
            f"model.tune='full' does not fit {name!r}: its batch normalisation ({mixing!r}) mixes "
            f"the records of a batch; use 'head', or a model without it: {WITHOUT_BATCH_NORM}"
        )
    return VisionClassifier(built, short, num_labels, arguments, stated)


def _models(name: str) -> Any:
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"model.name={name!r} needs torchvision, in the build that goes with torch: {first}"
        ) from error
    return models


def _built(models: Any, name: str, arguments: dict[str, int], **more: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two models, how they begin at random
        return models.get_model(name, **arguments, **more)


def _fetched(name: str, usual: Any, arguments: dict[str, int]) -> nn.Module:
    models, short = _models(name), name.removeprefix(TORCHVISION)
    try:
        return _built(models, short, arguments, weights=usual, progress=False)
    except (OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"model.name={name!r}: torchvision's weights ({usual.url}) cannot be had: {first}; "
            "name a safetensors file of the model's state dict in model.weights"
        ) from error


def _last_layer(built: nn.Module, name: str) -> tuple[str, nn.Linear]:
    place, last = [
        (place, module)
        for place, module in built.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ][-1]
    if hasattr(built, "aux_logits"):
        wrong = "has other heads beside its last layer"
    elif not isinstance(last, nn.Linear) or last.bias is None:
        wrong = "does not end in a linear layer with a bias"
    else:
        return place, last
    raise ValueError(
        f"model.name='{TORCHVISION}{name}' {wrong}; use another, such as {WITHOUT_BATCH_NORM}, "
        "resnet*"
    )


def _mixing(built: nn.Module) -> str:
    norms = nn.modules.batchnorm._BatchNorm
    return next((place for place, m in built.named_modules() if isinstance(m, norms)), "")


def write_vision(
    classifier: VisionClassifier, labels: Sequence[str], several: bool, to: Path
) -> bool:
    """Writes a state dict under torchvision's names, and beside it the labels and how pixels are
    brought to the model.

    Args:
        classifier: the trained model; it stays as it is.
        labels: names.
        several: whether a record may have several labels.
        to: the folder.

    Returns:
        Whether torchvision makes the same logits of it; where it does not, nothing is written.
    """
    from safetensors.torch import save_file

    state = classifier.vision_state()
    if not _agrees(classifier, state):
        return False
    to.mkdir(parents=True, exist_ok=True)
    save_file(state, str(to / WEIGHTS_FILE))
    said = {
        "model": classifier.name,
        "arguments": _arguments(classifier),
        "labels": list(labels),
        "several_labels": several,
        "pixels": {
            "size": classifier.size,
            "mean": cast(Any, classifier.mean).flatten().tolist(),
            "std": cast(Any, classifier.std).flatten().tolist(),
        },
    }
    (to / LABELS_FILE).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return True


def _arguments(classifier: VisionClassifier) -> dict[str, int]:
    return {"num_classes": classifier.head.out_features, **classifier.arguments}


def _agrees(classifier: VisionClassifier, state: dict[str, Tensor]) -> bool:
    """Whether both give the same logits for two made-up images."""
    mean, std = cast(Any, classifier.mean).cpu(), cast(Any, classifier.std).cpu()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, mean.shape[1], classifier.size, classifier.size, generator=generator)
    alone = _built(_models(classifier.name), classifier.name, _arguments(classifier)).eval()
    alone.load_state_dict(state)
    ours = copy.deepcopy(classifier).cpu().float().eval()
    with torch.no_grad():
        expected, found = ours(2 * pixels - 1), alone((pixels - mean) / std)
    return bool((found - expected).abs().max() <= AGREEMENT * expected.abs().max().clamp_min(1.0))


def by_vision(classifier: VisionClassifier, folder: str, form: Sequence[int]) -> str:
    """How torchvision loads it, in Markdown.

    Args:
        classifier: the model.
        folder: what ``write_vision`` wrote to, as the reader of the card knows it.
        form: [channels, height, width] of the records.
    """
    arguments = ", ".join(f"{name}={value}" for name, value in _arguments(classifier).items())
    return "\n".join(
        [
            "```python",
            "import json",
            "",
            "import torchvision",
            "from safetensors.torch import load_file",
            "",
            f'model = torchvision.models.get_model("{classifier.name}", {arguments}).eval()',
            f'model.load_state_dict(load_file("{folder}/{WEIGHTS_FILE}"))',
            f'labels = json.load(open("{folder}/{LABELS_FILE}"))["labels"]',
            "```",
            "",
            f"In training images were first brought to {form[1]} x {form[2]} pixels and {form[0]} "
            f"channel{'s' if form[0] > 1 else ''}, then to {classifier.size} x {classifier.size} "
            f"and three channels, and normalised as `{LABELS_FILE}` says.",
        ]
    )
