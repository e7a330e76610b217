"""In which precision a model runs, and where."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from quietgrad.checks import warn_of_half_precision
from quietgrad.training.settings.config import TrainConfig


def precision_context(
    config: TrainConfig, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 where ``training.precision`` asks for it."""
    if config.training.precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def warn_of_rounding(config: TrainConfig) -> None:
    """Of private records alone."""
    private = config.privacy.enabled and not config.data.public
    if private and config.training.precision == "bfloat16":
        warn_of_half_precision("training.precision='bfloat16'", "'float32'")


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
