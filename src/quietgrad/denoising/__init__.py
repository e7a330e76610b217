"""``NoisySum`` to a better-aligned ``NoisySum``: a function of released values and public facts, so it costs no privacy."""

from quietgrad.denoising.denoiser import SpectralDenoiser, denoise_matrix
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
from quietgrad.denoising.persistence import persistent_part

__all__ = [
    "MomentNoise",
    "SpectralAdamW",
    "SpectralDenoiser",
    "SpectralSGD",
    "bulk_edge",
    "denoise_matrix",
    "detection_threshold",
    "observed_singular_values",
    "persistent_part",
    "shrink",
    "signal_singular_values",
    "squared_overlaps",
]
