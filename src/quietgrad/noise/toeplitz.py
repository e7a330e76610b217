"""Noise correlated by a banded Toeplitz matrix whose coefficients are given: published ones, or
one's own. Nothing is solved, so a run of any length starts at once.

Symbols: T steps, b bands, c_0 .. c_{b-1} the coefficients, C_mix[t, t - m] = c_m / n_t with n_t the
norm of its column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from quietgrad.noise.correlation.banded import BandedLower, Floats
from quietgrad.noise.correlation.curvature import Response
from quietgrad.noise.correlation.mixing import MixingMatrix, toeplitz_objective
from quietgrad.noise.correlation.solver import unit_columns
from quietgrad.noise.correlation.workloads import PrefixSums
from quietgrad.noise.mechanism import LARGEST_ROW, Memory
from quietgrad.noise.methods import Correlation, SigmaOfBands
from quietgrad.noise.sources.source import Source, noise_source
from quietgrad.records import judge


@dataclass(frozen=True)
class ToeplitzNoise:
    """Every step's noise cancels stated shares of the noise of the b - 1 steps before.

    Columns are scaled to norm one, the last b - 1 of them cut at the end of the run, so that any
    coefficients are as private as any others; how good they are is their choice. Source: banded
    Toeplitz factorisations, McKenna 2024 ("Scaling up the banded matrix factorization mechanism").

    Attributes:
        coefficients: c_0 .. c_{b-1}, the first above 0; as many as bands, only ratios matter. The
            square root of prefix sums is 1, 1/2, 3/8, 5/16, ...
        memory, source: see ``BandedNoise``.
    """

    coefficients: tuple[float, ...] = ()
    memory: Memory = "rows"
    source: Source = "keyed"

    def __post_init__(self) -> None:
        if isinstance(self.coefficients, np.ndarray) and self.coefficients.ndim == 1:
            object.__setattr__(self, "coefficients", tuple(self.coefficients.tolist()))
        judge(self)
        noise_source(self.source)
        given = list(self.coefficients)
        if not given:
            raise ValueError(
                "coefficients is missing: they are what this method correlates by, such as "
                "[1, 0.5, 0.375]; to have them found use method='banded'"
            )
        if not (np.isfinite(given).all() and given[0] > 0):
            raise ValueError(
                f"coefficients={given} must be finite, the first of them above 0: it is the "
                "step's own noise"
            )

    @property
    def bands(self) -> int:
        """b."""
        return len(self.coefficients)

    def _require_tame(self, scaled: Floats, steps: int) -> None:
        """That no step's noise is amplified beyond what the mechanism takes. Cost T b."""
        lengths = np.minimum(self.bands, steps - np.arange(steps))
        norms = np.sqrt(np.cumsum(scaled**2))[lengths - 1]
        with np.errstate(all="ignore"):
            inverse = lfilter([1.0], scaled, np.eye(1, steps)[0])
            amplified = float((norms * np.sqrt(np.cumsum(inverse**2))).max())
        if not amplified <= LARGEST_ROW:  # a NaN too
            raise ValueError(
                f"coefficients={list(self.coefficients)} amplify the noise of some step "
                f"{amplified:.3g} times in steps={steps} (limit {LARGEST_ROW:g}), and rounding "
                "with it; take coefficients that fall faster, such as [1, 0.5, 0.375]"
            )

    def correlation(
        self, steps: int, sample_rate: float, sigma_of: SigmaOfBands | None
    ) -> Correlation:
        """See ``NoiseMethod``. Cost T b^2, memory T b."""
        if self.bands > steps:
            raise ValueError(
                f"coefficients are {self.bands} for steps={steps}; use at most as many as steps"
            )
        if self.bands == 1:
            return None, None
        load = PrefixSums(steps)
        response = Response(load.impulse()[:, None], np.ones(steps))
        scaled = np.asarray(self.coefficients) / max(np.abs(self.coefficients))
        self._require_tame(scaled, steps)
        columns = unit_columns(np.tile(scaled, (steps, 1)))
        value = float(toeplitz_objective(scaled, response))
        words = f"given coefficients (error: {load.name})"
        known = (value, response.independent(), None, "toeplitz", words)
        return MixingMatrix(BandedLower(columns), *known), None
