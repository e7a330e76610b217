"""From an attack's errors over independent runs to lower bounds on epsilon.

An attack calls a record present or absent. Under (epsilon, delta)-differential privacy its false
positive rate a (absent, called present) and false negative rate b satisfy b >= max(1 - delta -
e^epsilon a, e^-epsilon (1 - delta - a)) (Kairouz et al. 2015), and under f-DP b >= f(a) (Dong et
al. 2022). Both rates are replaced by Clopper-Pearson upper limits, each at half of the error
probability, so that both hold together with the stated confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scipy import optimize, stats

from quietgrad.accounting import epsilon, trade_off
from quietgrad.checks import require_at_least, require_delta, require_finite, require_int
from quietgrad.events import ExactClipping, PoissonGaussian

LARGEST_EPSILON = 200.0
LEAST_CONFIDENCE, MOST_CONFIDENCE = 0.5, 0.999999999  # of an audit
STRIDE = 1.5  # factor between the noise multipliers that bracket the one looked for
RESOLUTION = 5e-3  # of its logarithm; the side is taken that makes the bound smaller
LEAST_PRIVATE, MOST_PRIVATE = 0.1, 1e3  # of the claimed noise multiplier: where the search ends


def require_confidence(confidence: float) -> None:
    """Refuses anything outside (0, 1)."""
    require_finite("confidence", confidence)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be in (0, 1); 0.95 is usual")


def require_confidence_of_audit(confidence: float) -> None:
    """Refuses what an audit could prove nothing with: below one half its bounds are wrong more
    often than right, and sound mechanisms would be refuted.
    """
    require_confidence(confidence)
    if not LEAST_CONFIDENCE <= confidence <= MOST_CONFIDENCE:
        raise ValueError(
            f"confidence={confidence!r} must be in {LEAST_CONFIDENCE} .. {MOST_CONFIDENCE}: with "
            "less, what is shown is wrong more often than right, and with more nothing can be; "
            "0.95 is usual"
        )


@dataclass(frozen=True)
class ErrorCounts:
    """How often an attack erred, over independent trials that had no part in choosing its
    threshold.

    Attributes:
        false_positives: trials without the record that were called trials with it.
        absent: trials without the record.
        false_negatives: trials with the record that were called trials without it.
        present: trials with the record.
    """

    false_positives: int
    absent: int
    false_negatives: int
    present: int

    def __post_init__(self) -> None:
        for errors, trials in (("false_positives", "absent"), ("false_negatives", "present")):
            wrong, total = getattr(self, errors), getattr(self, trials)
            require_int(errors, wrong)
            require_int(trials, total)
            require_at_least(
                trials, total, 1, "a rate needs at least one trial of either kind; make more runs"
            )
            if not 0 <= wrong <= total:
                raise ValueError(f"{errors}={wrong} must be between 0 and {trials}={total}")

    @property
    def rates(self) -> tuple[float, float]:
        """Observed (false positive rate, false negative rate)."""
        return self.false_positives / self.absent, self.false_negatives / self.present

    def upper_rates(self, confidence: float) -> tuple[float, float]:
        """Upper limits of both rates that hold together with at least this confidence."""
        require_confidence(confidence)
        level = (1 - confidence) / 2
        return (
            upper_rate(self.false_positives, self.absent, level),
            upper_rate(self.false_negatives, self.present, level),
        )


def upper_rate(errors: int, trials: int, level: float) -> float:
    """Clopper-Pearson upper limit of a rate: exceeded by the true one with probability at most
    ``level``.
    """
    return 1.0 if errors >= trials else float(stats.beta.isf(level, errors + 1, trials - errors))


def lower_rate(errors: int, trials: int, level: float) -> float:
    """Clopper-Pearson lower limit of a rate."""
    return 1.0 - upper_rate(trials - errors, trials, level)


def lower_bound_clopper_pearson(
    errors: ErrorCounts, delta: float, confidence: float = 0.95
) -> float:
    """Lower bound on epsilon at ``delta`` from error counts alone: whatever the mechanism is.

    Args:
        errors: of an attack whose threshold was fixed beforehand.
        delta: in (0, 1).
        confidence: probability, over the runs, that the bound holds.

    Returns:
        At least 0. With n trials of either kind it cannot exceed about log(n / log(2 / (1 -
        confidence))): many runs are needed for a large epsilon.
    """
    require_delta("delta", delta)
    return epsilon_of_rates(*errors.upper_rates(confidence), delta)


def epsilon_of_rates(false_positive: float, false_negative: float, delta: float) -> float:
    """Smallest epsilon >= 0 at which these two rates are possible."""
    best = 0.0
    for one, other in ((false_positive, false_negative), (false_negative, false_positive)):
        if 1 - delta - one > 0:
            best = max(best, LARGEST_EPSILON if other <= 0 else math.log((1 - delta - one) / other))
    return min(best, LARGEST_EPSILON)


def lower_bound_gaussian(errors: ErrorCounts, delta: float, confidence: float = 0.95) -> float:
    """Lower bound on epsilon at ``delta`` of a mechanism whose trade-off function is Gaussian:
    DP-SGD at sampling rate 1 with exact clipping.

    The rates' limits a and b show that the mechanism is not mu-GDP for any mu below Phi^-1(1 - a) -
    Phi^-1(b) (Nasr et al. 2023, section 4.3), and mu gives epsilon (Dong et al. 2022, Corollary
    2.13). Far fewer runs are needed than by ``lower_bound_clopper_pearson``, since one threshold
    anywhere shows the whole curve; the price is the assumption about its shape.

    Args:
        errors, delta, confidence: see ``lower_bound_clopper_pearson``.
    """
    require_delta("delta", delta)
    return gaussian_epsilon(gaussian_mu(*errors.upper_rates(confidence)), delta)


def gaussian_mu(false_positive: float, false_negative: float) -> float:
    """Smallest mu >= 0 at which mu-GDP allows these rates."""
    mu = float(stats.norm.isf(false_positive) - stats.norm.ppf(false_negative))
    return max(mu, 0.0) if not math.isnan(mu) else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP at delta: the root of Phi(mu/2 - e/mu) - e^e Phi(-mu/2 - e/mu) = delta."""
    if mu <= 0:
        return 0.0

    def excess(value: float) -> float:
        inner = stats.norm.cdf(mu / 2 - value / mu)
        outer = math.exp(min(value + float(stats.norm.logcdf(-mu / 2 - value / mu)), 0.0))
        return float(inner - outer - delta)

    if excess(0.0) <= 0:
        return 0.0
    if excess(LARGEST_EPSILON) > 0:
        return LARGEST_EPSILON
    return float(optimize.brentq(excess, 0.0, LARGEST_EPSILON, xtol=1e-9))


def lower_bound_trade_off(
    errors: ErrorCounts, event: PoissonGaussian, delta: float, confidence: float = 0.95
) -> float:
    """The same for any plan: the epsilon that the accountant prints for the largest noise
    multiplier that the errors leave possible.

    ``lower_bound_gaussian`` generalised: of the event's family (same sampling, steps, clipping; any
    noise multiplier) every member is refuted whose trade-off function at the limit of the false
    positive rate lies above the limit of the false negative rate (Nasr et al. 2023, section 4.4). A
    value above the claimed epsilon therefore refutes the claimed trade-off function whatever the
    true mechanism is. A value below it is a lower bound on epsilon if the true mechanism is one of
    the family.

    Args:
        errors, delta, confidence: see ``lower_bound_clopper_pearson``.
        event: what is accounted for.

    Returns:
        At least 0. Cost: about fifteen trade-off functions of the event.
    """
    require_delta("delta", delta)
    if event.participation_rate == 1 and isinstance(event.clipping, ExactClipping):
        return lower_bound_gaussian(
            errors, delta, confidence
        )  # the family is the Gaussian one, in closed form
    false_positive, false_negative = errors.upper_rates(confidence)
    if false_positive + false_negative >= 1:
        return 0.0
    claimed = event.noise_multiplier

    def refuted(multiplier: float) -> bool:
        curve = trade_off(_with_noise(event, multiplier), [false_positive], "remove")
        return bool(curve[0] > false_negative)

    high = claimed
    if refuted(high):
        low = high / STRIDE
        while refuted(low):
            low, high = low / STRIDE, low
            if low < LEAST_PRIVATE * claimed:
                break
    else:
        low, high = high, high * STRIDE
        while not refuted(high):
            low, high = high, high * STRIDE
            if high > MOST_PRIVATE * claimed:
                return 0.0
    while math.log(high / low) > RESOLUTION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return epsilon(_with_noise(event, high), delta)


def _with_noise(event: PoissonGaussian, noise_multiplier: float) -> PoissonGaussian:
    """The same mechanism with all its noise, that beside the gradients too, made larger or smaller
    by one factor.
    """
    factor = noise_multiplier / event.noise_multiplier
    beside = tuple(
        replace(side, noise_multiplier=factor * side.noise_multiplier) for side in event.beside
    )
    return replace(event, noise_multiplier=noise_multiplier, beside=beside)
