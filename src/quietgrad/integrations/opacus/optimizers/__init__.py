"""The private optimiser under Opacus' names for its place: one class for all ways of clipping."""

from quietgrad.integrations.opacus.optimizers.optimizer import DPOptimizer

DPOptimizerFastGradientClipping = DPOptimizer
DPPerLayerOptimizer = DPOptimizer

__all__ = ["DPOptimizer", "DPOptimizerFastGradientClipping", "DPPerLayerOptimizer"]
