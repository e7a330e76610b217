"""Opacus 1.6 scripts on Quietgrad: ``from quietgrad.integrations.opacus import PrivacyEngine``.

What changes is in docs/from_opacus.md.
"""

from quietgrad.integrations.opacus import utils
from quietgrad.integrations.opacus.data_loader import DPDataLoader
from quietgrad.integrations.opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from quietgrad.integrations.opacus.optimizers import DPOptimizer
from quietgrad.integrations.opacus.privacy_engine import PrivacyEngine

__version__ = "1.6.0"  # whose interface this is

__all__ = [
    "DPDataLoader",
    "DPOptimizer",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "utils",
]
