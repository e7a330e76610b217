"""Torch's own settings, which hold for the whole process: a record that switches one switches it
for all that come later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import backends


class _Setting(NamedTuple):
    now: Callable[[], Any]
    put: Callable[[Any], Any]


def _flag(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _of_autocast(device: str) -> dict[str, _Setting]:
    return {
        f"torch.set_autocast_enabled({device!r})": _Setting(
            lambda: torch.is_autocast_enabled(device),
            lambda value: torch.set_autocast_enabled(device, value),
        ),
        f"torch.set_autocast_dtype({device!r})": _Setting(
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    }


_SETTINGS: dict[str, _Setting] = {
    "torch.set_grad_enabled": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_float32_matmul_precision": _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch.use_deterministic_algorithms": _Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "torch.set_num_threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    **_of_autocast("cpu"),
    **_of_autocast("cuda"),
    "torch.backends.mkldnn.enabled": _flag(backends.mkldnn, "enabled"),
    "torch.backends.cudnn.enabled": _flag(backends.cudnn, "enabled"),
    "torch.backends.cudnn.allow_tf32": _flag(backends.cudnn, "allow_tf32"),
    "torch.backends.cudnn.deterministic": _flag(backends.cudnn, "deterministic"),
    "torch.backends.cuda.matmul.allow_tf32": _flag(backends.cuda.matmul, "allow_tf32"),
    "torch.backends.cuda.enable_flash_sdp": _Setting(
        backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp
    ),
    "torch.backends.cuda.enable_mem_efficient_sdp": _Setting(
        backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp
    ),
    "torch.backends.cuda.enable_math_sdp": _Setting(
        backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp
    ),
}


class TorchSettings:
    """As they were when this was made: a hundredth of a millisecond."""

    def __init__(self) -> None:
        self._before = {name: setting.now() for name, setting in _SETTINGS.items()}

    def switched(self) -> str | None:
        """The name of one that is another now, or None; all are as they were afterwards."""
        found = None
        for name, value in self._before.items():
            if _SETTINGS[name].now() != value:
                found = found or name
                _SETTINGS[name].put(value)
        return found
