"""Folders of text models that load without this library: merged weights, head, label names and
tokenizer, by Hugging Face's own classes.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from quietgrad.checks import SettingsWarning
from quietgrad.training.tasks.loaded import GENERATE, POOLED, LoadedModel, merged
from quietgrad.training.tasks.text.models import ADAPTER_CONFIG, public_name
from quietgrad.training.tasks.text.pooled import PooledClassifier


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


def shown_base(name: str) -> str:
    """The name of what training started from; of a folder of this machine its last part."""
    return Path(name).name if Path(name).exists() else name


def name_base(folder: Path, name: str) -> None:
    """Writes the public name of a packaged base model into an adapter's configuration, or a
    folder's last name, instead of the path at which this machine has it.
    """
    path = folder / ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = shown_base(public_name(name))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_whole(model: LoadedModel, folder: Path) -> bool:
    """Writes the model with all weights in place; False, with a warning, where the architecture
    does not let itself be written so: the run has ended, and its parts are to be saved.

    Args:
        model: the trained model; it is left as it is.
        folder: RUN_DIR/model.
    """
    begun = folder.with_name(f".{folder.name}.whole")
    try:
        _whole(model).save_pretrained(begun)
        for file in begun.iterdir():
            file.replace(folder / file.name)
    except Exception as error:  # of transformers, peft, or a model's own code
        warnings.warn(
            f"{str(folder)!r}: the model could not be written as one ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); it is saved in parts",
            SettingsWarning,
            stacklevel=2,
        )
        return False
    finally:
        shutil.rmtree(begun, ignore_errors=True)
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
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust})',
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
