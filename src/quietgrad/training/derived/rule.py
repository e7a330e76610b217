"""What settings become that nobody gave: functions of public facts alone (docs/defaults.md).

| symbol | name here | what it is |
| --- | --- | --- |
| N | ``units`` | training records (users, where users are protected) |
| mu | ``mu`` | the privacy budget as one Gaussian release: epsilon and delta together |
| P | ``parameters`` | numbers that train |
| r, l | ``head_input`` | of what the head reads: root mean square length, mean sum of its sizes |
| X | ``examples`` | most examples that the allowed hours are enough for |
| T, B | ``steps``, ``batch`` | releases, expected batch size |
| q | B / N | sampling rate |
| a | ``SATURATION`` | q^2 T / mu^2: how close a batch is to the largest that helps |

*Batch and steps.* By the central limit theorem of Poisson sampling (Dong, Roth and Su 2022; Bu et
al. 2020) T steps at the noise multiplier s cost mu = q sqrt(T (exp(1/s^2) - 1)). What all releases
together say of a gradient of length 1, over their noise, is N q sqrt(T) / s = N mu f(a) with
f(a)^2 = a log(1 + 1/a): it grows with a, and f stops at 1. Larger batches cost time and gain
nothing beyond (De et al. 2022; Ponomareva et al. 2023, section 5.4), so B = N mu sqrt(a / T).

*Rates.* AdamW divides a gradient by its root mean square. Where that is noise, T steps at the rate
e, falling to zero, move each weight by e sqrt(T/3) at random, however large the noise is, and the
outputs of a head by r times that, which is to be about 1; where it is signal, by less, in
proportion. So a head's rate is at most c / (r sqrt(T)) * sqrt(1 + (k h)^2 / T) with c near sqrt(3)
and h = N mu f(a) / sqrt(P), the signal of one parameter. Where all is signal, AdamW's steps are of
one size and the gradient's sign, and one of them moves an output by up to e l: so the rate is also
at most g / (l sqrt(T)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scipy.optimize import brentq
from scipy.stats import norm

# head: a linear head on what does not train. adapters, pretrained: what lies below it. new: a
# network that begins with random weights.
Trained = Literal["head", "adapters", "pretrained", "new"]

STEPS: Mapping[Trained, int] = {"head": 150, "adapters": 200, "pretrained": 200, "new": 400}
FEWEST_STEPS = 30  # below that a smaller batch is the lesser evil
SATURATION = 12.0  # f(12) = 0.98
HEAD, ALIGNMENT, SIGN = 1.7, 0.3, 70.0  # c, k and g
# Of what lies below the head: a rate falls with the root of T from the highest on.
RATE: Mapping[Trained, float] = {"adapters": 0.14, "pretrained": 0.14, "new": 0.2}
HIGHEST: Mapping[Trained, float] = {"adapters": 1.3e-2, "pretrained": 1.3e-2, "new": 2e-2}
ENOUGH = 0.05  # f = 0.4: where hours are short, that many steps are worth more
MU_WITHOUT_EPSILON = 1.0  # where a noise multiplier is given instead of an epsilon


@dataclass(frozen=True)
class Reads:
    """What a head reads: r and l. Without a head to look at, that of 400 numbers of size 1."""

    length: float = 20.0
    sum: float = 320.0


@dataclass(frozen=True)
class PublicFacts:
    """What the rule knows; see the table above.

    Attributes:
        units: N.
        mu: from ``mu_of``.
        trained: what trains.
        parameters: P.
        head_input: r and l; None where there is no linear head.
        examples: X.
    """

    units: int
    mu: float
    trained: Trained
    parameters: int = 1
    head_input: Reads | None = None
    examples: float = math.inf


def mu_of(epsilon: float, delta: float) -> float:
    """The Gaussian mechanism's mu at (epsilon, delta): Dong, Roth and Su 2022, corollary 1."""

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        left = norm.cdf(-epsilon / mu + mu / 2)
        right = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
        return float(left - right) - delta

    largest = 1e3 + 10 * math.sqrt(epsilon)  # mu is near sqrt(2 epsilon) where epsilon is large
    return math.exp(brentq(excess, math.log(1e-6), math.log(largest), xtol=1e-6))


def mu_of_noise(noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """mu of so many steps, by the central limit theorem."""
    return sample_rate * math.sqrt(steps * math.expm1(min(noise_multiplier**-2, 100.0)))


def batch_and_steps(
    facts: PublicFacts,
    batch: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
) -> tuple[int, int]:
    """B and T; those given are kept, ``epochs`` as q T.

    Both grow with epsilon and with the hours, or stay; B is at most N.
    """
    units, most = facts.units, facts.examples
    helps = units * facts.mu * math.sqrt(SATURATION)  # B sqrt(T) beyond which nothing does
    if epochs is not None:
        most = epochs * units
    if steps is None and batch is not None:
        wanted = STEPS[facts.trained] if epochs is None else math.inf
        return batch, _whole(min(wanted, most / batch))
    if steps is None:
        # Short hours first cost what is gained above ENOUGH, then steps, then batch.
        enough = units * facts.mu * math.sqrt(ENOUGH)
        steps = _whole(min(STEPS[facts.trained], max(FEWEST_STEPS, (most / enough) ** 2)))
        steps = max(1, int(min(steps, most)))
    if batch is None:
        size = most / steps if epochs is not None else min(helps / math.sqrt(steps), most / steps)
        batch = min(units, _whole(size))
    return batch, steps


def rates(facts: PublicFacts, batch: int, steps: int) -> tuple[float, float | None]:
    """AdamW's rate, and that of a new head on what is pretrained and trains too; else None.

    Both grow with epsilon and fall with the steps.
    """
    reads = facts.head_input
    head = None
    if reads is not None and facts.trained != "new":
        head = _head_rate(facts, reads, batch, steps)
    if facts.trained == "head":
        return _head_rate(facts, reads or Reads(), batch, steps), None
    rate = min(HIGHEST[facts.trained], RATE[facts.trained] / math.sqrt(steps))
    return two_digits(rate), head


def _head_rate(facts: PublicFacts, reads: Reads, batch: int, steps: int) -> float:
    a = (batch / facts.units / max(facts.mu, 1e-12)) ** 2 * steps
    f = math.sqrt(a * math.log1p(1 / a))
    signal = ALIGNMENT * facts.units * facts.mu * f / math.sqrt(facts.parameters)
    by_noise = HEAD / max(reads.length, 1e-12) * math.sqrt(1 + signal**2 / steps)
    return two_digits(min(by_noise, SIGN / max(reads.sum, 1e-12)) / math.sqrt(steps))


def _whole(number: float) -> int:
    """At least 1, with two digits that count, rounded down."""
    if number < 100:
        return max(1, math.floor(number))
    unit = 10 ** (math.floor(math.log10(number)) - 1)
    return int(number // unit) * unit


def two_digits(number: float) -> float:
    """Rounded to two digits that count."""
    return float(f"{number:.1e}")
