"""Text models on disk: written in Hugging Face format after training, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.files.provenance import KEY, Record, stamp_weights
from quietgrad.training.tasks.loaded import GENERATE, WEIGHTS_FILE, LoadedModel
from quietgrad.training.tasks.text.models import (
    CausalLanguageModel,
    LogitsClassifier,
    MeanPooledClassifier,
    generator_path,
    load_encoder,
    model_path,
)

HEAD_FILE = "head.safetensors"


def save_classifier(
    model: LoadedModel, label_names: tuple[str, ...], folder: Path, trained_on: Record
) -> None:
    """Writes encoder or adapter in Hugging Face format (``save_pretrained``), the head beside it,
    the tokenizer, and what it was trained on (``provenance``).
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model.classifier.encoder.save_pretrained(folder)  # type: ignore[union-attr, operator]
    model.tokenizer.save_pretrained(folder)
    if isinstance(model.classifier, MeanPooledClassifier):
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
    labels = description["labels"]
    if "head" not in description:
        raise ValueError(
            f"folder={str(folder)!r} holds an image model; give its {WEIGHTS_FILE} to "
            "model.weights, or to quietgrad.training.tasks.images.models.load_image_classifier"
        )
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
    if description["head"] == "mean":
        from safetensors.torch import load_file

        classifier = MeanPooledClassifier(encoder, encoder.config.hidden_size, len(labels))
        classifier.head.load_state_dict(load_file(str(folder / HEAD_FILE)))
    return classifier.eval(), transformers.AutoTokenizer.from_pretrained(folder), labels
