"""Phases before they are composed: equal ones become one, and where many differ, neighbours in
noise and rate are taken for the worst of them.

That is an upper bound. Less noise: the mechanism with more is the one with less and further noise
on what it released. A higher rate q' > q: with the record, a step draws from
(1 - q/q') P + (q/q') Q', P without the record and Q' its mixture at rate q', and the hockey-stick
divergence from P, in either direction, is jointly convex and zero for P itself. Both hold step by
step, and so for adaptive compositions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quietgrad.events import ExactClipping, PoissonGaussian

# Groups that are composed. Each costs a one-step distribution and a convolution; of randomized
# clipping a one-step distribution costs a hundred times as much.
MOST_GROUPS = 256
MOST_RANDOMIZED_GROUPS = 24
FINEST = 1e-9  # cells of log noise multiplier and log rate that hold equal settings alone


def grouped(phases: tuple[PoissonGaussian, ...], share: float = 1.0) -> tuple[PoissonGaussian, ...]:
    """At most so many phases as are affordable, whose composition is no better for privacy than
    that of ``phases``. Equal phases that can be joined are; order means nothing to the sum of
    privacy losses.

    Args:
        phases: of one event.
        share: of the affordable number, for a quicker and coarser bound.
    """
    merged = merge_equal_phases(phases)
    exact = all(isinstance(phase.clipping, ExactClipping) for phase in merged)
    most = max(2, int(share * (MOST_GROUPS if exact else MOST_RANDOMIZED_GROUPS)))
    if len(merged) <= most:
        return merged
    placed = [_Placed.of(phase) for phase in merged]
    # From the least on, so that more noise at all steps makes the same groups.
    origin = min(p.log_noise for p in placed), min(p.log_rate for p in placed)
    width = FINEST
    while len(_cells(placed, origin, width)) > most:
        width *= 2
        if width > 100:  # all in one cell of their kind: more kinds than groups
            break
    low, high = width / 2, width
    for _ in range(8):
        middle = (low + high) / 2
        few = len(_cells(placed, origin, middle)) <= most
        low, high = (low, middle) if few else (middle, high)
    return tuple(_worst(cell) for cell in _cells(placed, origin, high).values())


@dataclass(frozen=True)
class _Placed:
    """A phase, where it lies, and all else of it, which is the same within a group."""

    phase: PoissonGaussian
    kind: PoissonGaussian
    log_noise: float
    log_rate: float

    @classmethod
    def of(cls, phase: PoissonGaussian) -> _Placed:
        kind = replace(phase, noise_multiplier=1.0, sample_rate=1.0, steps=phase.bands)
        return cls(phase, kind, math.log(phase.noise_multiplier), math.log(phase.sample_rate))


def merge_equal_phases(phases: tuple[PoissonGaussian, ...]) -> tuple[PoissonGaussian, ...]:
    """Phases of one mechanism become one phase: splitting a run changes nothing. With bands only
    whole turns are joined, where the compositions add up.
    """
    merged: dict[PoissonGaussian, PoissonGaussian] = {}
    ends: list[PoissonGaussian] = []
    for phase in phases:
        if phase.steps % phase.bands:
            ends.append(phase)
            continue
        kind = replace(phase, steps=phase.bands)
        before = merged.get(kind)
        steps = phase.steps + (0 if before is None else before.steps)
        merged[kind] = replace(phase, steps=steps)
    return (*merged.values(), *ends)


def _cells(
    placed: list[_Placed], origin: tuple[float, float], width: float
) -> dict[tuple[PoissonGaussian, int, int], list[PoissonGaussian]]:
    cells: dict[tuple[PoissonGaussian, int, int], list[PoissonGaussian]] = {}
    for p in placed:
        noise = math.floor((p.log_noise - origin[0]) / width)
        rate = math.floor((p.log_rate - origin[1]) / width)
        cells.setdefault((p.kind, noise, rate), []).append(p.phase)
    return cells


def _worst(cell: list[PoissonGaussian]) -> PoissonGaussian:
    return replace(
        cell[0],
        noise_multiplier=min(p.noise_multiplier for p in cell),
        sample_rate=max(p.sample_rate for p in cell),
        steps=cell[0].bands * sum(p.compositions for p in cell),
    )
