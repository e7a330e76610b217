"""Attention under Opacus' name."""

from torch.nn import MultiheadAttention as DPMultiheadAttention

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import TORCHS_LAYERS

__all__ = ["DPMultiheadAttention"]
__getattr__ = absent(__name__, {"SequenceBias": TORCHS_LAYERS})
