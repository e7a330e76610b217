"""The private optimiser under another of Opacus' names."""

from quietgrad.integrations.opacus.optimizers import DPOptimizerFastGradientClipping

__all__ = ["DPOptimizerFastGradientClipping"]
