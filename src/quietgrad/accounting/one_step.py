"""Privacy-loss distribution of one step, in both directions, by connecting the dots from interval
masses.

A step reveals Z = z and then x ~ N(0, 1) without the record, or x ~ (1 - q) N(0, 1) + q N(mu, 1)
with it, mu = z / sigma. The loss of the "remove" direction, log(1 - q + q exp(mu x - mu^2 / 2)),
grows with x, so the masses of an interval of losses under both distributions are differences of
normal distribution functions; those of the "add" direction are the same numbers, exchanged and
mirrored. An interval (a, b] with masses u (upper distribution) and l (lower) becomes two atoms that
keep both masses:

    p_b = (u - l e^a) / (1 - e^(a-b)),   p_a = (l e^b - u) / (e^(b-a) - 1)

which is the pessimistic "connect the dots" discretisation (Doroshenko et al. 2022, Algorithm 1) in
a form whose rounding errors are relative to the mass of the interval, so that small deltas stay
accurate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from quietgrad.accounting.scale_mixture import ScaleMixture

Array = NDArray[np.float64]

# standard deviations beyond which a normal distribution's mass (below 2e-33) is not resolved
REACH = 12.0
# Below it tails of float64 end (at 1e-310), so that no difference is left of two of them.
SMALLEST_MASS = 1e-290


@dataclass(frozen=True)
class Atoms:
    """Probabilities on losses (first + i) * interval, and at infinity."""

    first: int
    probabilities: Array
    infinity: float


@dataclass(frozen=True)
class OneStep:
    """Both directions of one step on one grid of losses.

    Attributes:
        interval: spacing of the grid.
        remove: loss of the data set with the record against the one without.
        add: the other direction.
    """

    interval: float
    remove: Atoms
    add: Atoms


def loss_spread(mu: float, q: float) -> float:
    """Standard deviation of the one-step loss without the record, for contributions of size mu:
    sets the grid's scale.
    """
    x = np.linspace(-10.0, 10.0, 2001)
    weights = np.exp(-(x**2) / 2)
    weights /= weights.sum()
    with np.errstate(over="ignore"):
        loss = np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, np.log(q) + mu * x - mu**2 / 2)
    mean = float(weights @ loss)
    return math.sqrt(max(float(weights @ (loss - mean) ** 2), 0.0))


def largest_loss(mixture: ScaleMixture, sigma: float, q: float, tail_mass: float) -> float:
    """A loss that the "remove" direction exceeds with probability at most tail_mass (given that z
    is in the mixture).
    """

    def mass_above(loss: float) -> float:
        return float(np.dot(mixture.weights, _upper_tail(loss, mixture.scales / sigma, q)))

    high = 1.0
    while mass_above(high) > tail_mass:
        high *= 2.0
        if high > 1e12:
            return high
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mass_above(middle) > tail_mass else (low, middle)
        if high - low < 1e-3 * high:
            break
    return high


def _upper_tail(loss: float, mu: Array, q: float) -> Array:
    x = _log_odds(np.array([loss]), q)[0] / mu + mu / 2
    return (1 - q) * special.ndtr(-x) + q * special.ndtr(mu - x)


def smallest_loss(mixture: ScaleMixture, sigma: float, q: float, tail_mass: float) -> float:
    """A lower end of the losses of the "remove" direction (exactly log(1 - q), or, for q near 1, up
    to tail_mass).
    """
    x_low = float(special.ndtri(max(tail_mass, 1e-300)))
    mu_max = float(mixture.scales.max()) / sigma
    without_sampling = mu_max * x_low - mu_max**2 / 2
    return max(math.log1p(-q), without_sampling + math.log(q)) if q < 1 else without_sampling


def one_step(
    mixture: ScaleMixture, sigma: float, q: float, first: int, last: int, interval: float
) -> OneStep:
    """Discretises one step on the losses first * interval .. last * interval.

    Args:
        mixture: distribution of the scale Z; its lost mass goes to infinity in both directions.
        sigma: noise multiplier.
        q: sampling rate.
        first, last: ends of the grid in units of ``interval`` for the "remove" direction.
        interval: spacing of the grid.

    Returns:
        Atoms for both directions, pessimistic for any grid. Cost: O((last - first) *
        len(mixture.scales)).
    """
    losses: Array = np.arange(first, last + 1, dtype=np.float64) * interval
    log_odds = _log_odds(losses, q)
    lower = np.zeros(losses.size + 1)
    shifted = np.zeros(losses.size + 1)
    for z, weight in zip(mixture.scales, mixture.weights, strict=True):
        mu = z / sigma
        # Outside this slice of the grid both distribution functions are constant to 1e-33.
        start = int(np.searchsorted(log_odds, (-REACH - mu / 2) * mu))
        stop = int(np.searchsorted(log_odds, (REACH + mu / 2) * mu, side="right"))
        x = log_odds[start:stop] / mu + mu / 2
        if x.size == 0:
            lower[start] += weight
            shifted[start] += weight
            continue
        lower[start : stop + 1] += weight * _interval_masses(x)
        shifted[start : stop + 1] += weight * _interval_masses(x - mu)
    upper = (1 - q) * lower + q * shifted
    remove = _connect_dots(upper, lower, first, interval, mixture.lost_mass)
    add = _connect_dots(lower[::-1], upper[::-1], -last, interval, mixture.lost_mass)
    return OneStep(interval, remove, add)


def _log_odds(losses: Array, q: float) -> Array:
    """log((e^loss - 1 + q) / q), the exponent mu x - mu^2/2 at which the loss is reached; -inf
    below log(1 - q).
    """
    positive = losses > 0
    result = np.full(losses.shape, -np.inf)
    result[positive] = losses[positive] + np.log1p(-(1 - q) * np.exp(-losses[positive]))
    others = losses[~positive]
    with np.errstate(divide="ignore"):
        if q <= 0.5:
            result[~positive] = np.log(np.maximum(q + np.expm1(others), 0.0))
        else:  # nothing would be left of exp(loss) beside q: losses of less than -37 would be lost
            least = math.log1p(-q) if q < 1 else -math.inf
            result[~positive] = others + np.log1p(-np.exp(np.minimum(least - others, 0.0)))
    return result - math.log(q)


def _interval_masses(x: Array) -> Array:
    """Standard normal masses of (-inf, x_0], (x_0, x_1], ..., (x_n, inf), accurate in both tails. x
    is increasing.

    A mass of next to nothing is 0: an interval's losses are then taken for larger ones than they
    are, where the end of all tails in one of them would make them smaller.
    """
    tail = special.ndtr(-np.abs(x))
    inner = np.abs(np.diff(tail))
    inner[inner < SMALLEST_MASS] = 0.0
    positive = int(np.searchsorted(x, 0.0, side="right"))
    if 0 < positive < x.size:  # the interval that holds zero
        inner[positive - 1] = special.ndtr(x[positive]) - tail[positive - 1]
    ends = tail[[0, -1]]
    if positive == 0:
        ends[0] = special.ndtr(x[0])
    if positive == x.size:
        ends[1] = special.ndtr(-x[-1])
    return np.concatenate([ends[:1], np.maximum(inner, 0.0), ends[1:]])


def _connect_dots(
    upper: Array, lower: Array, first: int, interval: float, lost_mass: float
) -> Atoms:
    """Atoms on the grid from interval masses: [below the grid, between its points ..., above the
    grid].
    """
    n = upper.size - 1
    probabilities = np.zeros(n)
    probabilities[0] = upper[0]  # losses below the grid are raised to its first point
    left = (first + np.arange(n - 1)) * interval
    u, l = upper[1:-1], lower[1:-1]
    # With s = u e^-a - l (>= 0): p_b = s e^a / (1 - e^-h); the rest of u stays at a, so that u is
    # kept exactly.
    with np.errstate(over="ignore", invalid="ignore"):
        right_mass = (u - l * np.exp(left)) / -math.expm1(-interval)
    right_mass = np.clip(np.nan_to_num(right_mass, nan=np.inf), 0.0, u)
    probabilities[1:] += right_mass
    probabilities[:-1] += u - right_mass
    last = (first + n - 1) * interval
    kept = min(upper[-1], lower[-1] * math.exp(min(last, 700.0)))
    probabilities[-1] += kept
    infinity = (upper[-1] - kept) + lost_mass
    return Atoms(first, probabilities, float(infinity))
