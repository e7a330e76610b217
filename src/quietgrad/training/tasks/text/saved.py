"""Text models on disk: written in Hugging Face format after training, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from quietgrad.training.files.card import write_card
from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.files.provenance import KEY, Record, stamp_weights
from quietgrad.training.tasks.loaded import (
    EXPORTED,
    GENERATE,
    POOLED,
    WEIGHTS_FILE,
    LoadedModel,
)
from quietgrad.training.tasks.text.exported import (
    export,
    how_to_load,
    loads_directly,
    name_base,
    name_labels,
)
from quietgrad.training.tasks.text.models import (
    PACKAGED_SMOLLM2,
    CausalLanguageModel,
    LogitsClassifier,
    PooledClassifier,
    generator_path,
    load_encoder,
    model_path,
    public_name,
    quiet_loading,
    without_bars,
)

HEAD_FILE = "head.safetensors"


def save_classifier(
    model: LoadedModel, label_names: tuple[str, ...], folder: Path, trained_on: Record
) -> None:
    """Writes encoder or adapter in Hugging Face format (``save_pretrained``), the head beside it,
    the tokenizer, and what it was trained on (``provenance``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    name_labels(model, label_names)
    with without_bars():
        _write(model, label_names, folder, trained_on)


def _write(
    model: LoadedModel, label_names: tuple[str, ...], folder: Path, trained_on: Record
) -> None:
    from safetensors.torch import save_file

    model.classifier.encoder.save_pretrained(folder)  # type: ignore[union-attr, operator]
    name_base(folder, model.name)
    model.tokenizer.save_pretrained(folder)
    if isinstance(model.classifier, PooledClassifier):
        head = {
            k: v.detach().contiguous().cpu() for k, v in model.classifier.head.state_dict().items()
        }
        save_file(head, str(folder / HEAD_FILE))
    stamp_weights(folder, trained_on)
    labels = list(label_names)
    description = {
        "base": model.name,
        "tune": model.tune,
        "head": model.head,
        "labels": labels,
        KEY: trained_on,
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")

    def card(place: Path, loading: str) -> None:
        write_card(place, trained_on, public_name(model.name), model.tune, labels, loading)

    if loads_directly(model):
        card(folder, how_to_load(model, "this folder"))
        return
    card(folder, _parts(model))
    if export(model, folder, trained_on, card):
        card(folder, f"{how_to_load(model, f'RUN_DIR/model/{EXPORTED}')}\n\n{_parts(model)}")


def _parts(model: LoadedModel) -> str:
    """What the files of a folder are that is not the whole model."""
    held = "a LoRA adapter (peft)" if model.tune == "lora" else "the encoder"
    parts = f"This folder itself holds {held}"
    if model.head in POOLED:
        parts += f", and `{HEAD_FILE}` the head: `AutoModelForSequenceClassification` makes a "
        parts += "random head of it. With Quietgrad: `quietgrad predict RUN_DIR FILE`, or "
    else:
        parts += ". With Quietgrad: `quietgrad predict RUN_DIR FILE`, or "
    parts += "`quietgrad.training.tasks.text.saved.load_saved`."
    if model.tune == "lora" and model.name == PACKAGED_SMOLLM2:
        parts += (
            " The adapter was trained on a quantized copy of the base model (GGUF, Q4_1), so on "
            "the hub's weights its outputs differ a little."
        )
    return parts


def load_saved(
    folder: str | Path, attention: str | None = None
) -> tuple[nn.Module, Any, list[str]]:
    """Reads back what ``save_classifier`` wrote: the classifier in evaluation mode, its tokenizer
    and the label names.

    Args:
        folder: RUN_DIR/model.
        attention: transformers' attention implementation; None leaves its choice.

    Raises:
        ValueError: if the folder does not hold a saved classifier.
    """
    folder = Path(folder)
    if not (folder / DESCRIPTION_FILE).is_file():
        raise ValueError(
            f"folder={str(folder)!r} holds no saved classifier (no {DESCRIPTION_FILE}); pass "
            "RUN_DIR/model"
        )
    description = json.loads((folder / DESCRIPTION_FILE).read_text())
    if "head" not in description:
        raise ValueError(
            f"folder={str(folder)!r} holds an image model; give its {WEIGHTS_FILE} to "
            "model.weights, or to quietgrad.training.tasks.images.models.load_image_classifier"
        )
    with quiet_loading(description["base"]):
        return _load(folder, description, attention)


def _load(
    folder: Path, description: dict[str, Any], attention: str | None
) -> tuple[nn.Module, Any, list[str]]:
    labels = description["labels"]
    import transformers

    adapted = description["tune"] == "lora"
    base = model_path(description["base"]) if adapted else str(folder)
    if description["head"] == GENERATE:
        path, extra = generator_path(description["base"]) if adapted else (base, {})
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, **extra
        )
        if adapted:
            import peft

            model = peft.PeftModel.from_pretrained(cast(Any, model), str(folder))
        return (
            CausalLanguageModel(model).eval(),
            transformers.AutoTokenizer.from_pretrained(folder),
            labels,
        )
    if description["head"] == "auto":
        encoder = transformers.AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(labels), attn_implementation=attention
        )
    else:
        encoder = load_encoder(transformers, base, attention)
    if adapted:
        import peft

        encoder = peft.PeftModel.from_pretrained(encoder, str(folder))
    classifier: nn.Module = LogitsClassifier(encoder)
    if description["head"] in POOLED:
        from safetensors.torch import load_file

        classifier = PooledClassifier(encoder, description["head"], len(labels))
        classifier.head.load_state_dict(load_file(str(folder / HEAD_FILE)))
    return classifier.eval(), transformers.AutoTokenizer.from_pretrained(folder), labels
