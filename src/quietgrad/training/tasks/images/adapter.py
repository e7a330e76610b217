"""The LoRA adapter of an image model alone, for peft; the whole model, beside it, has it merged."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.training.tasks.loaded import WEIGHTS_FILE

AGREEMENT = 1e-4  # of logits, relative to the largest
BEGIN = "base_model.model."  # of the names in an adapter's file


def write_adapter(adapted: Any, whole: Any, head: str, base: str, pixels: Tensor, to: Path) -> bool:
    """Writes what peft puts on ``AutoModelForImageClassification`` of the base model: the adapters,
    and the head that was trained with them.

    Args:
        adapted: the body, a peft model.
        whole: transformers' classifier of the trained weights, merged, in evaluation mode.
        head: its name in ``whole``.
        base: what training started from, for the configuration.
        pixels: [b, channels, height, width] to compare the two on.
        to: the folder.

    Returns:
        Whether peft makes the same logits of it; where it does not, nothing is left.
    """
    import peft
    from safetensors.torch import save_file

    device = next(adapted.parameters()).device
    body = copy.deepcopy(adapted.to("cpu"))
    adapted.to(device)
    inside = f"{BEGIN}{whole.base_model_prefix}."
    state = peft.get_peft_model_state_dict(body)
    state = {inside + name.removeprefix(BEGIN): weights for name, weights in state.items()}
    trained = whole.get_submodule(head).state_dict()
    state |= {f"{BEGIN}{head}.{name}": weights for name, weights in trained.items()}
    config = copy.deepcopy(body.peft_config["default"])
    config.modules_to_save, config.inference_mode = [head], True
    config.base_model_name_or_path = Path(base).name if Path(base).exists() else base
    config.auto_mapping = {
        "base_model_class": type(whole).__name__,
        "parent_library": type(whole).__module__,
    }
    config.save_pretrained(str(to))
    plain = {name: weights.detach().contiguous().cpu() for name, weights in state.items()}
    save_file(plain, str(to / ("adapter_" + WEIGHTS_FILE)))
    if _agrees(body, whole, head, pixels, to):
        return True
    shutil.rmtree(to)
    return False


def _agrees(body: Any, whole: Any, head: str, pixels: Tensor, folder: Path) -> bool:
    """Whether the base model without a head of its own becomes the whole one by the adapter."""
    import peft

    begun = copy.deepcopy(whole)
    for weights in begun.get_submodule(head).parameters():
        nn.init.zeros_(weights)
    try:
        getattr(begun, whole.base_model_prefix).load_state_dict(body.unload().state_dict())
        found = peft.PeftModel.from_pretrained(begun, str(folder)).eval()
        with torch.no_grad():
            ours, theirs = whole(pixel_values=pixels).logits, found(pixel_values=pixels).logits
    except (ValueError, RuntimeError, KeyError):
        return False
    return bool((ours - theirs).abs().max() <= AGREEMENT * ours.abs().max().clamp_min(1.0))


def how_to_load(base: str, labels: int) -> str:
    """In Markdown."""
    shown = Path(base).name if Path(base).exists() else base
    return (
        "`RUN_DIR/model/adapter` is the LoRA adapter with the head, for "
        f"`peft.PeftModel.from_pretrained(base, ...)` on `{shown}`, loaded by "
        f"`AutoModelForImageClassification` with `num_labels={labels}, "
        "ignore_mismatched_sizes=True`; label names and pixels' scale are in the whole model."
    )
