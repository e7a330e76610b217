"""What Opacus has for norms that adapt, refused by name."""

from __future__ import annotations

from typing import Any


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
