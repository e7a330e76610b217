"""``NoisySum`` to a better-aligned ``NoisySum``: a function of released values and public facts, so
it costs no privacy.
"""

from quietgrad.denoising.formulas import (
    bulk_edge,
    detection_threshold,
    observed_singular_values,
    shrink,
    signal_singular_values,
    squared_overlaps,
)
from quietgrad.denoising.moment import MomentNoise
from quietgrad.denoising.optimizers import SpectralAdamW, SpectralSGD
from quietgrad.denoising.rules.bulk import SpikesWithBulk
from quietgrad.denoising.rules.constant import ConstantAmplification
from quietgrad.denoising.rules.hard_threshold import HardThreshold
from quietgrad.denoising.rules.on_momentum import OnMomentum
from quietgrad.denoising.rules.persistent import PersistentAmplification
from quietgrad.denoising.rules.protocols import GradientRule, MomentStep, MomentumRule
from quietgrad.denoising.rules.published import PublishedShrinkage, denoise_matrix

__all__ = [
    "ConstantAmplification",
    "GradientRule",
    "HardThreshold",
    "MomentNoise",
    "MomentStep",
    "MomentumRule",
    "OnMomentum",
    "PersistentAmplification",
    "PublishedShrinkage",
    "SpectralAdamW",
    "SpectralSGD",
    "SpikesWithBulk",
    "bulk_edge",
    "denoise_matrix",
    "detection_threshold",
    "observed_singular_values",
    "shrink",
    "signal_singular_values",
    "squared_overlaps",
]
