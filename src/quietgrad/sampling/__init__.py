"""Index batches together with the facts that the accountant needs."""

from quietgrad.sampling.parts import partition
from quietgrad.sampling.poisson import PoissonSampler

__all__ = ["PoissonSampler", "partition"]
