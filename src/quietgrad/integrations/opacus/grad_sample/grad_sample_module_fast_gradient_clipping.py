"""The private model under another of Opacus' names."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import BY_AUTOGRAD
from quietgrad.integrations.opacus.grad_sample import GradSampleModuleFastGradientClipping

__all__ = ["GradSampleModuleFastGradientClipping"]
__getattr__ = absent(
    __name__,
    dict.fromkeys(("GradSampleHooksFastGradientClipping", "create_norm_sample"), BY_AUTOGRAD),
)
