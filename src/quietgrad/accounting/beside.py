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
        Phases that together dominate this one, with as many compositions. Cost: O(T log T).
    """
    if all(side.every == 1 for side in phase.beside):
        return (phase,)
    bands, rounds = phase.bands, phase.compositions
    steps = np.arange(rounds * bands)
    moved = np.zeros(rounds * bands)
    for side in phase.beside:
        moved += (steps % side.every == 0) / side.noise_multiplier**2
    moved[phase.steps :] = 0.0
    worst = np.sort(moved.reshape(rounds, bands), axis=0).max(axis=1)
    kinds, counts = np.unique(worst, return_counts=True)
    return tuple(
        replace(phase, steps=int(count) * bands, beside=_one_for(float(kind)))
        for kind, count in zip(kinds, counts, strict=True)
    )


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
