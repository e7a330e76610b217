"""Composition of steps and phases with dp-accounting's privacy-loss distributions, on a grid chosen
for the event.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.common import compute_self_convolve_bounds
from numpy.typing import NDArray

from quietgrad.accounting.beside import joined, split_by_side_releases, squared_shift
from quietgrad.accounting.one_step import (
    Atoms,
    OneStep,
    largest_loss,
    loss_spread,
    one_step,
    smallest_loss,
)
from quietgrad.accounting.phases import grouped
from quietgrad.accounting.product import WORTH_IT, composed_sum
from quietgrad.accounting.scale_mixture import ScaleMixture, convex_from, scale_mixture
from quietgrad.events import EventSequence, ExactClipping, PoissonGaussian, PrivacyEvent

Array = NDArray[np.float64]

# The spread of a one-step loss is resolved by this many grid intervals: the variance added by
# connecting the dots is at most a quarter of a squared interval, so composed epsilons move by less
# than 1e-4 of their Gaussian part.
INTERVALS_PER_SPREAD = 60
LARGEST_INTERVAL = 0.005
LARGEST_ONE_STEP_GRID = 200_000
LARGEST_COMPOSED_GRID = 4_000_000
# dp-accounting's ends of a sum of very many losses may be far beyond where its mass is: memory for
# more points than these is not asked for.
LARGEST_SELF_COMPOSED_GRID = 2**24
MIXTURE_BINS = 256
GRID_MIXTURE_BINS = 96
MIXTURE_WORK = 24_000_000


@dataclass(frozen=True)
class Discretisation:
    """What was rounded and how: reported beside every epsilon.

    Attributes:
        interval: spacing of the loss grid.
        range_limited: the interval is coarser than wanted, because the range of losses is very
            wide.
        mixture_bins: number of values of the scale Z (1 for exact clipping).
        widest_relative_bin: contributions are overstated by at most this share through the bins of
            Z.
        tail_mass: probability that truncation may have moved into delta, all steps together.
    """

    interval: float
    range_limited: bool
    mixture_bins: int
    widest_relative_bin: float
    tail_mass: float


_HALVINGS = 40  # of a cell of the grid


@dataclass(frozen=True)
class ComposedLoss:
    """Privacy-loss distribution of a whole event in one direction: atoms on a grid plus mass at
    infinity.
    """

    losses: Array
    probabilities: Array
    infinity: float

    def delta(self, epsilon: float) -> float:
        """Hockey-stick divergence at epsilon >= 0: an upper bound of the event's delta in this
        direction.
        """
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        gap = -np.expm1(epsilon - self.losses[start:])
        return min(1.0, self.infinity + float(np.dot(gap, self.probabilities[start:])))

    def deltas(self, epsilons: Array) -> Array:
        """``delta`` of rising epsilons, all in one pass over the losses.

        From the largest epsilon down, with h the step to the next larger one e': a loss l above e'
        adds 1 - e^(e - l) = (1 - e^(e' - l)) + e^(e' - l) (1 - e^-h). Nothing cancels.
        """
        starts = [*np.searchsorted(self.losses, epsilons, side="right"), self.losses.size]
        result = np.empty(len(epsilons))
        delta, outer, after = self.infinity, 0.0, float(epsilons[-1])
        for i in range(len(epsilons) - 1, -1, -1):
            e, part = float(epsilons[i]), slice(starts[i], starts[i + 1])
            gap = -np.expm1(e - self.losses[part])
            probabilities = self.probabilities[part]
            delta += -math.expm1(e - after) * outer + float(np.dot(gap, probabilities))
            outer = math.exp(e - after) * outer + float(np.dot(1.0 - gap, probabilities))
            result[i], after = delta, e
        return np.minimum(result, 1.0)

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon >= 0 with ``self.delta(epsilon) <= delta``;
        infinity if there is none.
        """
        if self.infinity > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        # delta() falls along the grid: bisect on grid points, then solve U - e^eps L = delta
        # between two of them.
        low, high = int(np.searchsorted(self.losses, 0.0)) - 1, self.losses.size - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.delta(float(self.losses[middle])) > delta else (low, middle)
            )
        base = float(self.losses[high])
        upper = self.infinity + float(self.probabilities[high:].sum())
        lower = float(np.dot(self.probabilities[high:], np.exp(base - self.losses[high:])))
        exact = base + math.log(max(upper - delta, 1e-300)) - math.log(max(lower, 1e-300))
        top = max(base, 0.0)
        solved = min(max(exact, 0.0), top) * (1 + 1e-12) + 1e-13
        return solved if self.delta(solved) <= delta else self._enough(solved, top, delta)

    def _enough(self, low: float, high: float, delta: float) -> float:
        """Between an epsilon that rounding has left too small and one that is enough, one that is:
        in the arithmetic that runs.
        """
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


@dataclass(frozen=True)
class ComposedEvent:
    """Both directions of a composed event; epsilon and delta are those of the worse one."""

    remove: ComposedLoss
    add: ComposedLoss
    discretisation: Discretisation

    def delta(self, epsilon: float) -> float:
        return max(self.remove.delta(epsilon), self.add.delta(epsilon))

    def epsilon(self, delta: float) -> float:
        return max(self.remove.epsilon(delta), self.add.epsilon(delta))


def compose(
    event: PrivacyEvent,
    tail_mass: float = 1e-15,
    refine: float = 1.0,
    in_convex_order: bool = True,
) -> ComposedEvent:
    """Composes all steps of all phases of an event.

    Args:
        event: what was released.
        tail_mass: probability that truncation may move into delta, over all steps; keep it far
            below the delta of interest.
        refine: above 1, a grid finer by that factor (for convergence checks).
        in_convex_order: whether envelopes that bound R in the convex order do so; else in
            distribution, which may cost less where epsilon is large. Either is a bound.

    Returns:
        A pessimistic privacy-loss distribution in both directions, whatever the grid. Many phases
        that differ are grouped (``phases.grouped``). Cost: one FFT per group of a length that grows
        with the standard deviation of the composed loss over the grid's interval, so roughly with
        sqrt(T).
    """
    phases = event.events if isinstance(event, EventSequence) else (event,)
    if not phases:
        raise ValueError("the event sequence is empty: nothing was released, and epsilon is 0")
    phases = grouped(tuple(p for phase in phases for p in split_by_side_releases(phase)))
    truncation = tail_mass / (4 * len(phases))
    per_step = truncation / max(p.compositions for p in phases)  # one for all: one mixture
    coarse = [_mixture(p, per_step, GRID_MIXTURE_BINS, in_convex_order) for p in phases]
    # One grid serves all phases: the finest that any of them asks for, unless the widest could then
    # not be held.
    grids = [_grid(p, m, truncation, refine) for p, m in zip(phases, coarse, strict=True)]
    wanted = min(g.interval for g in grids)
    range_limit = max((g.highest - g.lowest) / LARGEST_ONE_STEP_GRID for g in grids)
    reach = math.hypot(*(g.reach for g in grids))
    interval = max(wanted, range_limit, reach / LARGEST_COMPOSED_GRID)
    points = max((g.highest - g.lowest) / interval for g in grids)
    work = MIXTURE_WORK * refine / len(phases)
    bins = int(min(MIXTURE_BINS, max(GRID_MIXTURE_BINS, work / points)))
    mixtures = [_mixture(p, per_step, bins, in_convex_order) for p in phases]
    steps = [
        _one_step_on_grid(p, m, g, interval)
        for p, m, g in zip(phases, mixtures, grids, strict=True)
    ]
    return ComposedEvent(
        remove=_compose_direction([s.remove for s in steps], phases, interval, truncation),
        add=_compose_direction([s.add for s in steps], phases, interval, truncation),
        discretisation=Discretisation(
            interval=interval,
            range_limited=interval > 2 * wanted,
            mixture_bins=max(m.scales.size for m in mixtures),
            widest_relative_bin=max(m.widest_relative_bin for m in mixtures),
            tail_mass=tail_mass,
        ),
    )


def _mixture(
    phase: PoissonGaussian, tail_mass: float, bins: int, in_convex_order: bool
) -> ScaleMixture:
    sigma, beside = phase.noise_multiplier, squared_shift(phase)
    convex = convex_from(sigma, beside) if in_convex_order else 1.0
    return joined(scale_mixture(phase.clipping, tail_mass, bins, convex), phase)


@dataclass(frozen=True)
class _Grid:
    lowest: float
    highest: float
    interval: float
    reach: float


def _grid(phase: PoissonGaussian, mixture: ScaleMixture, truncation: float, refine: float) -> _Grid:
    sigma, q, n = phase.noise_multiplier, phase.participation_rate, phase.compositions
    per_step = truncation / n
    highest = largest_loss(mixture, sigma, q, per_step)
    lowest = smallest_loss(mixture, sigma, q, per_step)
    spread = loss_spread(math.sqrt(sigma**-2 + squared_shift(phase)), q)
    interval = (
        min(spread / INTERVALS_PER_SPREAD, LARGEST_INTERVAL, (highest - lowest) / 50) / refine
    )
    # The composed loss has standard deviation about sqrt(n) * spread, and tails of a few ranges.
    reach = 20.0 * math.sqrt(n) * spread + 4.0 * (highest - lowest)
    if isinstance(phase.clipping, ExactClipping) and q == 1.0:
        # One Gaussian mechanism: its loss is normal, so the interval can grow with the composed
        # spread's own scale.
        interval = min(spread / INTERVALS_PER_SPREAD, (highest - lowest) / 50) / refine
    return _Grid(lowest, highest, interval, reach)


def _one_step_on_grid(
    phase: PoissonGaussian, mixture: ScaleMixture, grid: _Grid, interval: float
) -> OneStep:
    first = math.floor(grid.lowest / interval)
    last = max(math.ceil(grid.highest / interval), first + 1)
    return one_step(
        mixture, phase.noise_multiplier, phase.participation_rate, first, last, interval
    )


def _compose_direction(
    atoms: list[Atoms], phases: tuple[PoissonGaussian, ...], interval: float, truncation: float
) -> ComposedLoss:
    ways: list[tuple[int, Array, float]] = []
    # What errors may come to where none is negative, so that no entry shows them: too large by
    # them all, a tail is still an upper bound.
    hidden = 0.0
    if len(phases) == 1:
        n = phases[0].compositions
        ways += _self_composed(atoms[0], n, interval, truncation)
        hidden = n * 2.0**-52 if ways and n > 1 else 0.0
    if not ways or max(hidden, _error_of(ways[0][1])) > WORTH_IT * truncation:
        times = [p.compositions for p in phases]
        ways.append(composed_sum(atoms, times, interval, len(phases) * truncation))
    # Each is an upper bound; the second may be the worse where a platform has no longer double.
    off = [infinity + _error_of(probabilities) for _, probabilities, infinity in ways]
    off[0] = max(off[0], hidden)
    first, probabilities, infinity = ways[off.index(min(off))]
    error = _error_of(probabilities)
    losses: Array = (first + np.arange(probabilities.size, dtype=np.float64)) * interval
    return ComposedLoss(losses, np.maximum(probabilities, 0.0), min(1.0, infinity + error))


def _self_composed(
    atom: Atoms, times: int, interval: float, truncation: float
) -> list[tuple[int, Array, float]]:
    """Many alike by dp-accounting: first grid point, probabilities, mass at infinity. None where
    these would be too many points.
    """
    one = pld_pmf.DensePLDPmf(
        interval, atom.first, atom.probabilities, atom.infinity, pessimistic_estimate=True
    )
    with warnings.catch_warnings():
        # dp-accounting's search for truncation bounds overflows harmlessly on very wide grids.
        warnings.simplefilter("ignore", RuntimeWarning)
        least, most = compute_self_convolve_bounds(atom.probabilities, times, truncation)
        if most - least >= LARGEST_SELF_COMPOSED_GRID:
            return []
        many = one if times == 1 else one.self_compose(times, tail_mass_truncation=truncation)
    return [(many._lower_loss, np.asarray(many._probs), many._infinity_mass)]


def _error_of(probabilities: Array) -> float:
    """What Fourier transforms may have taken from a distribution. They leave errors of either sign,
    whose size the most negative entry shows. Negative entries are raised to zero, and the same
    amount over all entries goes to infinity for those that came out too small.
    """
    error = max(0.0, -float(probabilities.min()))
    return error * min(probabilities.size, 100_000)
