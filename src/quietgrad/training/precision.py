"""In which precision a model runs, and where."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

from quietgrad.checks import SettingsWarning
from quietgrad.training.settings.config import TrainConfig


def precision_context(
    config: TrainConfig, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 where ``training.precision`` asks for it."""
    if config.training.precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def warn_of_rounding(config: TrainConfig) -> None:
    """What epsilon does not cover: in half precision a record's gradient follows in its last digits
    from what stands beside it, far more than in float32.
    """
    private = config.privacy.enabled and not config.data.public
    if private and config.training.precision == "bfloat16":
        warnings.warn(
            "training.precision='bfloat16' rounds coarsely: what that does to crowds of records "
            "that are alike, or whose gradients cancel, epsilon does not cover "
            "(docs/privacy/clipping.md); 'float32' has a bound",
            SettingsWarning,
            stacklevel=3,
        )


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
