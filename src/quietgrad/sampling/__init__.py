"""Index batches together with the facts that the accountant needs."""

from quietgrad.sampling.cyclic import CyclicPoissonSampler, deal
from quietgrad.sampling.poisson import PoissonSampler

__all__ = ["CyclicPoissonSampler", "PoissonSampler", "deal"]
