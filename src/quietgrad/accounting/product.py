"""The sum of many independent privacy losses that are not alike, by one product of Fourier
transforms. (Many alike: dp-accounting's own self-composition.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from quietgrad.accounting.one_step import Atoms

Array = NDArray[np.float64]

# Atoms that are looked at together where only a tail is bounded: a block's mass goes to its two
# ends with its mean kept, which raises the mean of every convex function.
BLOCK = 8
ORDERS = np.geomspace(0.25, 64.0, 17)  # of Chernoff's bound, over the sum's standard deviation
# Where records are drawn so rarely that the sum's standard deviation says nothing of its tails: as
# they are. Any order gives a bound; these are tried where the others leave very many points.
ORDERS_OF_RARE = np.geomspace(2.0**-6, 2.0**6, 13)
WIDE = 2.0**23
SMALLEST_TAIL = 1e-300
# Of the sum's range, a zone beyond each end, where all that the transforms leave is their errors.
# These are smooth, with few frequencies: they add up over a tail, and show nowhere in it.
BEYOND = 1 / 8
# Of the transforms, one after the other until errors are small. Where a platform has no longer
# double, the second is the first.
PRECISIONS = (np.float64, np.longdouble)
WORTH_IT = 100.0  # errors, over the mass that may be moved anyway


def composed_sum(
    atoms: Sequence[Atoms], times: Sequence[int], interval: float, tail_mass: float
) -> tuple[int, Array, float]:
    """Distribution of the sum of ``times[i]`` losses of each ``atoms[i]``, all independent.

    Args:
        atoms: on the grid of ``interval``.
        times: how many of each.
        interval: spacing.
        tail_mass: probability that may be moved to infinity, on each side.

    Returns:
        First grid point, [n] probabilities (rounding errors of either sign), mass at infinity, with
        what the transforms' errors may be of all n together. The sum is pessimistic: mass beyond
        the ends is counted at infinity once more. Cost: a transform for each of ``atoms``; where
        errors are far above ``tail_mass``, another one in long doubles, three times as slow.
    """
    low, high = _ends(atoms, times, interval, tail_mass)
    wanted = high - low + 1
    beyond = max(8, int(BEYOND * wanted))
    size = fft.next_fast_len(wanted + 2 * beyond, real=True)
    # The half of the zone that is farthest from both ends.
    zone = slice(wanted + beyond // 2, size - beyond // 2)
    start = sum(n * atom.first for atom, n in zip(atoms, times, strict=True))
    for precision in PRECISIONS:
        on_circle = _on_circle(atoms, times, size, precision)
        probabilities = np.roll(on_circle, (start - low) % size)
        error = float(np.abs(probabilities[zone]).max()) * wanted
        if error <= WORTH_IT * tail_mass:
            break
    finite = sum(
        n * math.log1p(-min(a.infinity, 1.0)) if a.infinity < 1 else -math.inf
        for a, n in zip(atoms, times, strict=True)
    )
    infinity = -math.expm1(finite) + 2 * tail_mass + error
    return low, probabilities[:wanted], min(1.0, infinity)


def _on_circle(
    atoms: Sequence[Atoms], times: Sequence[int], size: int, precision: type[np.floating[Any]]
) -> Array:
    """[size] probabilities of the sum, whose first grid point is the sum of theirs."""
    product: Any = 1.0
    for atom, n in zip(atoms, times, strict=True):
        p = atom.probabilities
        if p.size > size:  # on the circle
            p = np.pad(p, (0, -p.size % size)).reshape(-1, size).sum(axis=0)
        product = product * fft.rfft(p.astype(precision), size) ** n
    return fft.irfft(product, size).astype(np.float64)


def _ends(
    atoms: Sequence[Atoms], times: Sequence[int], interval: float, tail_mass: float
) -> tuple[int, int]:
    """Grid points that the sum is beyond with probability at most ``tail_mass`` on each side."""
    coarse = [_coarse(atom, interval) for atom in atoms]
    spread = math.sqrt(
        sum(n * _variance(x, p) for (x, p), n in zip(coarse, times, strict=True)) + interval**2
    )
    least = sum(n * atom.first for atom, n in zip(atoms, times, strict=True))
    most = sum(
        n * (atom.first + atom.probabilities.size - 1) for atom, n in zip(atoms, times, strict=True)
    )
    log_tail = math.log(max(tail_mass, SMALLEST_TAIL))
    highs, lows = [float(most)], [float(least)]
    for order in (*(ORDERS / spread), *ORDERS_OF_RARE):
        if order in ORDERS_OF_RARE and min(highs) - max(lows) <= WIDE:
            break
        up = sum(n * _log_mean_exp(x, p, order) for (x, p), n in zip(coarse, times, strict=True))
        down = sum(n * _log_mean_exp(-x, p, order) for (x, p), n in zip(coarse, times, strict=True))
        highs.append((up - log_tail) / order / interval)
        lows.append(-(down - log_tail) / order / interval)
    return max(least, math.floor(max(lows)) - 1), min(most, math.ceil(min(highs)) + 1)


def _coarse(atom: Atoms, interval: float) -> tuple[Array, Array]:
    """Losses and probabilities of fewer atoms, above the given ones in convex order."""
    p = atom.probabilities
    blocks = -(-p.size // BLOCK)
    padded = np.pad(p, (0, blocks * BLOCK - p.size)).reshape(blocks, BLOCK)
    mass = padded.sum(axis=1)
    share = padded @ (np.arange(BLOCK) / BLOCK)  # of the mass, to the upper end
    ends = np.zeros(blocks + 1)
    ends[:-1] += mass - share
    ends[1:] += share
    losses: Array = (atom.first + BLOCK * np.arange(blocks + 1, dtype=np.float64)) * interval
    keep = ends > 0
    return losses[keep], ends[keep]


def _variance(losses: Array, probabilities: Array) -> float:
    total = float(probabilities.sum())
    mean = float(probabilities @ losses) / total
    return float(probabilities @ (losses - mean) ** 2) / total


def _log_mean_exp(losses: Array, probabilities: Array, order: float) -> float:
    top = float(losses.max())
    return order * top + math.log(float(probabilities @ np.exp(order * (losses - top))))
