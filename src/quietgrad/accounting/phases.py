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
from dataclasses import replace

from quietgrad.events import ExactClipping, PoissonGaussian

# Groups that are composed. Each costs a one-step distribution and a convolution; of randomized
# clipping a one-step distribution costs a hundred times as much.
MOST_GROUPS = 256
MOST_RANDOMIZED_GROUPS = 24
FINEST = 1e-9  # cells of log noise multiplier and log rate that hold equal settings alone


def grouped(phases: tuple[PoissonGaussian, ...]) -> tuple[PoissonGaussian, ...]:
    """At most so many phases as are affordable, whose composition is no better for privacy than
    that of ``phases``. Equal phases that can be joined are; order means nothing to the sum of
    privacy losses.
    """
    merged = merge_equal_phases(phases)
    exact = all(isinstance(phase.clipping, ExactClipping) for phase in merged)
    most = MOST_GROUPS if exact else MOST_RANDOMIZED_GROUPS
    if len(merged) <= most:
        return merged
    width = FINEST
    while len(_cells(merged, width)) > most:
        width *= 2
        if width > 100:  # all in one cell of their kind: more kinds than groups
            break
    low, high = width / 2, width
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if len(_cells(merged, middle)) > most else (low, middle)
    return tuple(_worst(cell) for cell in _cells(merged, high).values())


def widest_group(phases: tuple[PoissonGaussian, ...], groups: tuple[PoissonGaussian, ...]) -> float:
    """The most by which grouping may have understated a noise multiplier, as a share: 0 if nothing
    was grouped.
    """
    if sum(p.compositions for p in phases) == 0 or len(merge_equal_phases(phases)) == len(groups):
        return 0.0
    kept = sorted({g.noise_multiplier for g in groups})
    below = [max((k for k in kept if k <= p.noise_multiplier), default=kept[0]) for p in phases]
    return max(p.noise_multiplier / b - 1 for p, b in zip(phases, below, strict=True))


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
    phases: tuple[PoissonGaussian, ...], width: float
) -> dict[tuple[object, ...], list[PoissonGaussian]]:
    cells: dict[tuple[object, ...], list[PoissonGaussian]] = {}
    for p in phases:
        key = (
            p.clipping,
            p.bands,
            p.beside,
            math.floor(math.log(p.noise_multiplier) / width),
            math.floor(math.log(p.sample_rate) / width),
        )
        cells.setdefault(key, []).append(p)
    return cells


def _worst(cell: list[PoissonGaussian]) -> PoissonGaussian:
    return replace(
        cell[0],
        noise_multiplier=min(p.noise_multiplier for p in cell),
        sample_rate=max(p.sample_rate for p in cell),
        steps=cell[0].bands * sum(p.compositions for p in cell),
    )
