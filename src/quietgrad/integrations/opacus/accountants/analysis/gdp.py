"""Opacus' Gaussian differential privacy. What is exact for a Gaussian release is computed; its
limit theorem for subsampled ones is no upper bound, so epsilons of those come from the accountant.
"""

from __future__ import annotations

import math

import torch

from quietgrad.accounting import epsilon
from quietgrad.checks import require_delta
from quietgrad.events import PoissonGaussian
from quietgrad.integrations.opacus.absent import absent

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
    near, far = eps / mu - mu / 2, eps / mu + mu / 2
    # e^eps Phi(-far) without its factors, of which one overflows and the other vanishes.
    scaled = torch.special.erfcx(torch.tensor(far / math.sqrt(2), dtype=torch.float64))
    return max(0.0, math.erfc(near / math.sqrt(2)) - math.exp(-(near**2) / 2) * float(scaled)) / 2


def eps_from_mu(*, mu: float, delta: float) -> float:
    """epsilon of a mu-Gaussian mechanism at ``delta``, rounded up as all epsilons here are; of a
    release with noise multiplier sigma on all records, mu = 1 / sigma.

    Raises:
        ValueError: where ``mu`` is not above 0, or ``delta`` not in (0, 1).
    """
    _require_mu(mu)
    require_delta("delta", delta)
    return epsilon(PoissonGaussian(1 / mu, 1.0, 1), delta)


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
