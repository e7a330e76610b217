"""Text models on disk: RUN_DIR/model is the whole model, in a form that transformers reads, and
RUN_DIR/model/adapter a LoRA adapter for peft; both are written after training, and read back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from quietgrad.training.files.card import write_card
from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.files.provenance import KEY, Record, stamp_weights
from quietgrad.training.tasks.loaded import (
    ADAPTER,
    GENERATE,
    POOLED,
    WEIGHTS_FILE,
    LoadedModel,
)
from quietgrad.training.tasks.text.exported import (
    how_to_load,
    name_base,
    name_labels,
    shown_base,
    write_whole,
)
from quietgrad.training.tasks.text.models import (
    PACKAGED_SMOLLM2,
    CausalLanguageModel,
    LogitsClassifier,
    generator_path,
    load_encoder,
    model_path,
    public_name,
    quiet_loading,
    without_bars,
)
from quietgrad.training.tasks.text.pooled import PooledClassifier, load_pooled

# Where a model cannot be written whole: its parts.
HEAD_FILE, ENCODER = "head.safetensors", "encoder"


def save_classifier(
    model: LoadedModel, label_names: tuple[str, ...], folder: Path, trained_on: Record
) -> None:
    """Writes the whole model (adapters merged, head included) so that transformers loads it from
    ``folder``, the adapter alone beside it, the tokenizer, and what it was trained on
    (``provenance``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    name_labels(model, label_names)
    with without_bars():
        _write(model, list(label_names), folder, trained_on)


def _write(model: LoadedModel, labels: list[str], folder: Path, trained_on: Record) -> None:
    adapted = model.tune == "lora"
    whole = write_whole(model, folder)
    model.tokenizer.save_pretrained(folder)
    if adapted:
        cast(Any, model.classifier.encoder).save_pretrained(folder / ADAPTER)
        name_base(folder / ADAPTER, model.name)
    if not whole:
        _write_parts(model, folder)
    for place in (folder, folder / ADAPTER, folder / ENCODER):
        stamp_weights(place, trained_on)
    description = {
        # The parts of a model that is not whole need the base where it is on this machine.
        "base": shown_base(model.name) if whole else model.name,
        "tune": model.tune,
        "head": model.head,
        "labels": labels,
        "whole": whole,
        KEY: trained_on,
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")

    def card(place: Path, loading: str) -> None:
        write_card(place, trained_on, public_name(model.name), model.tune, labels, loading)

    said = [how_to_load(model, "RUN_DIR/model")] if whole else []
    if adapted:
        said.append(_of_adapter(model, len(labels)))
        card(folder / ADAPTER, said[-1])
    if not whole:
        said.append(_PARTS)
    card(folder, "\n\n".join([*said, _WITH_QUIETGRAD]))


_WITH_QUIETGRAD = (
    "With Quietgrad: `quietgrad predict RUN_DIR FILE`, or "
    "`quietgrad.training.tasks.text.saved.load_saved`."
)
_PARTS = (
    "The architecture does not let itself be written whole, so transformers alone cannot load this "
    f"folder: the model is in parts (`{ENCODER}` or `{ADAPTER}`, and `{HEAD_FILE}`)."
)


def _of_adapter(model: LoadedModel, labels: int) -> str:
    """What the adapter's folder is, in Markdown; without ``labels`` it is a language model's."""
    base = shown_base(public_name(model.name))
    held = f"`RUN_DIR/model/{ADAPTER}` is the LoRA adapter alone, for "
    held += f"`peft.PeftModel.from_pretrained(base, ...)` on `{base}`"
    if model.head in POOLED:
        held += ", loaded by `AutoModel`; the head is in the whole model, not here"
    elif labels:
        held += f", loaded by `AutoModelForSequenceClassification` with `num_labels={labels}`: "
        held += "the trained head is in the adapter, and label names are in the whole model"
    else:
        held += ", loaded by `AutoModelForCausalLM`"
    if model.name == PACKAGED_SMOLLM2:
        held += (
            ". It was trained on a quantized copy of the base model (GGUF, Q4_1), so on the hub's "
            "weights its outputs differ a little"
        )
    return held + "."


def _write_parts(model: LoadedModel, folder: Path) -> None:
    """Encoder and head, where an adapter is not all; in folders that transformers does not take
    for a model with a head.
    """
    from safetensors.torch import save_file

    if model.tune != "lora":
        cast(Any, model.classifier.encoder).save_pretrained(folder / ENCODER)
    if isinstance(model.classifier, PooledClassifier):
        state = model.classifier.head.state_dict()
        head = {k: v.detach().contiguous().cpu() for k, v in state.items()}
        save_file(head, str(folder / HEAD_FILE))


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
    if "whole" not in description:
        raise ValueError(
            f"folder={str(folder)!r} was written by an earlier version, in another form; train "
            "again, or load it with that version"
        )
    with quiet_loading(description["base"]):
        return _load(folder, description, attention)


def _load(
    folder: Path, description: dict[str, Any], attention: str | None
) -> tuple[nn.Module, Any, list[str]]:
    import transformers

    load = _load_whole if description.get("whole") else _load_parts
    classifier = load(transformers, folder, description, attention)
    return (
        classifier.eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
        description["labels"],
    )


def _load_whole(
    transformers: Any, folder: Path, description: dict[str, Any], attention: str | None
) -> nn.Module:
    head, path = description["head"], str(folder)
    if head in POOLED:
        return load_pooled(path, attention)
    if head == GENERATE:
        return CausalLanguageModel(
            transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention)
        )
    return LogitsClassifier(
        transformers.AutoModelForSequenceClassification.from_pretrained(
            path, attn_implementation=attention
        )
    )


def _load_parts(
    transformers: Any, folder: Path, description: dict[str, Any], attention: str | None
) -> nn.Module:
    labels, head = description["labels"], description["head"]
    adapted = description["tune"] == "lora"
    more: dict[str, str] = {}
    base = str(folder / ENCODER)
    if adapted:
        base, more = generator_path(model_path(description["base"]))
    inner: nn.Module
    if head == GENERATE:
        inner = transformers.AutoModelForCausalLM.from_pretrained(
            base, attn_implementation=attention, **more
        )
    elif head == "auto":
        inner = transformers.AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(labels), attn_implementation=attention
        )
    else:
        inner = load_encoder(transformers, base, attention)
    if adapted:
        import peft

        inner = peft.PeftModel.from_pretrained(cast(Any, inner), str(folder / ADAPTER))
    if head == GENERATE:
        return CausalLanguageModel(inner)
    if head == "auto":
        return LogitsClassifier(inner)
    from safetensors.torch import load_file

    classifier = PooledClassifier(inner, head, len(labels))
    classifier.head.load_state_dict(load_file(str(folder / HEAD_FILE)))
    return classifier
