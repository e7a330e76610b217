"""Settings that change are accounted for step by step: against dp-accounting's own composed events,
against losses drawn step by step, in both directions; and wrong accounting is caught.

False alarms of the Monte Carlo: as in tests/accounting/test_soundness_monte_carlo.py, 3e-7 a
comparison, below 1e-5 in all. Seeds are fixed.
"""

from __future__ import annotations

import functools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.accounting import delta, epsilon, phases
from quietgrad.accounting.composition import compose
from quietgrad.accounting.one_step import Atoms
from quietgrad.accounting.phases import grouped, merge_equal_phases
from quietgrad.accounting.product import composed_sum
from quietgrad.events import EventSequence, ExactClipping, PoissonGaussian, RandomizedClipping
from quietgrad.schedules import Cosine, Course, Linear, Schedules, StepSettings, Stepwise
from quietgrad.schedules.phases import course_of

DELTA = 1e-5
ERRORS, DRAWS = 5.0, 120_000
COURSES = {
    "falling noise": course_of([(40, Schedules(Linear(2.0, 0.8)), "s")], 0.05, 1.0),
    "growing batches": course_of([(40, Schedules(batch_size=Cosine(1.0, 8.0)), "s")], 0.05, 1.0),
    "both": course_of([(30, Schedules(Linear(0.8, 2.0), 1.0, Linear(1, 4)), "s")], 0.1, 1.0),
    "two phases": course_of([(30, Schedules(2.0), "a"), (5, Schedules(0.7), "b")], 0.1, 1.0),
}


# dp-accounting takes a second or two for each setting.
FEW = {
    "falling noise": course_of(
        [(40, Schedules(Stepwise((2.0, 1.2, 0.8), (10, 30))), "s")], 0.05, 1.0
    ),
    "growing batches": course_of(
        [(40, Schedules(batch_size=Stepwise((1.0, 3.0, 8.0), (10, 30))), "s")], 0.05, 1.0
    ),
    "two phases": COURSES["two phases"],
}


@functools.cache
def of_dp_accounting(name: str) -> float:
    course = FEW[name]
    accountant = PLDAccountant(value_discretization_interval=5e-4)
    for count, same in course.stretches:
        gaussian = dp_accounting.GaussianDpEvent(same.noise_multiplier)
        step = dp_accounting.PoissonSampledDpEvent(same.sample_rate, gaussian)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, count))
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize("name", FEW)
def test_epsilon_is_that_of_dp_accounting_s_composed_events(name) -> None:
    found = epsilon(FEW[name].event(ExactClipping()), DELTA)
    assert found == pytest.approx(of_dp_accounting(name), rel=3e-3)


@pytest.mark.parametrize("name", FEW)
def test_the_first_step_s_settings_for_all_would_be_caught(name) -> None:
    course = FEW[name]
    first = course.at(0)
    wrong = PoissonGaussian(first.noise_multiplier, first.sample_rate, course.steps)
    assert abs(epsilon(wrong, DELTA) / of_dp_accounting(name) - 1) > 0.05


def drawn_losses(course: Course, direction: str, rng, sketch_dim: int | None = None):
    """[DRAWS] composed losses of the worst record under the upper distribution."""
    total = np.zeros(DRAWS)
    for step in range(course.steps):
        same = course.at(step)
        scale = np.ones(DRAWS)
        if sketch_dim is not None:  # the envelope that is accounted for
            scale = np.maximum((rng.chisquare(sketch_dim, DRAWS) / sketch_dim) ** -0.5, 1.0)
        mu, q = scale / same.noise_multiplier, same.sample_rate
        x = rng.standard_normal(DRAWS)
        if direction == "remove":
            x += mu * (rng.random(DRAWS) < q)
        loss = np.logaddexp(math.log1p(-q), math.log(q) + mu * x - mu**2 / 2)
        total += loss if direction == "remove" else -loss
    return total


def claims_hold(course, claimed_course, direction, sketch_dim=None) -> tuple[bool, bool]:
    """(sound, tight) of the deltas claimed for one course against losses drawn for another."""
    clipping = ExactClipping() if sketch_dim is None else RandomizedClipping(sketch_dim)
    composed = compose(claimed_course.event(clipping), tail_mass=1e-7)
    loss = composed.remove if direction == "remove" else composed.add
    losses = drawn_losses(course, direction, np.random.default_rng(5), sketch_dim)
    sound = tight = True
    for e in (0.0, loss.epsilon(0.2), loss.epsilon(0.03), loss.epsilon(3e-3)):
        terms = -np.expm1(np.minimum(e - losses, 0.0))
        value, error = float(terms.mean()), float(terms.std() / math.sqrt(DRAWS))
        sound &= value - ERRORS * error <= loss.delta(e)
        tight &= loss.delta(e) <= 1.5 * value + ERRORS * error
    return sound, tight


@pytest.mark.grid(4, "schedules times directions")
@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("name", COURSES)
def test_losses_drawn_step_by_step(name, direction) -> None:
    course = COURSES[name]
    assert claims_hold(course, course, direction) == (True, True)
    # an accountant that believes in the most noise of all steps is caught
    most = course.most_noise / course.least_noise
    if most > 1:
        flat = Course(((course.steps, StepSettings(course.most_noise, course.highest_rate, 1.0)),))
        least = Course(
            ((course.steps, StepSettings(course.most_noise, course.at(0).sample_rate, 1.0)),)
        )
        assert not claims_hold(course, least if name == "both" else flat, direction)[0]


@pytest.mark.grid(1, "two directions")
@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_sketched_losses_drawn_step_by_step(direction) -> None:
    course = course_of([(12, Schedules(Linear(3.0, 1.5)), "s")], 0.2, 1.0)
    assert claims_hold(course, course, direction, 16) == (True, True)


def test_equal_settings_cost_nothing_more_and_grouping_is_an_upper_bound(monkeypatch) -> None:
    course = course_of([(120, Schedules(Cosine(2.0, 0.8)), "s")], 0.05, 1.0)
    event = course.event(ExactClipping())
    assert isinstance(event, EventSequence) and len(event.events) == 120
    whole = compose(event, 1e-10)
    monkeypatch.setattr(phases, "MOST_GROUPS", 30)
    few = compose(event, 1e-10)
    assert len(grouped(event.events)) <= 30
    assert sum(e.steps for e in grouped(event.events)) == 120
    for d in (1e-3, 1e-5):
        for direction in ("remove", "add"):
            exact = getattr(whole, direction).epsilon(d)
            assert exact <= getattr(few, direction).epsilon(d) <= 1.03 * exact
    # alternating settings are two groups, whatever T is
    two = tuple(PoissonGaussian(1.0 + (i % 2), 0.1, 1) for i in range(1000))
    merged = (PoissonGaussian(1.0, 0.1, 500), PoissonGaussian(2.0, 0.1, 500))
    assert merge_equal_phases(two) == merged


@pytest.mark.parametrize("bands", [1, 3])
def test_every_step_of_a_group_counts_at_its_least_noise_and_at_its_highest_rate(bands) -> None:
    """Mutants: a group's mean rate, its mean noise. Epsilon of a smooth schedule hides them."""
    drawn = np.random.default_rng(0)
    for noise, rate in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        sigmas, rates = (
            np.exp(noise * drawn.uniform(size=400)),
            0.01 + rate * 0.3 * drawn.uniform(size=400),
        )
        each = [
            PoissonGaussian(float(s), float(q), bands, ExactClipping(), bands)
            for s, q in zip(sigmas, rates, strict=True)
        ]
        few = grouped(tuple(each), 0.1)
        assert len(few) <= 25 and sum(p.compositions for p in few) == len(each)
        for read, worse in (("noise_multiplier", 1), ("sample_rate", -1)):
            before = sorted(worse * getattr(p, read) for p in each)
            after = sorted(worse * getattr(p, read) for p in few for _ in range(p.compositions))
            assert all(a <= b for a, b in zip(after, before, strict=True)), read


SETTINGS = st.builds(
    StepSettings, st.floats(0.6, 5.0), st.floats(0.01, 0.5), st.sampled_from([0.5, 1.0])
)


@settings(max_examples=15, deadline=None)
@given(st.lists(SETTINGS, min_size=1, max_size=6), st.integers(1, 3), st.randoms())
def test_the_order_of_steps_means_nothing_and_more_of_them_cost_more(steps, bands, random) -> None:
    steps = steps * bands  # whole turns
    course = Course.of(steps)
    event = course.event(ExactClipping(), bands)
    whole = epsilon(event, DELTA)
    assert event.after(course.steps) == event
    released = random.randrange(1, course.steps + 1)
    assert epsilon(event.after(released), DELTA) <= whole * (1 + 1e-3) + 1e-6
    if bands == 1:
        shuffled = random.sample(steps, len(steps))
        again = epsilon(Course.of(shuffled).event(ExactClipping()), DELTA)
        assert again == pytest.approx(whole, rel=1e-3, abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.lists(SETTINGS, min_size=2, max_size=12), st.integers(2, 4))
def test_with_bands_every_part_is_covered(steps, bands) -> None:
    course = Course.of(steps)
    event = course.event(ExactClipping(), bands)
    for part in range(min(bands, course.steps)):
        own = [course.at(t) for t in range(part, course.steps, bands)]
        events = tuple(
            PoissonGaussian(s.noise_multiplier, min(1.0, bands * s.sample_rate), 1) for s in own
        )
        real = epsilon(EventSequence(events), DELTA)
        assert real <= epsilon(event, DELTA) * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize("tail_mass", [1e-12, 1e-3, 0.05])
def test_what_is_beyond_the_ends_of_the_circle_is_counted_at_infinity(tail_mass) -> None:
    """Mutant: mass above the highest loss comes back below the lowest, and is not made up for."""
    drawn, interval = np.random.default_rng(2), 0.05
    atoms, times = [], (7, 3, 5)
    for first, size in ((-20, 45), (-3, 90), (-60, 75)):
        mass = drawn.uniform(size=size) ** 8
        atoms.append(Atoms(first, mass / mass.sum() * 0.999, 0.001))
    low, found, infinity = composed_sum(atoms, times, interval, tail_mass)
    whole, first = np.ones(1), 0
    for atom, n in zip(atoms, times, strict=True):
        first += n * atom.first
        for _ in range(n):
            whole = np.convolve(whole, atom.probabilities)
    losses, true = interval * (first + np.arange(whole.size)), 1 - whole.sum()
    given = interval * (low + np.arange(found.size))
    for e in np.linspace(-2.0, losses[-1], 60):
        above = np.maximum(-np.expm1(e - losses), 0) @ whole + true
        assert infinity + np.maximum(-np.expm1(e - given), 0) @ found >= above - 1e-13


def test_one_step_with_a_tiny_rate_between_large_ones() -> None:
    # deltas of one part in 1e10 survive a composition of unlike steps
    events = (PoissonGaussian(5.0, 0.001, 50), PoissonGaussian(1.0, 0.5, 1))
    alone = delta(events[1], 3.0)
    both = delta(EventSequence(events), 3.0)
    assert alone <= both <= 1.2 * alone
    assert delta(EventSequence(events), 8.0) >= delta(events[1], 8.0) > 0


def test_a_course_reads_back_and_its_prefix_is_its_own() -> None:
    course = COURSES["both"]
    assert Course.from_json(course.to_json()) == course
    for n in (1, 7, 30):
        assert course.first(n) == Course.of([course.at(t) for t in range(n)])
        assert course.first(n).event(ExactClipping()) == course.event(ExactClipping()).after(n)
    assert COURSES["two phases"].first(31).then(course).steps == 61
    with pytest.raises(ValueError, match="step=30 is none of the 30 steps"):
        course.at(30)
    with pytest.raises(ValueError, match="lacks a field"):
        Course.from_json([{"steps": 3}])


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps,
    reason="without a longer double the bound is wider",
)
def test_errors_of_the_transforms_do_not_decide_at_a_small_delta() -> None:
    """In doubles alone they are more than 1e-12 of many unlike steps of a tiny rate: counted, no
    epsilon is left.
    """
    phases = tuple(PoissonGaussian(1 + 0.01 * i, 1e-4, 100) for i in range(12))
    one = PoissonGaussian(1.0, 1e-4, 1200)
    few, whole = (epsilon(EventSequence(phases), d) for d in (1e-8, 1e-12))
    assert few < whole < min(4 * few, epsilon(one, 1e-12))
