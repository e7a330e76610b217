"""A cyclic sampler of a few hundred records."""

from __future__ import annotations

from hypothesis import strategies as st

from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler, partition
from quietgrad.sampling.parts import index_ids

FALSE_ALARM = 1e-8
RECORDS, RATE, BANDS = 600, 0.05, 4
KEY = RandomKey.from_seed(3)
IDS = st.lists(st.binary(max_size=20), min_size=1, max_size=30)


def sampler_of(bands: int = BANDS, rate: float = RATE, records: int = RECORDS) -> PoissonSampler:
    return PoissonSampler(records, rate, bands, partition(index_ids(records), bands))
