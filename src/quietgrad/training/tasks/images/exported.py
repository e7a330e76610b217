"""Image models that load without this library: Hugging Face's own classifier, where it computes the
same from the same weights; torchvision's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quietgrad.training.files.card import BY_TORCH_ALONE, write_card
from quietgrad.training.files.provenance import Record, stamp_weights
from quietgrad.training.sources.hub import HUGGING_FACE
from quietgrad.training.tasks.images.adapter import AGREEMENT, how_to_load, write_adapter
from quietgrad.training.tasks.images.models import PretrainedImageClassifier
from quietgrad.training.tasks.images.vision import FOLDER as VISION
from quietgrad.training.tasks.images.vision import VisionClassifier, by_vision, write_vision
from quietgrad.training.tasks.loaded import ADAPTER, EXPORTED, WEIGHTS_FILE, LoadedModel, merged


def export_images(
    model: LoadedModel,
    labels: Sequence[str],
    form: Sequence[int],
    several: bool,
    folder: Path,
    trained_on: Record,
) -> None:
    """Writes the model card of RUN_DIR/model, and RUN_DIR/model/transformers where a class of
    transformers gives the model's own logits; beside it, of LoRA, RUN_DIR/model/adapter for peft;
    RUN_DIR/model/torchvision of a model of torchvision.

    Args:
        model: the trained model.
        labels: names.
        form: [channels, height, width] of the records.
        several: whether a record may have several labels.
        folder: RUN_DIR/model, with the weights in it.
        trained_on: what they say of themselves.
    """
    place, classifier = folder / EXPORTED, model.classifier
    whole, by = None, ""
    if isinstance(classifier, PretrainedImageClassifier):
        whole = _whole(classifier, model.tune, labels, several)
        if whole is not None and not _agrees(whole, classifier, form):
            whole = None
    base = model.name.removeprefix(HUGGING_FACE)
    if isinstance(classifier, VisionClassifier):
        to = folder / VISION
        if write_vision(classifier, labels, several, to):
            stamp_weights(to, trained_on)
            here = by_vision(classifier, "this folder", form)
            write_card(to, trained_on, base, model.tune, labels, here, VISION, model.weights)
            by = by_vision(classifier, f"RUN_DIR/model/{VISION}", form)
    if whole is not None:
        whole.save_pretrained(place)
        settings = _preprocessing(cast(PretrainedImageClassifier, classifier))
        (place / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        stamp_weights(place, trained_on)
        write_card(
            place, trained_on, base, model.tune, labels, _by_transformers("this folder", form)
        )
    adapter = ""
    if whole is not None and model.tune == "lora":
        typed = cast(PretrainedImageClassifier, classifier)
        pixels, to = _made_up(typed, form)[1], folder / ADAPTER
        if write_adapter(typed.backbone, whole, _head_of(whole), base, pixels, to):
            stamp_weights(to, trained_on)
            adapter = how_to_load(base, len(labels))
            write_card(to, trained_on, base, model.tune, labels, adapter, "peft")
    own = (
        f"`{WEIGHTS_FILE}` is a state dict of `{type(classifier).__name__}` of "
        f"`{type(classifier).__module__}` (`backbone.` or its own layers, and `head.`, a "
        f"linear layer), for pixels of shape {list(form)} between -1 and 1. "
        "With Quietgrad: `quietgrad predict RUN_DIR FOLDER`, or `load_image_classifier` with this "
        "file as `weights`. It is no file of timm or torchvision."
    )
    if by:
        own = f"{by}\n\n{own}"
    elif whole is None:
        own += f"\n\n{BY_TORCH_ALONE}"
    else:
        said = [_by_transformers(f"RUN_DIR/model/{EXPORTED}", form), adapter, own]
        own = "\n\n".join(part for part in said if part)
    library = "transformers" if whole is not None else VISION if by else "quietgrad"
    write_card(folder, trained_on, base, model.tune, labels, own, library, model.weights)


def _whole(
    classifier: PretrainedImageClassifier, tune: str, labels: Sequence[str], several: bool
) -> Any | None:
    """transformers' classifier with the trained weights; None where the architecture has none, or
    one that is made of other parts.
    """
    import transformers

    body = cast(Any, classifier.backbone)
    body = merged(body) if tune == "lora" else body
    config = copy.deepcopy(body.config)
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: i for i, name in enumerate(labels)}
    config.problem_type = "multi_label_classification" if several else "single_label_classification"
    try:
        whole = transformers.AutoModelForImageClassification.from_config(config).eval()
        base = getattr(whole, whole.base_model_prefix)
        base.load_state_dict(body.state_dict())
    except (ValueError, AttributeError, RuntimeError):
        return None
    head = _head_of(whole)
    if not head or whole.get_submodule(head).weight.shape != classifier.head.weight.shape:
        return None
    whole.get_submodule(head).load_state_dict(classifier.head.state_dict())
    return whole


def _head_of(whole: Any) -> str:
    """Name of the one linear layer outside the body; "" where there is none, or several."""
    inside = {id(module) for module in getattr(whole, whole.base_model_prefix).modules()}
    heads = [
        name
        for name, module in whole.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    ]
    return heads[0] if len(heads) == 1 else ""


def _made_up(
    classifier: PretrainedImageClassifier, form: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two images between 0 and 1, and the same as the body takes them."""
    mean, std = cast(Any, classifier.mean).cpu(), cast(Any, classifier.std).cpu()
    height, width = (classifier.size, classifier.size) if classifier.size else form[1:]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, mean.shape[1], height, width, generator=generator)
    return pixels, (pixels - mean) / std


def _agrees(whole: Any, classifier: PretrainedImageClassifier, form: Sequence[int]) -> bool:
    """Whether both give the same logits for two made-up images."""
    pixels, normed = _made_up(classifier, form)
    device, was_training = classifier.head.weight.device, classifier.training
    classifier.eval()
    try:
        with torch.no_grad():
            ours = classifier((2 * pixels - 1).to(device)).float().cpu()
            theirs = whole(pixel_values=normed).logits
    except (ValueError, RuntimeError):
        return False
    finally:
        classifier.train(was_training)
    return bool((ours - theirs).abs().max() <= AGREEMENT * ours.abs().max().clamp_min(1.0))


def _preprocessing(classifier: PretrainedImageClassifier) -> dict[str, Any]:
    """Of transformers' image processors: what the run did to bytes."""
    size = classifier.size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": bool(size),
        "size": {"height": size or 224, "width": size or 224},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": cast(Any, classifier.mean).flatten().tolist(),
        "image_std": cast(Any, classifier.std).flatten().tolist(),
    }


def _by_transformers(folder: str, form: Sequence[int]) -> str:
    return "\n".join(
        [
            "```python",
            "from transformers import AutoImageProcessor, AutoModelForImageClassification",
            "",
            f'model = AutoModelForImageClassification.from_pretrained("{folder}")',
            f'processor = AutoImageProcessor.from_pretrained("{folder}")',
            "```",
            "",
            f"In training images were first brought to {form[1]} x {form[2]} pixels and "
            f"{form[0]} channel{'s' if form[0] > 1 else ''}.",
        ]
    )
