"""``ClippedSum`` to ``NoisySum``: the only room that releases anything. Independent noise, and noise correlated across steps by a banded mixing matrix."""

from quietgrad.noise.bands import BandChoice, choose_bands
from quietgrad.noise.correlated import BandedNoise, NoiseHistory
from quietgrad.noise.gaussian import GaussianNoise
from quietgrad.noise.mixing import MixingMatrix, mixing_matrix
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.noise.workloads import Curvature, PrefixSums, curvature_workload, prefix_sum_workload

__all__ = [
    "BandChoice",
    "BandedNoise",
    "Curvature",
    "GaussianNoise",
    "MixingMatrix",
    "NoiseHistory",
    "NoisySum",
    "PrefixSums",
    "choose_bands",
    "curvature_workload",
    "mixing_matrix",
    "prefix_sum_workload",
]
