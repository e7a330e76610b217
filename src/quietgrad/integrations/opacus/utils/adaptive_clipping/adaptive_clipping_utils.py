"""What Opacus has for norms that adapt, refused by name."""

from __future__ import annotations

from typing import Any

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import ADAPTIVE


class PrivacyEngineAdaptiveClipping:
    """Not offered.

    Raises:
        ValueError: always.
    """

    def __init__(self, **_: Any) -> None:
        raise ValueError(
            "PrivacyEngineAdaptiveClipping is not offered: its threshold follows the share of "
            "clipped records, whose noise is not in this accountant; use PrivacyEngine with a "
            "fixed max_grad_norm, or quietgrad.beside.AdaptiveClipping in a loop of docs/loops.md "
            "(docs/adaptive_clipping.md)"
        )


__getattr__ = absent(
    __name__,
    dict.fromkeys(
        ("DPLossFastGradientAdaptiveClipping", "DPTensorFastGradientAdaptiveClipping"), ADAPTIVE
    ),
)
