"""Cyclic Poisson sampling: parts that no other record's coming or going changes, batches from one
part only, and the rate that is accounted for.

Each statistical test fails a right implementation with probability FALSE_ALARM = 1e-8, shared out
over what it compares; seeds are fixed (the parts of ``partition`` have no seed: their key is public
and constant), so in fact it fails always or never. Where a rate is tested, a wrong one has to be
rejected by the same verdict.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cyclic_cases import BANDS, FALSE_ALARM, IDS, KEY, RATE, RECORDS, sampler_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler, partition
from quietgrad.sampling.parts import index_ids

# Parts


@given(ids=IDS, other=IDS, bands=st.integers(1, 20), data=st.data())
def test_a_records_part_depends_on_that_record_alone(
    ids: list[bytes], other: list[bytes], bands: int, data: st.DataObject
) -> None:
    parts = partition(ids, bands)
    assert parts.dtype == np.int64 and parts.shape == (len(ids),)
    assert parts.min() >= 0 and parts.max() < bands
    gone = data.draw(st.integers(0, len(ids) - 1))
    np.testing.assert_array_equal(
        partition(ids[:gone] + ids[gone + 1 :], bands), np.delete(parts, gone)
    )
    np.testing.assert_array_equal(partition([*other, *ids], bands)[len(other) :], parts)
    np.testing.assert_array_equal(partition(ids[::-1], bands), parts[::-1])


def test_equal_records_fall_into_the_same_part_and_others_need_not() -> None:
    ids = [b"same", b"other", b"same", b"", b"other", b"same"]
    for bands in (2, 7, 100):
        parts = partition(ids, bands)
        assert parts[0] == parts[2] == parts[5] and parts[1] == parts[4]
    assert len(set(partition([bytes([i]) for i in range(50)], 7))) == 7


def uneven(sizes: NDArray[np.int64], cells: int) -> bool:
    """Chi-square, two-sided: parts that are exactly alike are no hash of the records either."""
    expected = sizes.sum() / cells
    statistic = float(((sizes - expected) ** 2).sum() / expected)
    tail = FALSE_ALARM / 2
    return not stats.chi2.ppf(tail, cells - 1) < statistic < stats.chi2.isf(tail, cells - 1)


@pytest.mark.statistical
@pytest.mark.parametrize("bands", [2, 7, 16, 64])
@pytest.mark.parametrize("kind", ["positions", "texts"])
def test_parts_are_nearly_balanced(kind: str, bands: int) -> None:
    ids = (
        index_ids(20_000)
        if kind == "positions"
        else [f"review number {i}".encode() for i in range(20_000)]
    )
    sizes = np.bincount(partition(ids, bands), minlength=bands)
    assert not uneven(sizes, bands), sizes
    tilted = sizes + np.where(np.arange(bands) % 2, sizes // 5, -(sizes // 5))
    assert uneven(tilted, bands)
    # Neighbours in the list are partitioned independently.
    parts = partition(ids, bands)
    pairs = np.bincount(parts[0::2] * bands + parts[1::2], minlength=bands**2)
    assert bands == 64 or not uneven(pairs, bands**2)  # 2.4 pairs a cell are too few for chi-square


@pytest.mark.statistical
def test_turns_and_ladders_are_not_balanced_at_random() -> None:
    # Partitioning in turn depends on the records before; the verdict above knows it from a hash.
    assert uneven(np.bincount(np.arange(20_000) % 16), 16)


@given(count=st.integers(1, 300))
def test_positions_are_different_records(count: int) -> None:
    assert len(set(index_ids(count))) == count
    assert index_ids(count + 1)[:count] == index_ids(count)


# Batches


def indicators(sampler: PoissonSampler, steps: int, key: RandomKey = KEY) -> NDArray[np.bool_]:
    """[steps, records], whether a record is in a batch."""
    found = np.zeros((steps, sampler.dataset_size), dtype=bool)
    for t in range(steps):
        found[t, sampler.indices(key, t)] = True
    return found


@given(
    bands=st.integers(1, 12),
    rate=st.floats(0.001, 1),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 10**6),
)
def test_a_batch_holds_members_of_the_part_whose_turn_it_is(
    bands: int, rate: float, step: int, seed: int
) -> None:
    sampler = sampler_of(bands, rate, 200)
    indices = sampler.indices(RandomKey.from_seed(seed), step)
    assert indices.dtype == np.int64
    assert (np.diff(indices) > 0).all()
    assert (sampler.parts[indices] == step % bands).all()
    if bands * rate >= 1:
        np.testing.assert_array_equal(indices, np.flatnonzero(sampler.parts == step % bands))


def test_every_record_gets_its_turn_and_two_turns_are_bands_apart() -> None:
    found = indicators(sampler_of(BANDS, 0.2), 40 * BANDS)
    assert found.any(axis=0).all()
    for record in range(RECORDS):
        steps = np.flatnonzero(found[:, record])
        assert len(set(steps % BANDS)) == 1
        assert (np.diff(steps) >= BANDS).all()
    assert any(
        (np.diff(np.flatnonzero(found[:, record])) == BANDS).any() for record in range(RECORDS)
    )


def wrong_rate(found: NDArray[np.bool_], parts: NDArray[np.int64], bands: int, rate: float) -> bool:
    """Whether inclusion in the steps of a record's part is not independent with ``rate``: totals by
    record, by step, and pairs of turns (each exact or chi-square).
    """
    p_values = []
    for part in range(bands):
        own = found[part::bands][:, parts == part]
        turns, members = own.shape
        for counts, trials in ((own.sum(axis=0), turns), (own.sum(axis=1), members)):
            statistic = float(((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate)))
            p_values.append(
                2
                * min(stats.chi2.cdf(statistic, counts.size), stats.chi2.sf(statistic, counts.size))
            )
        together = int((own[0::2] & own[1::2]).sum())
        p_values.append(stats.binomtest(together, turns // 2 * members, rate**2).pvalue)
        p_values.append(stats.binomtest(int(own.sum()), own.size, rate).pvalue)
    return min(p_values) < FALSE_ALARM / len(p_values)


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("bands", [1, 2, 8])
def test_records_are_drawn_independently_at_bands_times_the_rate(bands: int, seed: int) -> None:
    sampler = sampler_of(bands)
    found = indicators(sampler, 400 * bands, RandomKey.from_seed(seed))
    assert sampler.participation_rate == pytest.approx(bands * RATE)
    assert not wrong_rate(found, sampler.parts, bands, bands * RATE)
    for wrong in (RATE, 2 * bands * RATE, 1.1 * bands * RATE):
        if wrong != bands * RATE:
            assert wrong_rate(found, sampler.parts, bands, wrong)


@pytest.mark.statistical
def test_wrong_samplers_are_rejected() -> None:
    sampler = sampler_of()
    found, rate = indicators(sampler, 400 * BANDS), sampler.participation_rate
    parts = sampler.parts
    same_coins_each_round = found.copy()
    same_coins_each_round[BANDS:] = np.tile(found[:BANDS], (399, 1))
    fixed_size = np.zeros_like(found)
    generator = np.random.default_rng(0)
    for t in range(len(found)):
        members = np.flatnonzero(parts == t % BANDS)
        fixed_size[t, generator.choice(members, round(rate * len(members)), replace=False)] = True
    plain = indicators(sampler_of(1), 400 * BANDS)
    for wrong in (same_coins_each_round, fixed_size, plain):
        assert wrong_rate(wrong, parts, BANDS, rate)


def test_batches_are_keyed_and_depend_on_nothing_else() -> None:
    sampler = sampler_of(rate=0.2)
    forward = [sampler.indices(KEY, step) for step in range(9)]
    np.random.seed(1)
    torch.manual_seed(1)
    backward = [
        sampler_of(rate=0.2).indices(RandomKey.from_seed(3), step) for step in reversed(range(9))
    ]
    for one, other in zip(forward, reversed(backward)):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(forward[0], forward[BANDS])
    assert not np.array_equal(forward[0], sampler.indices(RandomKey.from_seed(4), 0))
    assert not np.array_equal(forward[0], sampler.indices(RandomKey.from_entropy(), 0))


def test_one_band_is_plain_poisson_sampling() -> None:
    sampler, plain = sampler_of(1), PoissonSampler(RECORDS, RATE)
    for step in range(5):
        np.testing.assert_array_equal(sampler.indices(KEY, step), plain.indices(KEY, step))


def test_an_empty_part_makes_empty_batches() -> None:
    sampler = PoissonSampler(3, 0.5, 4, np.array([0, 2, 2]))
    assert all(sampler.indices(KEY, step).size == 0 for step in (1, 3, 5))
    assert set(np.concatenate([sampler.indices(KEY, step) for step in range(0, 80, 2)])) == {
        0,
        1,
        2,
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dataset_size": 0, "parts": np.zeros(0, int)}, ValueError, "dataset_size=0"),
        ({"dataset_size": 5.0}, TypeError, "dataset_size"),
        ({"sample_rate": 0.0}, ValueError, "sample_rate"),
        ({"sample_rate": 1.5}, ValueError, "sample_rate"),
        ({"sample_rate": math.nan}, ValueError, "sample_rate"),
        ({"bands": 0}, ValueError, "bands=0 is below 1"),
        ({"bands": 2.0}, TypeError, "bands"),
        ({"parts": None}, ValueError, "bands=2 needs parts"),
        ({"parts": np.zeros(4, int)}, ValueError, r"parts has the shape \(4,\) for 5 records"),
        ({"parts": np.zeros((5, 1), int)}, ValueError, "parts has the shape"),
        ({"parts": np.array([0, 1, 2, 0, 1])}, ValueError, r"parts must be in 0 \.\. 1"),
        ({"parts": np.array([0, -1, 1, 0, 1])}, ValueError, r"parts must be in 0 \.\. 1"),
    ],
    ids=str,
)
def test_bad_samplers_are_refused_by_name(
    change: dict, error: type[Exception], message: str
) -> None:
    right = {"dataset_size": 5, "sample_rate": 0.1, "bands": 2, "parts": np.array([0, 1, 1, 0, 1])}
    PoissonSampler(**right)
    with pytest.raises(error, match=message):
        PoissonSampler(**(right | change))
