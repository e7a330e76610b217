"""The number of runs of which the best one is released: its law, and a draw from it.

Symbols: K the number of runs, m its mean, eta its shape, g (gamma in the paper) its halting
probability. Truncated negative binomial, k = 1, 2, ...: P(K = k) is proportional to
(1 - g)^k (eta)(eta + 1) ... (eta + k - 1) / k!; eta = 1 is geometric, the limit eta -> 0
logarithmic. Poisson is the limit of a large eta, and has K = 0 with probability e^-m.

Source: N. Papernot and T. Steinke, Hyperparameter Tuning with Renyi Differential Privacy, 2022,
Definition 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property

from scipy import optimize

from quietgrad.checks import make_plain, require_at_least, require_positive

LARGEST_MEAN = 1e4
LARGEST_POISSON = 500.0  # P(K = 0) is then a number; it costs more than any budget long before
LARGEST_SHAPE = 100.0
LEAST_LOG_ODDS = 1e-12  # below it, one run is made always


@dataclass(frozen=True)
class RunCount:
    """The law of the number of runs. Public; the number that is drawn is private.

    Attributes:
        mean: m, expected number of runs, 1 to 1e4 (Poisson: above 0, to 500).
        shape: eta, 0 (logarithmic) to 100; 1 is geometric, infinity Poisson. More of it keeps the
            number nearer its mean, and costs more.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        require_positive("mean", self.mean)
        if math.isnan(self.shape) or not (0 <= self.shape <= LARGEST_SHAPE or self.poisson):
            raise ValueError(
                f"shape={self.shape!r} must be in 0 .. {LARGEST_SHAPE:g}, or infinity for Poisson; "
                "1 is the geometric law"
            )
        largest = LARGEST_POISSON if self.poisson else LARGEST_MEAN
        if self.mean > largest:
            raise ValueError(f"mean={self.mean!r} must be at most {largest:g} runs")
        if not self.poisson:
            require_at_least("mean", self.mean, 1, "at least one run is made; shape=inf may have 0")
        make_plain(self, "mean", "shape")

    @property
    def poisson(self) -> bool:
        return self.shape == math.inf

    @cached_property
    def log_odds(self) -> float:
        """x = log(1 / g); 0 where one run is made always. Not of the Poisson law."""
        assert not self.poisson
        if self.mean <= _mean(LEAST_LOG_ODDS, self.shape):
            return 0.0
        top = 2 * math.log(self.mean) + 2  # its mean is above m for every shape
        return float(
            optimize.brentq(lambda x: _mean(x, self.shape) - self.mean, LEAST_LOG_ODDS, top)
        )

    @cached_property
    def steepest(self) -> float:
        """E[K] of the law as it is drawn, rounding of g counted: the largest slope of its
        generating function.
        """
        return self.mean if self.poisson else _mean(self.log_odds, self.shape)

    def draw(self) -> int:
        """K, from the operating system's entropy: by inversion, with 53 bits."""
        level = random.SystemRandom().random()
        if self.poisson:
            number, probability = 0, math.exp(-self.mean)
        elif self.log_odds == 0:
            return 1
        else:
            number, probability = 1, self._of_one()
        below = probability
        # Ends also where rounding keeps the sum below the level.
        while below <= level and (probability > 1e-300 or number < self.mean):
            probability *= self._ratio(number)
            number += 1
            below += probability
        return number

    def probability(self, number: int) -> float:
        """P(K = number)."""
        if self.poisson:
            return math.exp(-self.mean + number * math.log(self.mean) - math.lgamma(number + 1))
        if number < 1 or self.log_odds == 0:
            return float(number == 1)
        found = self._of_one()
        for k in range(1, number):
            found *= self._ratio(k)
        return found

    def _of_one(self) -> float:
        x, eta = self.log_odds, self.shape
        return -math.expm1(-x) * (eta / math.expm1(eta * x) if eta > 0 else 1 / x)

    def _ratio(self, number: int) -> float:
        """P(K = number + 1) / P(K = number)."""
        if self.poisson:
            return self.mean / (number + 1)
        return -math.expm1(-self.log_odds) * (number + self.shape) / (number + 1)


def _mean(x: float, eta: float) -> float:
    if x == 0:
        return 1.0
    return math.expm1(x) * (eta / -math.expm1(-eta * x) if eta > 0 else 1 / x)
