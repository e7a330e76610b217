"""A second accountant, slow and plain, to compare with: the hockey-stick formulas of one step given
to dp-accounting.

It shares no code with ``quietgrad.accounting``: there, interval masses become atoms; here, the two
curves delta(eps) of one step are computed from closed forms, summed over the scales, and
dp-accounting connects their dots and composes.
"""

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import stats
from scipy.special import ndtr


def one_step_deltas(losses, mu, q):
    """delta(eps) of one Poisson-subsampled Gaussian step with a contribution of size mu, as
    (remove, add). Needs q < 1.
    """
    grown = np.exp(losses)
    remove = 1.0 - grown
    inside = grown - 1 + q > 0
    remove[inside] = q * _hockey_stick((grown[inside] - 1 + q) / q, mu)
    add = np.zeros_like(losses)
    inside = 1 - grown * (1 - q) > 0
    kept = 1 - grown[inside] * (1 - q)
    add[inside] = kept * _hockey_stick(q * grown[inside] / kept, mu)
    return remove, add


def _hockey_stick(a, mu):
    return ndtr(mu / 2 - np.log(a) / mu) - a * ndtr(-mu / 2 - np.log(a) / mu)


def mixture_epsilon(scales, weights, lost_mass, sigma, q, steps, delta, interval, largest_loss):
    """Epsilon of T steps in which Z takes ``scales`` with ``weights`` and, with ``lost_mass``,
    anything.
    """
    points = np.arange(math.floor(-largest_loss / interval), math.ceil(largest_loss / interval) + 1)
    remove, add = np.zeros(points.size), np.zeros(points.size)
    for z, weight in zip(scales, weights, strict=True):
        one_remove, one_add = one_step_deltas(points * interval, z / sigma, q)
        remove += weight * one_remove
        add += weight * one_add
    pmfs = [
        pld_pmf.create_pmf_pessimistic_connect_dots(
            interval, points, np.minimum.accumulate(np.clip(curve + lost_mass, 0.0, 1.0))
        )
        for curve in (remove, add)
    ]
    return float(PrivacyLossDistribution(*pmfs).self_compose(steps).get_epsilon_for_delta(delta))


def mixed_scales(k, lost_mass, bins, *, upwards):
    """Z of the mixed envelope in equal bins of log y: rounded up (an upper bound) or down (a lower
    bound of the epsilon).
    """
    lowest = float(stats.chi2.ppf(lost_mass, k) / k)
    edges = np.geomspace(lowest, 1.0, bins + 1)
    cdf = stats.chi2.cdf(edges * k, k)
    y = edges[:-1] if upwards else edges[1:]
    scales = np.append(y, 1.0) ** -0.5
    weights = np.append(
        np.diff(cdf), 1.0 - cdf[-1]
    )  # what lies above 1 counts as 1: a contribution of norm C
    return scales, weights, float(cdf[0]) if upwards else 0.0
