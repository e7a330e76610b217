"""Opacus 1.6 scripts on Quietgrad: ``from quietgrad.integrations.opacus import PrivacyEngine``.

What changes is in docs/from_opacus.md.
"""

from quietgrad.integrations.opacus import utils
from quietgrad.integrations.opacus.absent import let_imports_say
from quietgrad.integrations.opacus.absent_modules import MODULES
from quietgrad.integrations.opacus.data_loader import DPDataLoader
from quietgrad.integrations.opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from quietgrad.integrations.opacus.optimizers import DPOptimizer
from quietgrad.integrations.opacus.privacy_engine import PrivacyEngine
from quietgrad.integrations.opacus.version import __version__

let_imports_say(__name__, MODULES)

__all__ = [
    "DPDataLoader",
    "DPOptimizer",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "__version__",
    "utils",
]
