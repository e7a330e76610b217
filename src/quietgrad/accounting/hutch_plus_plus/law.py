"""The law Y that stands for R, in the increasing convex order: of Hutch++ (envelope "hutch++"), and
of any mixture of exact, Hutch and Hutch++ parameters ("convex").

Below ``convex_from`` = r0, where a step's divergence need not be convex in R, R is bounded in the
first order (P(R <= x)); above it, in the second: E (c - R)_+ <= E (c - Y)_+ for all c >= r0
(docs/hutchpp_envelope/convexity.md, theorems 2 and 3). Three facts go in: R is below chi2(k)/k in
the convex order, which holds for every mixture; with ``moments``, R has mean one and the
exponential moments of ``exponent``, which are those of Hutch++ alone.

Every point (c, G) made here has E (c - R)_+ <= G; that function is convex, nondecreasing and of
slope at most 1, so the lower convex hull of any set of points lies above it, and the hull's slopes
are the distribution function of Y: an atom at every knot.
Symbols: k, theta, B(theta), u = R - 1, c knot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from quietgrad.accounting.hutch_plus_plus.exponent import Exponents, exponents
from quietgrad.events import LARGEST_COUNTED_RATIO

Array = NDArray[np.float64]

# Relative allowance. scipy's incomplete gamma function is off by up to 5e-13 (k of some hundreds),
# and two of them are subtracted; all other operations err by thousands of times less.
ROUNDING = 1e-11
CELLS = 1500  # of c, of which each keeps its lowest point
CENTRES, GAPS = 90, 26
# Probability, and value of E (c - R)_+, that is left to what real arithmetic adds: zeros among
# float32 numbers, bounds on rounding that fail (docs/notes/hutchpp_envelope.md).
FLOOR = 1e-19
SMALLEST_WEIGHT = 1e-300  # A of lemma 5 (ii), while it has all its digits
PLACE, PRICE = 1.5, 3.15  # of a tangent at r0: docs/hutchpp_envelope/convexity.md, theorem 3


def distribution_bound(sketch_dim: int, x: Array, moments: bool = True) -> Array:
    """An upper bound of P(R <= x) below 1 (its limit from the left at 1); any shape."""
    k = sketch_dim
    points = np.minimum(np.asarray(x, dtype=np.float64), 1.0)
    bound = special.gammainc(k / 2, k * np.maximum(points, 0.0) / 2)
    if moments:
        known = exponents(k)
        shape = (-1, *[1] * points.ndim)
        falling = known.thetas.reshape(shape) * (1.0 - points) * (1 - 1e-15)
        exponent = np.min(known.bounds.reshape(shape) - falling, axis=0)
        bound = np.minimum(bound, np.exp(np.minimum(exponent, 0.0)) + FLOOR)
    return np.where(points > 0, np.minimum(bound * (1 + ROUNDING), 1.0), 0.0)


def smallest_ratio(sketch_dim: int, probability: float, moments: bool = True) -> float:
    """A y with ``distribution_bound`` at most ``probability``, nearly the largest."""
    low, high = 1e-300, 1.0 - 1e-9
    for _ in range(80):
        middle = float(np.sqrt(low * high))
        if float(distribution_bound(sketch_dim, np.array(middle), moments)) <= probability:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Hull:
    """[n] each: ``values`` are upper bounds of E (c - R)_+ at the rising ``knots``, convex."""

    knots: Array
    values: Array

    def at(self, c: Array) -> Array:
        """At points between the first and the last knot."""
        return np.interp(c, self.knots, self.values)


@functools.lru_cache(maxsize=64)
def hull(sketch_dim: int, lowest: float, moments: bool = True) -> Hull:
    """Upper bounds of E (c - R)_+ for c from below ``lowest`` to ``LARGEST_COUNTED_RATIO``. Cost:
    some tens of milliseconds beside those of ``exponents``.
    """
    k = sketch_dim
    start = lowest / 2
    c = np.unique(np.concatenate([np.geomspace(start, 1.0, 700), np.linspace(0.3, 2.0, 900)]))
    chi = c * special.gammainc(k / 2, k * c / 2)
    mean = special.gammainc(k / 2 + 1, k * c / 2)
    by_columns = np.minimum(chi - mean + ROUNDING * chi, c)
    if not moments:
        return _lower_hull(c, by_columns, start)
    others, by_exponent = _by_exponent(exponents(k), start)
    return _lower_hull(
        np.concatenate([c, others]), np.concatenate([by_columns, by_exponent]), start
    )


def _by_exponent(known: Exponents, start: float) -> tuple[Array, Array]:
    """(c, G) from E exp(-theta u) <= exp(B) and E u = 0: with psi(u) = exp(-theta u) - 1 + theta u,
    (c - 1 - u)_+ <= A psi(u) + beta u + gamma for all u, touching at u_1 (slope -1) and u_2 (slope
    0), so that E (c - R)_+ <= A (exp(B) - 1) + gamma.
    """
    centres = np.concatenate(
        [
            -(1 - np.geomspace(start, 0.5, 40)),
            -np.geomspace(0.5, 1e-3, 30),
            np.geomspace(1e-3, 1, CENTRES - 70),
        ]
    )
    gaps = np.geomspace(0.02, 60.0, GAPS)
    theta = known.thetas[:, None, None]
    x1 = theta * centres[None, :, None] - gaps / 2
    x2 = x1 + gaps
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        e1, e2 = np.exp(-x1), np.exp(-x2)
        a = 1.0 / (theta * (e1 - e2))
        psi1, psi2 = e1 - 1 + x1, e2 - 1 + x2
        beta = -a * theta * (1 - e2)
        u1, u2 = x1 / theta, x2 / theta
        grown = a * np.expm1(known.bounds)[:, None, None]
        value = grown - a * psi2 - beta * u2
        w = u1 + a * (psi1 - psi2) + beta * (u1 - u2)
        terms = (e1 + e2 + 2 + np.abs(x1) + np.abs(x2)) * a
        rounding = ROUNDING * (
            grown + terms + np.abs(beta) * (np.abs(u1) + np.abs(u2)) + np.abs(u1)
        )
    # Where theta exp(-x1) is above all numbers, a is zero, and all terms vanish but c: no bound.
    found = np.isfinite(value) & np.isfinite(w) & np.isfinite(rounding) & (a > SMALLEST_WEIGHT)
    # What c is off by, G may be: its slope is at most 1.
    return 1.0 + w[found], np.maximum(value[found], 0.0) + rounding[found] + FLOOR


def _lower_hull(c: Array, values: Array, start: float) -> Hull:
    """Of the lowest point in each of ``CELLS`` cells, and the ends."""
    end = LARGEST_COUNTED_RATIO
    inside = (c >= start) & (c <= end)
    c, values = c[inside], values[inside]
    cell = np.floor(CELLS * np.log(c / start) / np.log(end / start)).astype(int)
    order = np.lexsort((values, cell))
    first = np.unique(cell[order], return_index=True)[1]
    chosen = np.unique(np.concatenate([order[first], [int(np.argmin(c)), int(np.argmax(c))]]))
    chosen = chosen[np.argsort(c[chosen], kind="stable")]
    kept: list[tuple[float, float]] = []
    for x, y in zip(c[chosen].tolist(), values[chosen].tolist(), strict=True):
        if kept and x <= kept[-1][0]:
            continue
        while len(kept) > 1 and _above(kept[-2], kept[-1], (x, y)):
            kept.pop()
        kept.append((x, y))
    knots, lows = (np.array(column) for column in zip(*kept, strict=True))
    return Hull(knots, lows)


def _above(one: tuple[float, float], two: tuple[float, float], three: tuple[float, float]) -> bool:
    """Whether the middle point lies on or above the chord."""
    return (two[1] - one[1]) * (three[0] - one[0]) >= (three[1] - one[1]) * (two[0] - one[0])


def atoms(
    sketch_dim: int, convex_from: float, tail_mass: float, bins: int, moments: bool = True
) -> tuple[Array, Array, float]:
    """Y as (rising values, weights, mass below all of them, which counts as delta).

    Args:
        sketch_dim: k.
        convex_from: r0, below 1.
        tail_mass: the most that may count as delta.
        bins: how many knots; the overstatement falls like 1 / bins^2.
        moments: whether all that is sketched is sketched by Hutch++.
    """
    r0 = convex_from
    found = hull(sketch_dim, r0, moments)
    knots = _knots(found, r0, bins)
    values = found.at(knots) * (1 + ROUNDING)
    slopes = np.clip(np.maximum.accumulate(np.diff(values) / np.diff(knots)) * (1 + ROUNDING), 0, 1)
    weights = np.diff(np.concatenate([[0.0], slopes, [1.0]]))
    # Below r0: the distribution function as it is, and what a convex function's tangent at r0 adds.
    lowest = min(smallest_ratio(sketch_dim, tail_mass, moments), r0 / PLACE)
    below = np.unique(np.append(np.geomspace(lowest, r0, max(bins // 4, 8)), r0 / PLACE))
    mass = distribution_bound(sketch_dim, below, moments)
    lost = float(mass[0])
    moved = np.diff(mass)
    moved[below[:-1] == r0 / PLACE] += PRICE * float(values[0]) / r0
    total = np.cumsum(weights)
    left = np.diff(np.concatenate([[0.0], np.maximum(total - (lost + moved.sum()), 0.0)]))
    y = np.concatenate([below[:-1], knots])
    w = np.concatenate([moved, left])
    return y[w > 0], w[w > 0], lost


def _knots(found: Hull, r0: float, bins: int) -> Array:
    """Where Y has atoms: half of them by its own mass, half evenly in the logarithm."""
    inner = found.knots[(found.knots > r0)]
    c = np.concatenate([[r0], inner])
    slopes = np.diff(found.at(c)) / np.diff(c)
    importance = np.sqrt(np.maximum(np.diff(np.append(slopes, 1.0)), 0.0))
    importance = importance / importance.sum() + np.diff(np.log(c)) / np.log(c[-1] / r0)
    position = np.concatenate([[0.0], np.cumsum(importance)])
    knots = np.interp(np.linspace(0.0, position[-1], bins), position, c)
    return np.unique(np.append(knots, 1.0))
