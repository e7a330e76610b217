"""A model that is ready to train, whatever it reads: what of it trains, and how one that is not
Hugging Face's is saved.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quietgrad.tensors import trainable_parameters, whole_of
from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.files.provenance import KEY, Record, stamp_weights

Tune = Literal["lora", "full", "head"]
HeadKind = Literal["mean", "layers", "auto"]
POOLED = ("mean", "layers")  # heads on features that tasks.text.pooling makes
GENERATE: Literal["generate"] = "generate"
WEIGHTS_FILE = "model.safetensors"
ADAPTER = "adapter"  # folder of a LoRA adapter, in that of the model
EXPORTED = "transformers"  # folder of a model that loads without this library


@dataclass(frozen=True)
class Tuning:
    """What of a pretrained model trains.

    Attributes:
        how: "lora" (adapters and head), "full" (everything), "head" (the rest is frozen).
        lora_rank, lora_alpha: of adapters; their scale (0: twice the rank).
        lora_targets: names of the modules that get one (empty: peft's default for the architecture;
            MiniLM: query, value, and both feed-forward layers).
        lora_layers: number of top layers that get one (0: all).
        train_layers: with "full", number of top layers that train beside the head (0: everything).
    """

    how: Tune
    lora_rank: int = 16
    lora_alpha: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_layers: int = 0
    train_layers: int = 0


@dataclass(frozen=True)
class LoadedModel:
    """A classifier with its tokenizer.

    Attributes:
        classifier: (input_ids, attention_mask) -> logits.
        tokenizer: the matching Hugging Face tokenizer; None for an image model.
        name: what the config asked for.
        tune: which parameters train.
        head: kind of head; "generate" for a causal language model.
        weights: a file that one of this library's models began with; "" for none.
    """

    classifier: nn.Module
    tokenizer: Any
    name: str
    tune: Tune
    head: HeadKind | Literal["generate"]
    weights: str = ""


def save_weights(
    model: LoadedModel, label_names: tuple[str, ...], folder: Path, trained_on: Record, **facts: Any
) -> None:
    """Writes weights in the form that ``model.weights`` reads, and beside them what the model is
    and was trained on.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().contiguous().cpu() for k, v in model.classifier.state_dict().items()}
    save_file(state, str(folder / WEIGHTS_FILE))
    described = {
        "base": _told(model.name),
        "tune": model.tune,
        "labels": list(label_names),
        **facts,
        KEY: trained_on,
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(described, indent=2) + "\n")
    stamp_weights(folder, trained_on)


def _told(name: str) -> str:
    """``model.name`` as a file that leaves tells it: of a folder of this machine the last part."""
    kind, colon, place = name.partition(":")
    return f"{kind}:{Path(place).name}" if colon and Path(place).exists() else name


def merged(adapted: Any) -> Any:
    """The base model with a peft model's adapters merged into it: a copy, in the machine's memory;
    ``adapted`` stays as it is.
    """
    device = next(adapted.parameters()).device
    copied = copy.deepcopy(adapted.to("cpu"))
    adapted.to(device)
    return copied.merge_and_unload()


def trainable_count(model: nn.Module) -> int:
    """Number of trainable entries."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def parameter_digest(model: nn.Module) -> dict[str, Tensor]:
    """A small fingerprint of every parameter: enough to see whether it moved. Where they are
    sharded, all ranks call.
    """
    found = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            whole = whole_of(p).double()
            found[name] = torch.stack([whole.sum(), whole.pow(2).sum()])
    return found


def require_movement(classifier: nn.Module, before: dict[str, Tensor], steps: int) -> None:
    """Training that moves nothing, or moves what is frozen, must not look like success.

    Args:
        classifier: after training.
        before: its ``parameter_digest`` before that.
        steps: how many there were.

    Raises:
        RuntimeError: naming what did not move, or should not have.
    """
    after = parameter_digest(classifier)
    moved = {name for name, digest in after.items() if not torch.equal(digest, before[name])}
    trainable = set(trainable_parameters(classifier))
    if steps and not moved & trainable:
        raise RuntimeError(
            f"after {steps} steps no trainable tensor has moved; check learning rates and the "
            "optimiser's parameters"
        )
    wrong = sorted(moved - trainable)
    if wrong:
        raise RuntimeError(
            f"the frozen tensor {wrong[0]!r} has moved during training ({len(wrong)} of them); "
            "something writes to it outside the optimiser"
        )
