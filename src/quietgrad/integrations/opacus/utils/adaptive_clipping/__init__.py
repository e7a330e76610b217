"""Opacus' norms that adapt, refused by name."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import ADAPTIVE
from quietgrad.integrations.opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    PrivacyEngineAdaptiveClipping,
)

__all__ = ["PrivacyEngineAdaptiveClipping"]
__getattr__ = absent(
    __name__,
    dict.fromkeys(
        ("DPLossFastGradientAdaptiveClipping", "DPTensorFastGradientAdaptiveClipping"), ADAPTIVE
    ),
)
