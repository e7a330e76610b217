"""Opacus' Gaussian differential privacy. What is exact for a Gaussian release is computed; its
limit theorem for subsampled ones is no upper bound, so epsilons of those come from the accountant.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr

from quietgrad.accounting import epsilon
from quietgrad.checks import require_delta
from quietgrad.events import PoissonGaussian
from quietgrad.integrations.opacus.absent import absent

_LARGEST = 500.0  # epsilon that is looked for

_NO_BOUND = (
    "the mu of a subsampled run is a limit theorem's, and its epsilon may be too small; "
    "compute_eps_poisson gives an upper bound"
)
__getattr__ = absent(
    __name__,
    {
        "compute_mu_poisson": _NO_BOUND,
        "compute_mu_uniform": _NO_BOUND,
        "compute_eps_uniform": "batches of a fixed size are not accounted for here, nor drawn; "
        "draw Poisson batches and use compute_eps_poisson",
    },
)


def delta_eps_mu(*, eps: float, mu: float) -> float:
    """delta of a mu-Gaussian mechanism at ``eps`` (Dong, Roth and Su 2019, corollary 2.13).

    Raises:
        ValueError: where ``mu`` is not above 0.
    """
    _require_mu(mu)
    first, second = log_ndtr(-eps / mu + mu / 2), eps + log_ndtr(-eps / mu - mu / 2)
    return float(math.exp(first) * -math.expm1(min(0.0, second - first)))


def eps_from_mu(*, mu: float, delta: float) -> float:
    """epsilon of a mu-Gaussian mechanism at ``delta``; of a release with noise multiplier sigma on
    all records, mu = 1 / sigma.

    Raises:
        ValueError: where ``mu`` is not above 0, ``delta`` not in (0, 1), or epsilon above 500.
    """
    _require_mu(mu)
    require_delta("delta", delta)
    if delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    if delta_eps_mu(eps=_LARGEST, mu=mu) > delta:
        raise ValueError(f"mu={mu} has an epsilon above {_LARGEST:g} at delta={delta}; add noise")
    found = brentq(lambda eps: delta_eps_mu(eps=eps, mu=mu) - delta, 0.0, _LARGEST, xtol=1e-12)
    return float(found) * (1 + 1e-9) + 1e-9  # rounded up


def compute_eps_poisson(
    *, steps: int, noise_multiplier: float, sample_rate: float, delta: float
) -> float:
    """An upper bound of epsilon, from composed privacy-loss distributions; Opacus' own, of a limit
    theorem, may lie below the true value.

    Args:
        steps: releases.
        noise_multiplier: sigma.
        sample_rate: q.
        delta: in (0, 1).
    """
    require_delta("delta", delta)
    return epsilon(PoissonGaussian(noise_multiplier, sample_rate, steps), delta)


def _require_mu(mu: float) -> None:
    if not 0 < mu < math.inf:
        raise ValueError(f"mu={mu} must be above 0: 1 / sigma of one release on all records")
