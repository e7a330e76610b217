"""Exact events against dp-accounting, Opacus' PRV accountant and the closed form at q = 1; sketched
events against a second accountant.

SETTINGS holds 63 (q, sigma, T, delta). Where another accountant is a bound and not the truth, the
comparison says by how much.
"""

import math
import warnings

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants.analysis import prv
from scipy import optimize, special

from quietgrad.accounting import delta, epsilon, product, trade_off
from quietgrad.accounting.composition import compose
from quietgrad.events import EventSequence, PoissonGaussian, RandomizedClipping, SideRelease

from .second_accountant import mixed_scales, mixture_epsilon

DELTAS = (1e-3, 1e-5, 1e-9)
# (sampling rate, noise multiplier, steps, deltas); the slow ones for others (many steps of a tiny
# rate) at fewer deltas.
EVENTS = [
    (1e-4, 0.4, 20000, (1e-9,)),
    (1e-4, 1.0, 20000, (1e-5,)),
    (1e-3, 0.5, 1000, DELTAS),
    (1e-3, 0.8, 3000, (1e-5, 1e-7, 1e-9)),
    (1e-3, 2.0, 20000, (1e-5,)),
    (0.01, 0.5, 1, DELTAS),
    (0.01, 0.8, 300, (1e-3, 1e-5, 1e-7, 1e-9)),
    (0.01, 1.5, 10000, DELTAS),
    (0.01, 4.0, 20000, DELTAS),
    (64 / 1225, 1.0, 20, (1e-3, 1e-5, 1e-7, 1e-9)),
    (64 / 1225, 3.99, 200, (1e-3, 1e-5, 1e-7, 1e-9)),
    (64 / 1225, 10.0, 5000, DELTAS),
    (0.2, 1.0, 2, DELTAS),
    (0.2, 2.0, 20, (1e-3, 1e-5, 1e-7, 1e-9)),
    (0.2, 8.0, 500, (1e-3, 1e-5, 1e-7, 1e-9)),
    (0.2, 20.0, 20000, DELTAS),
    (0.6, 1.0, 1, DELTAS),
    (0.6, 3.0, 10, DELTAS),
    (1.0, 1.0, 1, (1e-3, 1e-5, 1e-7, 1e-9)),
    (1.0, 4.0, 20, DELTAS),
    (1.0, 20.0, 5000, DELTAS),
]
SETTINGS = [(q, sigma, steps, d) for q, sigma, steps, deltas in EVENTS for d in deltas]
DEFAULT_INTERVAL = 1e-4  # dp-accounting's
MOST_PRV_POINTS = 1_300_000


def test_grid_is_wide_enough():
    assert len(SETTINGS) >= 60
    assert sum(not prv_mesh_is_out_of_hand(q, steps) for q, _, steps, _ in SETTINGS) >= 60
    for values, low, high in zip(zip(*SETTINGS), (1e-4, 0.4, 1, 1e-9), (1, 20, 20000, 1e-3)):
        assert (min(values), max(values)) == (low, high)


def one_step_spread(q, sigma):
    """Standard deviation of the one-step loss to first order: the scale that a grid of losses has
    to resolve.
    """
    return q * math.sqrt(math.expm1(min(sigma**-2, 700.0))) if q < 0.01 or sigma > 1 else q / sigma


@pytest.mark.grid(4, "the extremes and some between; the slow part is the other accountant")
@pytest.mark.parametrize(("q", "sigma", "steps", "deltas"), EVENTS)
def test_dp_accounting_agrees(q, sigma, steps, deltas):
    def theirs(interval):
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=q, value_discretization_interval=interval
        )
        return one.self_compose(steps)

    default = theirs(DEFAULT_INTERVAL)
    # With fewer than ten intervals to the spread, theirs is the loose one: no more than a bound
    # from above.
    resolved = min(DEFAULT_INTERVAL, one_step_spread(q, sigma) / 10)
    fine = default if resolved == DEFAULT_INTERVAL else theirs(resolved)
    for d in deltas:
        ours = epsilon(PoissonGaussian(sigma, q, steps), d)
        # At the smallest deltas the rounding of the Fourier transform counts: ours adds it to
        # delta, theirs does not.
        allowance = 1e-3 + (1e-3 * ours if d < 1e-8 else 0.0)
        assert ours == pytest.approx(fine.get_epsilon_for_delta(d), abs=allowance)
        assert ours <= default.get_epsilon_for_delta(d) + allowance


def prv_epsilon(q, sigma, steps, d, error):
    """Lower bound, estimate and upper bound of the "remove" direction, or None where PRV cannot
    give them to 1 %.
    """
    law = prv.PoissonSubsampledGaussianPRV(q, sigma)
    delta_error = d / 1000
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter(
            "ignore"
        )  # log(0) at q = 1, quadrature near the lower end of the loss
        try:
            reach = prv.compute_safe_domain_size(
                [law], [steps], eps_error=error, delta_error=delta_error
            )
            mesh = error / math.sqrt(steps * math.log(12 / delta_error) / 2)
            if 2 * reach / mesh > MOST_PRV_POINTS:
                return None
            domain = prv.Domain.create_aligned(-reach, reach, mesh)
            truncated = prv.TruncatedPrivacyRandomVariable(law, domain.t_min, domain.t_max)
            composed = prv.compose_heterogeneous([prv.discretize(truncated, domain)], [steps])
            low, estimate, high = composed.compute_epsilon(d, delta_error, error)
        except (RuntimeError, ValueError):
            return None
    return (low, estimate, high) if high - low <= 0.011 * estimate else None


@pytest.mark.grid(8, "the extremes and some between; the slow part is the other accountant")
@pytest.mark.parametrize(("q", "sigma", "steps", "d"), SETTINGS)
def test_prv_agrees(q, sigma, steps, d):
    ours = epsilon(PoissonGaussian(sigma, q, steps), d)
    assert math.isfinite(ours) and ours >= 0
    # The error that PRV guarantees is set to half a per cent either way; what it makes is far
    # smaller.
    theirs = prv_epsilon(q, sigma, steps, d, error=0.004 * ours)
    if theirs is None:
        assert prv_mesh_is_out_of_hand(q, steps)
        return
    low, estimate, _ = theirs
    assert low <= ours
    assert ours == pytest.approx(estimate, rel=0.01)
    assert ours == pytest.approx(estimate, rel=2e-3)  # what is really met


def prv_mesh_is_out_of_hand(q, steps):
    """Where a comparison may be given up: many steps at a tiny rate have a small epsilon, and PRV's
    mesh follows epsilon / sqrt(T).
    """
    return q <= 1e-3 and steps >= 20000


def gaussian_delta(eps, mu):
    """delta(eps) of the Gaussian mechanism with shift mu (Balle and Wang 2018)."""
    return special.ndtr(mu / 2 - eps / mu) - math.exp(eps + special.log_ndtr(-mu / 2 - eps / mu))


@pytest.mark.grid(12, "a closed form at many deltas")
@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("steps", [1, 2, 10, 200, 20000])
@pytest.mark.parametrize("d", [0.3, 1e-5, 1e-9])
def test_without_subsampling_it_is_the_gaussian_mechanism(sigma, steps, d):
    mu = math.sqrt(steps) / sigma
    event = PoissonGaussian(sigma, 1.0, steps)
    if gaussian_delta(0.0, mu) <= d:
        assert delta(event, 0.0) >= gaussian_delta(0.0, mu) * (1 - 1e-9)
        assert delta(event, 0.0) <= gaussian_delta(0.0, mu) * (1 + 1e-3)
        return
    eps = optimize.brentq(lambda e: gaussian_delta(e, mu) - d, 0.0, mu**2 / 2 + 10 * mu, xtol=1e-13)
    ours = epsilon(event, d)
    assert eps - 1e-9 <= ours <= eps * (1 + 1e-4) + 3e-4
    true = gaussian_delta(eps, mu)
    assert delta(event, eps) >= true * (1 - 1e-9)
    if (
        mu <= 6
        # epsilons of practical size; beyond, a relative error of 1e-4 in epsilon is more than 1e-3
        # in delta
    ):
        assert delta(event, eps) <= true * (1 + 1e-3) + 1e-12


@pytest.mark.grid(1, "the slow part is the second accountant")
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "k", "largest_loss"),
    [
        (64 / 1225, 4.275, 200, 32, 1.5),
        (0.5, 3.0, 5, 16, 14.0),
        (0.02, 2.0, 50, 32, 8.0),
        (0.05, 8.0, 100, 8, 4.0),
        (0.9, 5.0, 1, 8, 12.0),
    ],
)
def test_sketched_events_agree_with_the_second_accountant(q, sigma, steps, k, largest_loss):
    """Between Z rounded down and Z rounded up, in 400 bins each, up to the per cent that the 256
    bins of ours may add.
    """
    d, interval = 1e-5, min(2e-3, q / sigma / 25)
    ours = epsilon(PoissonGaussian(sigma, q, steps, RandomizedClipping(k)), d)
    low, high = (
        mixture_epsilon(
            *mixed_scales(k, 1e-4 * d / steps, 400, upwards=up),
            sigma,
            q,
            steps,
            d,
            interval,
            largest_loss,
        )
        for up in (False, True)
    )
    assert low <= high
    assert low * (1 - 1e-4) <= ours <= high * (1 + (5e-3 if k > 8 else 1e-2))


@pytest.mark.parametrize("sigma", [0.1, 1 / 16])
@pytest.mark.parametrize("direction", ["remove", "add", None])
def test_errors_of_little_noise_are_not_above_the_closed_form(sigma, direction):
    """Losses of less than -37 fell together in one: of an attacker who is to be wrong once in 1e20
    about those who are there, 0.9998 were said to miss the record, where 0.23 do.
    """
    rates = np.geomspace(1e-20, 0.5, 60)
    true = special.ndtr(-special.ndtri(rates) - 1 / sigma)
    found = trade_off(PoissonGaussian(sigma, 1.0, 1), rates, direction)
    assert (found <= true * (1 + 1e-9) + 1e-15).all()
    assert (found >= 0.97 * true - 1e-15).all()  # and no looser than the grid


@pytest.mark.parametrize("sigma", [0.0262, 0.0268, 0.03])
def test_where_tails_of_float64_end_no_delta_is_below_the_closed_form(sigma):
    """Tails end near 1e-310, at losses of 709. The interval that holds the end had the mass of all
    that lies beyond it, and its losses were taken for smaller ones: 0.6822 for 0.6823.
    """
    composed = compose(PoissonGaussian(sigma, 1.0, 1), tail_mass=1e-14)
    for loss in (composed.remove, composed.add):
        near = loss.losses[(loss.losses > 600) & (loss.losses < 720)]
        assert near.size > 50
        # exp(e) and the tail beside it have no float64 apart
        others = np.exp(near + special.log_ndtr(-0.5 / sigma - near * sigma))
        true = special.ndtr(0.5 / sigma - near * sigma) - others
        assert (loss.deltas(near) >= true * (1 - 1e-11) - 1e-15).all()


def test_both_directions_compose_alike_where_every_record_takes_part():
    composed = compose(PoissonGaussian(0.1, 1.0, 10), tail_mass=1e-12)
    true = optimize.brentq(lambda e: gaussian_delta(e, 10 * math.sqrt(10)) - 1e-5, 400, 900)
    for loss in (composed.remove, composed.add):
        assert true <= loss.epsilon(1e-5) <= true * (1 + 1e-3)


longer = pytest.mark.skipif(
    np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps,
    reason="without a longer double the bound is wider",
)


@longer
@pytest.mark.parametrize(("sigma", "steps"), [(20.0, 1000), (50.0, 20_000), (0.7, 3)])
def test_errors_of_the_transforms_do_not_decide_at_a_tiny_delta(sigma, steps):
    """Of many steps alike dp-accounting's transforms err by up to 1e-12: made again in long
    doubles. Of a small rate no epsilon was left there. On some processors none of the errors
    is negative, and nothing shows them.
    """
    found = epsilon(PoissonGaussian(sigma, 1.0, steps), 1e-12)
    mu = math.sqrt(steps) / sigma
    assert gaussian_delta(found, mu) <= 1e-12 <= gaussian_delta(found * 0.998, mu)
    of_few = epsilon(PoissonGaussian(1.0, 1e-4, 1200), 1e-12)  # infinity before
    assert epsilon(PoissonGaussian(1.0, 1e-4, 1200), 1e-11) < of_few < 0.11


def test_without_a_longer_double_the_better_of_two_bounds_is_told(monkeypatch):
    event = PoissonGaussian(1.0, 1e-4, 1201)  # not asked for before
    monkeypatch.setattr(product, "PRECISIONS", (np.float64, np.float64))
    assert epsilon(event, 1e-8) < epsilon(event, 1e-11) < 0.0715  # else 0.0722


def test_errors_of_the_transforms_are_counted_where_many_phases_meet():
    """They are smooth: no entry of the tail was below zero, and all together were 0.2 % of delta,
    which the mechanism really exceeded.
    """
    side = (SideRelease("count", 943.2193442401618, 7),)
    phases = (
        PoissonGaussian(1.3337746333312839, 1.0, 2214),
        PoissonGaussian(0.0912906811439673, 1.0, 616, bands=2),
        PoissonGaussian(22.968251153182457, 1.0, 121, bands=2, beside=side),
    )
    delta_ = 4.060410797333342e-12
    moved = sum(p.compositions / p.noise_multiplier**2 for p in phases)
    mu = math.sqrt(moved + 9 / side[0].noise_multiplier ** 2)  # of the part that meets 9 counts
    assert gaussian_delta(epsilon(EventSequence(phases), delta_), mu) <= delta_
