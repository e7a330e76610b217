"""Poisson sampling: every record enters every batch independently with rate q, and nothing else
does it.

Each statistical test computes four p-values and fails if the smallest is below FALSE_ALARM / 4, so
a right sampler fails it with probability FALSE_ALARM = 1e-8. The same verdict has to reject
samplers that other libraries use and the accountant does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler

FALSE_ALARM = 1e-8
RECORDS, RATE, STEPS = 200, 0.1, 3000
Indicators = NDArray[np.bool_]  # [steps, records], whether a record is in a batch


def indicators(batches: list[NDArray[np.int64]], records: int = RECORDS) -> Indicators:
    found = np.zeros((len(batches), records), dtype=bool)
    for row, indices in zip(found, batches):
        row[indices] = True
    return found


def poisson(seed: int, rate: float = RATE) -> Indicators:
    sampler, key = PoissonSampler(RECORDS, rate), RandomKey.from_seed(seed)
    return indicators([sampler.indices(key, step) for step in range(STEPS)])


def fixed_size() -> Indicators:
    generator = np.random.default_rng(0)
    return indicators(
        [generator.choice(RECORDS, int(RATE * RECORDS), replace=False) for _ in range(STEPS)]
    )


def shuffled_epochs() -> Indicators:
    generator = np.random.default_rng(0)
    epochs = [
        generator.permutation(RECORDS).reshape(int(1 / RATE), -1) for _ in range(int(STEPS * RATE))
    ]
    return indicators([batch for epoch in epochs for batch in epoch])


def random_sizes_of_shuffled_records() -> Indicators:
    # Binomial sizes, but records come in turn: none is in two consecutive batches.
    generator = np.random.default_rng(0)
    batches, waiting = [], np.empty(0, dtype=np.int64)
    for _ in range(STEPS):
        size = generator.binomial(RECORDS, RATE)
        while len(waiting) < size:
            waiting = np.concatenate([waiting, generator.permutation(RECORDS)])
        batches.append(np.unique(waiting[:size]))
        waiting = waiting[size:]
    return indicators(batches)


def repeated_coins() -> Indicators:
    return np.repeat(poisson(1)[: STEPS // 2], 2, axis=0)


def records_in_pairs() -> Indicators:
    return np.repeat(poisson(1)[:, : RECORDS // 2], 2, axis=1)


def chi_square(counts: NDArray[np.int64], trials: int, rate: float) -> float:
    """Two-sided p-value that the counts are independent binomials: both too much and too little
    spread are wrong.
    """
    statistic = float(np.sum((counts - trials * rate) ** 2) / (trials * rate * (1 - rate)))
    return 2 * min(stats.chi2.cdf(statistic, counts.size), stats.chi2.sf(statistic, counts.size))


def p_values(found: Indicators) -> dict[str, float]:
    steps, records = found.shape
    # Disjoint pairs, so that the products are independent of each other.
    across_steps = int((found[0::2] & found[1::2]).sum())
    across_records = int((found[:, 0::2] & found[:, 1::2]).sum())
    pairs = steps * records // 2
    return {
        "records": chi_square(found.sum(axis=0), steps, RATE),
        "batch sizes": chi_square(found.sum(axis=1), records, RATE),
        "two steps": stats.binomtest(across_steps, pairs, RATE**2).pvalue,
        "two records": stats.binomtest(across_records, pairs, RATE**2).pvalue,
    }


def rejected(found: Indicators) -> bool:
    return min(p_values(found).values()) < FALSE_ALARM / 4


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_inclusion_is_independent_with_the_rate(seed: int) -> None:
    assert not rejected(poisson(seed)), p_values(poisson(seed))


@pytest.mark.statistical
@pytest.mark.parametrize(
    "wrong",
    [
        fixed_size,
        shuffled_epochs,
        random_sizes_of_shuffled_records,
        repeated_coins,
        records_in_pairs,
        lambda: poisson(0, rate=1.05 * RATE),
    ],
    ids=[
        "fixed-size",
        "shuffled-epochs",
        "records-in-turn",
        "repeated-coins",
        "pairs",
        "five-percent-more",
    ],
)
def test_other_samplers_are_rejected(wrong: Callable[[], Indicators]) -> None:
    assert rejected(wrong()), p_values(wrong())


@pytest.mark.statistical
def test_noise_and_sampling_do_not_share_a_stream() -> None:
    # |correlation| sqrt(n) of independent draws is nearly |standard normal|; the bound is exceeded
    # with probability FALSE_ALARM.
    key, n = RandomKey.from_seed(0), 20_000
    coins = key.generator("sampling", 3).random(n)
    others = [key.generator("noise", 3).random(n), key.generator("projection", 3).random(n)]
    bound = stats.norm.isf(FALSE_ALARM / 4) / np.sqrt(n)
    for other in others:
        assert abs(np.corrcoef(coins, other)[0, 1]) < bound
    assert abs(np.corrcoef(coins, key.generator("sampling", 3).random(n))[0, 1]) > bound


def test_empty_batches_occur_and_are_released() -> None:
    run = (
        PrivacyConfig(noise_multiplier=1.0, sample_rate=0.3, steps=20, seed=0, data_are_public=True)
        .build(2)
        .start()
    )
    model = nn.Linear(3, 2)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    sizes = []
    for indices in run.batches():
        noisy = run.step(model, loss, (x[indices], y[indices]))
        sizes.append(len(indices))
        assert (
            float(noisy.gradients["weight"].abs().min()) > 0
        )  # an empty batch gets noise like any other
    assert run.released == 20
    assert {0, 1} <= set(sizes)


def test_batches_are_keyed_and_depend_on_nothing_else() -> None:
    sampler = PoissonSampler(1000, 0.2)
    key = RandomKey.from_seed(7)
    forward = [sampler.indices(key, step) for step in range(5)]
    np.random.seed(1)
    torch.manual_seed(1)
    state = np.random.get_state()[1].copy()
    key.generator("noise", 0).standard_normal(100)
    backward = [sampler.indices(RandomKey.from_seed(7), step) for step in reversed(range(5))]
    for one, other in zip(forward, reversed(backward)):
        np.testing.assert_array_equal(one, other)
    assert np.array_equal(state, np.random.get_state()[1])
    assert not np.array_equal(forward[0], forward[1])
    assert not np.array_equal(forward[0], sampler.indices(RandomKey.from_seed(8), 0))
    assert not np.array_equal(forward[0], sampler.indices(RandomKey.from_entropy(), 0))


def test_rate_one_takes_every_record_every_time() -> None:
    sampler = PoissonSampler(50, 1.0)
    for step in range(20):
        np.testing.assert_array_equal(
            sampler.indices(RandomKey.from_entropy(), step), np.arange(50)
        )


@pytest.mark.parametrize("rate", [1e-20, 1e-16, 2.5e-16, 3 * 2.0**-53, 1e-3, 0.1, 0.7, 1.0])
def test_no_more_coins_are_heads_than_the_rate_says(rate: float) -> None:
    """Below 2^-53 one coin of all, 0, was heads still: more often than is accounted for."""
    nearest = Fraction(rate) * 2**53  # how many of 2^53 coins are heads, if they all came
    around = range(max(0, int(nearest) - 3), min(2**53, int(nearest) + 4))

    class Coins:
        def generator(self, *_: object) -> Coins:
            return self

        def random(self, count: int) -> NDArray[np.float64]:
            return np.array([k / 2**53 for k in around])

    heads = PoissonSampler(len(around), rate).indices(cast(Any, Coins()), 0)
    assert [around[i] for i in heads] == [k for k in around if k + 1 <= nearest]


def test_indices_are_sorted_whole_numbers_inside_the_data() -> None:
    indices = PoissonSampler(300, 0.5).indices(RandomKey.from_seed(0), 0)
    assert indices.dtype == np.int64
    assert np.all(np.diff(indices) > 0)
    assert indices.min() >= 0 and indices.max() < 300


@pytest.mark.parametrize("rate", [0, -0.1, 1.01, float("nan")])
def test_rate_must_be_a_probability(rate: float) -> None:
    with pytest.raises(ValueError, match="sample_rate"):
        PoissonSampler(10, rate)


def test_there_must_be_records() -> None:
    with pytest.raises(ValueError, match="dataset_size"):
        PoissonSampler(0, 0.5)
    with pytest.raises(TypeError, match="dataset_size"):
        PoissonSampler(10.0, 0.5)
