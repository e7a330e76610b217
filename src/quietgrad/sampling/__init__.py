"""Index batches together with the facts that the accountant needs."""

from quietgrad.sampling.parts import partition
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.sampling.users import UserIndices, UserRecords

__all__ = ["PoissonSampler", "UserIndices", "UserRecords", "partition"]
