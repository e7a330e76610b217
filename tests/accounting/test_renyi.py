"""Renyi divergences: against Opacus' accountant, dp-accounting's moments, a closed form and
adaptive quadrature; and never below the privacy-loss distribution's epsilon.
"""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant
from scipy.integrate import quad

from quietgrad.accounting import epsilon, renyi_epsilon
from quietgrad.accounting.renyi.epsilon import RENYI_ORDERS
from quietgrad.accounting.renyi.moments import renyi_divergence
from quietgrad.events import EventSequence, PoissonGaussian, RandomizedClipping, SideRelease

DELTA = 1e-5


def of_opacus(history: list[tuple[float, float, int]], delta: float = DELTA) -> tuple[float, float]:
    theirs = RDPAccountant()
    theirs.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the last one
        return theirs.get_privacy_spent(delta=delta)


@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    list(itertools.product((0.5, 0.9, 1.3, 4.0, 40.0), (1e-3, 0.02, 0.4, 1.0), (1, 200, 6000))),
)
def test_it_is_the_epsilon_of_opacus(sigma: float, q: float, steps: int) -> None:
    event = PoissonGaussian(sigma, q, steps)
    theirs, order = of_opacus([(sigma, q, steps)])
    found, best = renyi_epsilon(event, DELTA)
    assert found == pytest.approx(theirs, rel=1e-5)
    assert best == pytest.approx(order)
    assert found >= epsilon(event, DELTA)


@pytest.mark.parametrize("delta", [1e-9, 1e-6, 1e-3])
def test_it_is_the_epsilon_of_opacus_for_schedules(delta: float) -> None:
    history = [(1.4 * 0.97**i, 0.02, 40) for i in range(12)] + [(1.0, 0.05, 30)]
    event = EventSequence(tuple(PoissonGaussian(*phase) for phase in history))
    theirs, order = of_opacus(history, delta)
    assert renyi_epsilon(event, delta) == (pytest.approx(theirs, rel=1e-5), pytest.approx(order))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("q", [1e-4, 0.1, 0.7])
def test_whole_orders_are_those_of_dp_accounting(sigma: float, q: float) -> None:
    orders = [2.0, 3.0, 10.0, 40.0]  # for whole ones theirs is a finite sum of positive terms
    theirs = RdpAccountant(orders)
    theirs.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)))
    for order, wanted in zip(orders, theirs.rdp):
        found = renyi_divergence(sigma, q, order)
        assert found == pytest.approx(wanted, rel=1e-9, abs=2e-12)


@pytest.mark.parametrize("sigma", [0.4, 0.8, 3.0])
@pytest.mark.parametrize("order", [1.1, 1.5, 3.7])
def test_orders_between_are_those_of_quadrature(sigma: float, order: float) -> None:
    q = 0.05

    def excess(x: float) -> float:  # A_a - 1
        loss = math.log1p(q * math.expm1(x / sigma - 1 / (2 * sigma**2)))
        return math.expm1(order * loss) * math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)

    points = [-40.0, -8.0, 0.0, 1 / sigma, order / sigma, order / sigma + 8, order / sigma + 40]
    parts = itertools.pairwise(points)
    area = sum(quad(excess, a, b, epsabs=1e-13, epsrel=1e-11, limit=400)[0] for a, b in parts)
    assert renyi_divergence(sigma, q, order) == pytest.approx(
        math.log1p(area) / (order - 1), rel=1e-7
    )


def test_the_gaussian_mechanism_has_its_closed_form() -> None:
    found, order = renyi_epsilon(PoissonGaussian(2.0, 1.0, 10), DELTA)
    each = [10 * a / 8 + math.log1p(-1 / a) - math.log(DELTA * a) / (a - 1) for a in RENYI_ORDERS]
    assert found == pytest.approx(min(each), rel=1e-12)
    assert order == RENYI_ORDERS[int(np.argmin(each))]


def test_it_is_never_below_the_other_bound() -> None:
    """Where orders are chosen so that this bound is loose, too, and for little noise, of which the
    moments are those without sampling.
    """
    assert renyi_epsilon(PoissonGaussian(1.0, 0.01, 100), DELTA, [1.5])[0] > 20
    tiny = PoissonGaussian(0.05, 0.01, 3)
    assert renyi_epsilon(tiny, DELTA)[0] >= epsilon(tiny, DELTA)
    # At a large delta the conversion is below zero; what is told is not.
    easy = PoissonGaussian(50.0, 0.01, 1)
    assert renyi_epsilon(easy, 0.5)[0] >= 0


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (PoissonGaussian(1.0, 0.1, 8, RandomizedClipping(16)), "infinite"),
        (PoissonGaussian(1.0, 0.1, 8, bands=2), "independent noise"),
        (PoissonGaussian(1.0, 0.1, 8, beside=(SideRelease("x", 9.0),)), "beside"),
    ],
)
def test_other_mechanisms_are_refused(event: PoissonGaussian, word: str) -> None:
    for whole in (event, EventSequence((PoissonGaussian(1.0, 0.1, 8), event))):
        with pytest.raises(ValueError, match=word):
            renyi_epsilon(whole, DELTA)


@pytest.mark.parametrize("orders", [[], [1.0], [2.0, 0.5], [math.inf], [1e6]])
def test_orders_are_judged(orders: list[float]) -> None:
    with pytest.raises(ValueError, match="orders"):
        renyi_epsilon(PoissonGaussian(1.0, 0.1, 8), DELTA, orders)
