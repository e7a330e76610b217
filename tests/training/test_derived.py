"""The rule for settings that nobody gave: possible sizes, monotone in budget and hours, close to
the accountant it stands for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietgrad.accounting import delta as delta_of
from quietgrad.accounting import noise_multiplier
from quietgrad.events import PoissonGaussian
from quietgrad.training.derived.rule import (
    STEPS,
    PublicFacts,
    Reads,
    batch_and_steps,
    mu_of,
    mu_of_noise,
    rates,
)

UNITS = st.integers(1, 10**8)
MU = st.floats(1e-3, 50)
TRAINED = st.sampled_from(sorted(STEPS))
EXAMPLES = st.floats(1, 1e12)


@given(UNITS, MU, TRAINED, EXAMPLES)
def test_sizes_are_possible(units: int, mu: float, trained: Any, examples: float) -> None:
    batch, steps = batch_and_steps(PublicFacts(units, mu, trained, examples=examples))
    assert 1 <= batch <= units
    assert 1 <= steps <= STEPS[trained]
    assert batch * steps <= max(examples, 1)


@given(UNITS, MU, st.floats(1, 10), TRAINED, EXAMPLES)
def test_a_larger_budget_takes_no_smaller_batch(
    units: int, mu: float, more: float, trained: Any, examples: float
) -> None:
    facts = PublicFacts(units, mu, trained, examples=examples)
    batch, _ = batch_and_steps(facts)
    assert batch_and_steps(replace(facts, mu=mu * more))[0] >= batch


@given(UNITS, MU, st.floats(1, 100), TRAINED, EXAMPLES)
def test_more_hours_take_no_fewer_steps(
    units: int, mu: float, more: float, trained: Any, examples: float
) -> None:
    facts = PublicFacts(units, mu, trained, examples=examples)
    _, steps = batch_and_steps(facts)
    assert batch_and_steps(replace(facts, examples=examples * more))[1] >= steps


@given(UNITS, MU, TRAINED, EXAMPLES, st.integers(1, 1000), st.integers(1, 10**6))
def test_given_sizes_stay(
    units: int, mu: float, trained: Any, examples: float, steps: int, batch: int
) -> None:
    facts, batch = PublicFacts(units, mu, trained, examples=examples), min(batch, units)
    assert batch_and_steps(facts, batch, steps) == (batch, steps)
    assert batch_and_steps(facts, batch=batch)[0] == batch
    assert batch_and_steps(facts, steps=steps)[1] == steps


@given(UNITS, st.floats(1e-3, 10), st.floats(1, 5), TRAINED, st.floats(0.1, 100))
def test_rates_grow_with_the_budget(
    units: int, mu: float, more: float, trained: Any, reads: float
) -> None:
    facts = PublicFacts(units, mu, trained, 1000, Reads(reads, 10 * reads))
    batch, steps = batch_and_steps(facts)
    rate, head = rates(facts, batch, steps)
    higher, higher_head = rates(replace(facts, mu=mu * more), batch, steps)
    assert 0 < rate <= higher * 1.05  # two digits
    assert (head is None) == (trained in ("head", "new"))
    if head is not None and higher_head is not None:
        assert 0 < head <= higher_head * 1.05


@given(st.integers(30, 10**4), st.floats(1, 100))
def test_noise_alone_moves_an_output_by_one(steps: int, length: float) -> None:
    """Where nothing stands out of the noise, whatever the head reads and however many steps."""
    facts = PublicFacts(500, 1e-3, "head", 10**6, Reads(length, 1e-9))
    rate, _ = rates(facts, 50, steps)
    assert rate * math.sqrt(steps / 3) * length == pytest.approx(1, abs=0.08)  # two digits


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (2.0, 1e-5), (8.0, 1e-3)])
def test_mu_is_the_gaussian_mechanism_s(epsilon: float, delta: float) -> None:
    """The accountant knows that mechanism as one step with everyone in it."""
    one = PoissonGaussian(noise_multiplier=1 / mu_of(epsilon, delta), sample_rate=1.0, steps=1)
    assert delta_of(one, epsilon) == pytest.approx(delta, rel=1e-2)


@pytest.mark.parametrize(("rate", "steps"), [(0.07, 150), (0.02, 400)])
def test_the_limit_theorem_is_close_to_the_accountant(rate: float, steps: int) -> None:
    sigma = noise_multiplier(2.0, 1e-5, sample_rate=rate, steps=steps)
    assert mu_of_noise(sigma, rate, steps) == pytest.approx(mu_of(2.0, 1e-5), rel=0.15)


def test_the_batch_is_as_large_as_it_helps() -> None:
    """Full batches would lessen the accountant's noise by less than a tenth; a quarter of the batch
    would raise it by more than a third.
    """
    units, delta = 30_000, 1e-5
    batch, steps = batch_and_steps(PublicFacts(units, mu_of(2.0, delta), "head"))

    def noise(size: int) -> float:
        rate = size / units
        return noise_multiplier(2.0, delta, sample_rate=rate, steps=steps) / size

    assert noise(units) > 0.9 * noise(batch)
    assert noise(batch // 4) > 1.33 * noise(batch)


def test_every_epsilon_that_can_be_asked_for_has_a_budget() -> None:
    found = [mu_of(epsilon, 1e-5) for epsilon in (1e-8, 1.0, 1e4, 1e7, 1e12)]
    assert found == sorted(found)
