"""Index batches together with the facts that the accountant needs."""

from quietgrad.sampling.poisson import PoissonSampler

__all__ = ["PoissonSampler"]
