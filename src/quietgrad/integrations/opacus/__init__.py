"""Opacus 1.6 scripts on Quietgrad: ``from quietgrad.integrations.opacus import PrivacyEngine``.

What changes is in docs/from_opacus.md.
"""

from quietgrad.integrations.opacus.engine import PrivacyEngine
from quietgrad.integrations.opacus.module import GradSampleModule
from quietgrad.integrations.opacus.optimizer import DPOptimizer
from quietgrad.integrations.opacus.source import DPDataLoader

__all__ = ["DPDataLoader", "DPOptimizer", "GradSampleModule", "PrivacyEngine"]
