"""Opacus' norms that adapt, refused by name."""

from quietgrad.integrations.opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    PrivacyEngineAdaptiveClipping,
)

__all__ = ["PrivacyEngineAdaptiveClipping"]
