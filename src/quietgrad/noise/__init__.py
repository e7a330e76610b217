"""``ClippedSum`` to ``NoisySum``: the only room that releases anything."""

from quietgrad.noise.gaussian import GaussianNoise
from quietgrad.noise.noisy_sum import NoisySum

__all__ = ["GaussianNoise", "NoisySum"]
