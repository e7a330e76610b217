"""The number of bands from public facts alone: more bands correlate better, and amplify less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.noise.correlation.mixing import (
    SECONDS,
    MixingMatrix,
    mixing_matrix,
    solved_without_a_factor,
)
from quietgrad.noise.correlation.quadratic_form import Factored, Workload
from quietgrad.noise.correlation.workloads import as_workload


@dataclass(frozen=True)
class BandCandidate:
    """One number of bands with what it costs and brings.

    Attributes:
        bands: b.
        noise_multiplier: sigma that the target epsilon needs at b bands.
        mixing: the best matrix found.
        error: sigma^2 tr(W X_b^-1), in the workload's units.
    """

    bands: int
    noise_multiplier: float
    mixing: MixingMatrix

    @property
    def error(self) -> float:
        return self.noise_multiplier**2 * self.mixing.objective


@dataclass(frozen=True)
class BandChoice:
    """All candidates, fewest bands first, and the best of them.

    Attributes:
        candidates: evaluated, b = 1 among them.
        chosen: with the smallest error; the fewest bands in a tie.
    """

    candidates: tuple[BandCandidate, ...]
    chosen: BandCandidate

    @property
    def error_ratio(self) -> float:
        """Error of the chosen bands over that of independent noise; at most 1."""
        return self.chosen.error / self.candidates[0].error


def default_candidates(steps: int, sample_rate: float | None = None) -> tuple[int, ...]:
    """1, 2, 4, 6, 8, 12, 16, 24, 32, as far as there are steps, and no part has to be used whole (b
    q at most 1).
    """
    limit = min(32, steps)
    if sample_rate is not None:
        limit = min(limit, max(1, int(1 / sample_rate)))
    ladder = sorted({1, 2, 4, 6, 8, 12, 16, 24, 32, limit})
    return tuple(b for b in ladder if b <= limit)


def choose_bands(
    workload: Workload | NDArray[np.float64],
    noise_multiplier: Callable[[int], float],
    candidates: Sequence[int] | None = None,
    family: str = "auto",
    max_seconds: float = SECONDS,
) -> BandChoice:
    """Minimises sigma(b)^2 tr(W X_b^-1) over b. Uses no private data: sigma(b) comes from the
    accountant, W from public facts.

    Args:
        workload: see ``mixing_matrix``.
        noise_multiplier: b to the sigma that the target needs with b bands
            (``quietgrad.accounting.noise_multiplier(..., bands=b)``).
        candidates: numbers of bands to try, 1 is added (None: ``default_candidates``).
        family, max_seconds: see ``mixing_matrix``; the time is shared by all candidates.

    Returns:
        The choice, never worse than independent noise by this criterion. Cost: one calibration and
        one ``mixing_matrix`` a candidate.

    Raises:
        ValueError, TypeError: as ``mixing_matrix``.
    """
    load = as_workload(workload)
    if not solved_without_a_factor(load, family):
        load = Factored(load.factor(), load.name)  # once for all candidates
    wanted = sorted({1, *(default_candidates(load.steps) if candidates is None else candidates)})
    # All of them: with curvature the error can rise before it falls, since two bands already cost
    # amplification.
    tried = tuple(
        BandCandidate(
            bands,
            float(noise_multiplier(bands)),
            mixing_matrix(load, bands, family, max_seconds / len(wanted)),
        )
        for bands in wanted
    )
    return BandChoice(tried, min(tried, key=lambda candidate: candidate.error))
