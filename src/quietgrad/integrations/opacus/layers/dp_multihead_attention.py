"""Attention under Opacus' name."""

from torch.nn import MultiheadAttention as DPMultiheadAttention

__all__ = ["DPMultiheadAttention"]
