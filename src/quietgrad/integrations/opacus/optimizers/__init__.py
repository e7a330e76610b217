"""The private optimiser under Opacus' name for its place."""

from quietgrad.integrations.opacus.optimizers.optimizer import DPOptimizer

__all__ = ["DPOptimizer"]
