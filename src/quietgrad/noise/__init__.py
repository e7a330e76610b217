"""``ClippedSum`` to ``NoisySum``: the only room that releases anything.

One mechanism: noise that is independent, or correlated across steps by a banded mixing matrix.
"""

from quietgrad.noise.correlation.bands import BandChoice, choose_bands
from quietgrad.noise.correlation.curvature import Curvature, curvature_workload
from quietgrad.noise.correlation.mixing import MixingMatrix, mixing_matrix
from quietgrad.noise.correlation.workloads import PrefixSums, prefix_sum_workload
from quietgrad.noise.mechanism import GaussianNoise, NoiseHistory
from quietgrad.noise.methods import BandedNoise, IndependentNoise, MatrixNoise
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.noise.sources.secure import SecureSource
from quietgrad.noise.sources.source import NoiseSource, noise_source
from quietgrad.noise.toeplitz import ToeplitzNoise

__all__ = [
    "BandChoice",
    "BandedNoise",
    "Curvature",
    "GaussianNoise",
    "IndependentNoise",
    "KeyedSource",
    "MatrixNoise",
    "MixingMatrix",
    "NoiseHistory",
    "NoiseSource",
    "NoisySum",
    "PrefixSums",
    "SecureSource",
    "ToeplitzNoise",
    "choose_bands",
    "curvature_workload",
    "mixing_matrix",
    "noise_source",
    "prefix_sum_workload",
]
