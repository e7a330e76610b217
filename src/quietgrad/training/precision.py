"""In which precision a model runs: autocast where the configuration asks for
it, or where it pays.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from quietgrad.training.settings.config import TrainConfig


def precision_context(
    config: TrainConfig, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 where ``training.precision`` asks for it."""
    if precision_of(config, device) == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def precision_of(config: TrainConfig, device: torch.device) -> str:
    """What "auto" means on this machine: bfloat16 where the processor multiplies in it."""
    if config.training.precision != "auto":
        return config.training.precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    if device.type == "cpu":
        return (
            "bfloat16"
            if torch.ops.mkldnn._is_mkldnn_bf16_supported() and _has_bfloat16_units()
            else "float32"
        )
    return "float32"


def _has_bfloat16_units() -> bool:
    # Without them bfloat16 is emulated, and slower than float32.
    return _cpu_flag("avx512_bf16") or _cpu_flag("amx_bf16")


def _cpu_flag(flag: str) -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return any(flag in line.split() for line in file if line.startswith("flags"))
    except OSError:
        return False


def device_of(name: str) -> torch.device:
    """The device that ``training.device`` names.

    Raises:
        ValueError: for one that is not usable here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"training.device={name!r} is not usable here: {str(error).splitlines()[0]}; use 'auto'"
        ) from error
    return device
