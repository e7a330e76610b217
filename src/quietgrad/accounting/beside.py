"""What numbers released beside the gradients add to a record's contribution.

A record that is in the batch of step t moves the noisy gradients by at most Z in units of sigma C,
and each number released beside them by at most 1 in units of its own noise nu_i. The noises are
independent, so all of them together are one Gaussian mechanism whose mean moves by

    mu_t = sqrt(Z^2 / sigma^2 + sum_i 1 / nu_i^2),   the sum over what is released at step t,

and a subsampled Gaussian mechanism with mean moved by mu is dominated by the one-dimensional one
with the same mu. So the scale Z of the accountant becomes sqrt(Z^2 + sigma^2 sum_i 1 / nu_i^2), and
nothing else changes (docs/privacy/side_numbers.md; G. Andrew et al., Differentially Private
Learning with Adaptive Clipping, 2021, Theorem 1, for one count beside a sum).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quietgrad.accounting.scale_mixture import ScaleMixture
from quietgrad.events import PoissonGaussian, SideRelease

Array = NDArray[np.float64]


def split_by_side_releases(phase: PoissonGaussian) -> tuple[PoissonGaussian, ...]:
    """The phase as kinds of steps, so that what is released beside the gradients, if anything,
    comes with every step of its kind.

    With b bands a record is in every b-th step only, and which of its steps carry a side release
    depends on its part. Of all parts the worst counts: their steps' sums of 1 / nu^2 are put in
    falling order, and each place takes the largest of any part. Composition does not depend on the
    order of steps whose kinds are fixed beforehand.

    Returns:
        Phases that together dominate this one, with as many compositions. Steps are counted, not
        gone through: cost b times 2^n, n numbers that are released at steps of their own.
    """
    if all(side.every == 1 for side in phase.beside):
        return (phase,)
    kinds = _worst_kinds(phase)
    return tuple(
        replace(phase, steps=count * phase.bands, beside=_one_for(kind))
        for kind, count in sorted(kinds.items())
    )


def _worst_kinds(phase: PoissonGaussian) -> dict[float, int]:
    """Sum of 1 / nu^2 -> how many of a record's steps have it, at each place the largest of any
    part.

    Of values in falling order the largest at every place has as many of at least v as the part that
    has the most of these.
    """
    periods = sorted({side.every for side in phase.beside if side.every > 1})
    together = [
        frozenset(some)
        for n in range(len(periods) + 1)
        for some in itertools.combinations(periods, n)
    ]
    moved = {
        due: float(sum(s.noise_multiplier**-2 for s in phase.beside if s.every in {1, *due}))
        for due in together
    }
    values = sorted(set(moved.values()), reverse=True)
    most = dict.fromkeys(values, 0)
    for part in range(phase.bands):
        times: dict[frozenset[int], int] = {}
        for due in reversed(together):  # those that are due with others are no others' alone
            more = sum(n for others, n in times.items() if due < others)
            times[due] = _common_steps(phase, part, math.lcm(*due)) - more
        reached = 0
        for value in values:
            reached += sum(n for due, n in times.items() if moved[due] == value)
            most[value] = max(most[value], reached)
    counts = {v: most[v] - before for v, before in zip(values, [0, *most.values()], strict=False)}
    return {value: count for value, count in counts.items() if count}


def _common_steps(phase: PoissonGaussian, part: int, every: int) -> int:
    """Steps of a part that are multiples of ``every``: every j with every j = part mod b."""
    shared = math.gcd(every, phase.bands)
    if part % shared:
        return 0
    cycle = phase.bands // shared
    first = part // shared * pow(every // shared, -1, cycle) % cycle
    multiples = (phase.steps - 1) // every + 1
    return max(0, (multiples - 1 - first) // cycle + 1)


def _one_for(squared: float) -> tuple[SideRelease, ...]:
    """What moves the mean as far as several side releases do, in one."""
    return (SideRelease("together", squared**-0.5),) if squared > 0 else ()


def squared_shift(phase: PoissonGaussian) -> float:
    """Sum of 1 / nu^2 at a step that carries all side releases."""
    return sum(side.noise_multiplier**-2 for side in phase.beside)


def joined(mixture: ScaleMixture, phase: PoissonGaussian) -> ScaleMixture:
    """The scale of a record's whole contribution, in units of sigma: upper bounds stay upper
    bounds, as sqrt(Z^2 + c) grows with Z.
    """
    if not phase.beside:
        return mixture
    beside = phase.noise_multiplier**2 * squared_shift(phase)
    return replace(mixture, scales=np.sqrt(mixture.scales**2 + beside))
