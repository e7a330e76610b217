"""Quantised layers (bitsandbytes) whose numbers follow from the batch, or whose gradient is lost.

Known by name: how others are rounded moves them by less than half precision does on ordinary
records, so that no look at records tells one from the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

LIBRARY = "bitsandbytes"


def is_quantized(module: nn.Module) -> bool:
    """Whether a module's class is that library's, or inherits from one of its."""
    kind: Any = type(module)
    return _is_of_library(kind)


@lru_cache(maxsize=256)
def _is_of_library(kind: Any) -> bool:
    return any(base.__module__.partition(".")[0] == LIBRARY for base in kind.__mro__)


def refuse_quantized(name: str, module: nn.Module) -> None:
    """Raises where a quantised layer cannot be trained through.

    ``LLM.int8()`` (Dettmers et al. 2022, section 3.2) multiplies a column apart, in 16 bits, where
    any row of the batch has a value above a threshold in it, and rounds it to 8 bits elsewhere.

    Raises:
        ValueError: naming the layer and the remedy.
    """
    if not is_quantized(module):
        return
    threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
    if threshold > 0.0:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) rounds a column of all records otherwise "
            f"where one record of the batch has a value above {threshold} in it, so that one "
            "record changes what others add; load the model with BitsAndBytesConfig("
            "load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits (load_in_4bit=True)"
        )
    quantization = getattr(getattr(module, "weight", None), "quant_state", None)
    if module.training and getattr(quantization, "packing_format_for_cpu", False):
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) was packed for inference by a pass in "
            "evaluation mode on a processor, and has no gradient since: layers below it would "
            "learn from noise alone; load the model again, and evaluate after training, on a "
            "GPU, or by another copy"
        )


def packs_itself(module: nn.Module) -> bool:
    """Whether a layer may rewrite its weights in evaluation mode, on a processor."""
    return is_quantized(module) and not module.training


def keep_unpacked(model: nn.Module) -> None:
    """Puts quantised layers alone into training mode, before a trainer does it with all: a look at
    records in the meantime would pack them.
    """
    for module in model.modules():
        if is_quantized(module):
            module.training = True


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Modules are in evaluation mode inside, but for those that would pack their weights for
    inference, and stay so; afterwards all are as they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for module, training in modes:
            if is_quantized(module):
                module.training = training
        yield
    finally:
        for module, training in modes:
            module.training = training
