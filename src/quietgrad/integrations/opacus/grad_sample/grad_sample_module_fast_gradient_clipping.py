"""The private model under another of Opacus' names."""

from quietgrad.integrations.opacus.grad_sample import GradSampleModuleFastGradientClipping

__all__ = ["GradSampleModuleFastGradientClipping"]
