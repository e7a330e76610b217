"""Folders of text models that load without this library: merged weights, head, label names and
tokenizer, by Hugging Face's own classes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from quietgrad.checks import SettingsWarning
from quietgrad.training.files.provenance import Record, stamp_weights
from quietgrad.training.tasks.loaded import EXPORTED, GENERATE, POOLED, LoadedModel, merged
from quietgrad.training.tasks.text.models import ADAPTER_CONFIG, PooledClassifier, public_name


def loads_directly(model: LoadedModel) -> bool:
    """Whether what ``save_pretrained`` writes is the whole classifier or language model."""
    return model.tune != "lora" and model.head not in POOLED


def name_labels(model: LoadedModel, labels: Sequence[str]) -> None:
    """Puts the names into the configuration that is saved; transformers reads from it how many
    there are. Segments were not told apart in training, so the tokenizer does not tell them apart.
    """
    encoder = cast(Any, model.classifier.encoder)
    if labels:
        config = encoder.get_base_model().config if model.tune == "lora" else encoder.config
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: i for i, name in enumerate(labels)}
        config.problem_type = "single_label_classification"
    kept = [n for n in model.tokenizer.model_input_names if n != "token_type_ids"]
    model.tokenizer.model_input_names = kept
    model.tokenizer.init_kwargs["model_input_names"] = kept  # what is written


def name_base(folder: Path, name: str) -> None:
    """Writes the public name of a packaged base model into an adapter's configuration, instead of
    the path at which this machine has it.
    """
    path = folder / ADAPTER_CONFIG
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = public_name(name)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def export(
    model: LoadedModel, folder: Path, trained_on: Record, card: Callable[[Path, str], None]
) -> bool:
    """Writes ``folder/transformers``; False, with a warning, where the architecture does not let
    itself be written so: the run has ended, and its weights are saved already.

    Args:
        model: the trained model; it is left as it is.
        folder: RUN_DIR/model.
        trained_on: what the weights say of themselves.
        card: writes the model card of a folder, loaded as said.
    """
    place = folder / EXPORTED
    try:
        whole = _whole(model)
        whole.save_pretrained(place)
        model.tokenizer.save_pretrained(place)
    except Exception as error:  # of transformers, peft, or a model's own code
        warnings.warn(
            f"{str(place)!r} could not be written ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); {str(folder)!r} holds the model",
            SettingsWarning,
            stacklevel=2,
        )
        return False
    stamp_weights(place, trained_on)
    card(place, how_to_load(model, "this folder"))
    return True


def how_to_load(model: LoadedModel, folder: str) -> str:
    """Lines of Python, in Markdown, for a folder that holds the whole model."""
    kind = "CausalLM" if model.head == GENERATE else "SequenceClassification"
    trust = ", trust_remote_code=True" if model.head in POOLED else ""
    lines = [
        "```python",
        f"from transformers import AutoModelFor{kind}, AutoTokenizer",
        "",
        f'model = AutoModelFor{kind}.from_pretrained("{folder}"{trust})',
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        "```",
    ]
    if trust:
        lines += [
            "",
            "The head is not the architecture's own: `modeling_pooled.py` beside the weights, "
            "which needs torch and transformers alone, has the model.",
        ]
    return "\n".join(lines)


def _whole(model: LoadedModel) -> Any:
    """A model of transformers with all weights in place."""
    encoder = cast(Any, model.classifier.encoder)
    if model.tune == "lora":
        encoder = merged(encoder)
    if not isinstance(model.classifier, PooledClassifier):
        return encoder
    from quietgrad.training.tasks.text.modeling_pooled import (
        PooledConfig,
        PooledForSequenceClassification,
    )

    PooledConfig.register_for_auto_class()
    PooledForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
    config = encoder.config
    settings = config.to_dict()
    settings = {k: v for k, v in settings.items() if k not in ("_name_or_path", "auto_map")}
    whole = PooledForSequenceClassification(
        PooledConfig(
            encoder_config=settings,
            pooling=model.classifier.pooling,
            id2label=config.id2label,
            label2id=config.label2id,
            problem_type=config.problem_type,
        )
    )
    whole.encoder = encoder
    whole.head = model.classifier.head
    return whole
