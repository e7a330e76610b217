"""The private optimiser under another of Opacus' names."""

from quietgrad.integrations.opacus.optimizers import DPPerLayerOptimizer

__all__ = ["DPPerLayerOptimizer"]
