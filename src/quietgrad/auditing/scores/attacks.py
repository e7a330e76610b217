"""Scores of runs: by the claimed law of the releases, and by what was learnt
of it on other runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quietgrad.auditing.scores.whitening import log_likelihood_ratio
from quietgrad.auditing.trials import Trials

Floats = NDArray[np.float64]

SMALLEST_LEVEL = 1e-6
FEWEST_FOR_LEVELS = 30
TRIALS_A_FEATURE = 10  # of each kind, for a learnt covariance
MOST_FEATURES = 64
RIDGE = 1e-9


def noise_levels(absent: Trials) -> Floats:
    """[parameters] variance of the noise that was met in each parameter, relative to the claimed
    one: an attacker sees where noise is missing.

    Args:
        absent: trials without the canary, which take no part in the bounds.
    """
    if absent.products.shape[0] * absent.products.shape[1] < FEWEST_FOR_LEVELS:
        return np.ones(absent.products.shape[2])
    expected = absent.energies.mean(axis=(0, 1))
    met = (absent.products**2).mean(axis=(0, 1))
    ratio = np.divide(met, expected, out=np.ones_like(met), where=expected > 0)
    return np.maximum(ratio, SMALLEST_LEVEL)


def scores_of(trials: Trials, rate: float, levels: Floats) -> Floats:
    """[trials, participations] log-likelihood ratios of the claimed mechanism, with noise of the
    given levels.
    """
    return log_likelihood_ratio(
        (trials.products / levels).sum(2), (trials.energies / levels).sum(2), rate
    )


def learnt_scores(trials: Trials, chosen: NDArray[np.bool_]) -> Floats | None:
    """[trials] log-likelihood ratios of two Gaussian laws fitted to the chosen trials: sees changes
    of mean, variance and correlation that the claimed law does not have.

    None where there are too few trials to learn from.
    """
    lengths = np.sqrt(np.maximum(trials.energies, 1e-300))
    features = np.where(trials.energies > 0, trials.products / lengths, 0.0).reshape(
        len(trials.present), -1
    )
    width = features.shape[1]
    known = [features[chosen & (trials.present == there)] for there in (False, True)]
    if (
        width > MOST_FEATURES
        or min(len(k) for k in known) < TRIALS_A_FEATURE * width + FEWEST_FOR_LEVELS
    ):
        return None
    absent, present = (_gaussian_log_density(features, k) for k in known)
    return present - absent


def _gaussian_log_density(points: Floats, fitted: Floats) -> Floats:
    mean = fitted.mean(0)
    covariance = np.atleast_2d(np.cov(fitted, rowvar=False))
    covariance = covariance + RIDGE * max(
        float(np.trace(covariance)) / len(covariance), RIDGE
    ) * np.eye(len(covariance))
    factor = np.linalg.cholesky(covariance)
    scaled = np.linalg.solve(factor, (points - mean).T)
    return -0.5 * (scaled**2).sum(0) - np.log(np.diag(factor)).sum()
