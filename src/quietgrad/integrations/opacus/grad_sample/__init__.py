"""The private model under Opacus' name for its place."""

from quietgrad.integrations.opacus.grad_sample.grad_sample_module import GradSampleModule

__all__ = ["GradSampleModule"]
