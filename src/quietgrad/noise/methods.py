"""Noise as it is asked for: independent from step to step, or correlated by a banded matrix that is
found for a workload, or given. What runs is always ``GaussianNoise``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quietgrad.noise.correlation.bands import BandChoice, choose_bands, default_candidates
from quietgrad.noise.correlation.mixing import Family, MixingMatrix, mixing_matrix
from quietgrad.noise.correlation.workloads import PrefixSums, Workload, as_workload
from quietgrad.noise.mechanism import Memory
from quietgrad.noise.sources.source import Source, noise_source
from quietgrad.records import Count, judge

Bands = Count | Literal["auto"]

# What correlates the steps, and how it was chosen; (None, None) for independent noise.
Correlation = tuple[MixingMatrix | None, BandChoice | None]
SigmaOfBands = Callable[[int], float]


@runtime_checkable
class NoiseMethod(Protocol):
    """What a plan takes: a frozen record, one a file, and one line of a configuration's table."""

    @property
    def source(self) -> Source:
        """What normal numbers come from."""

    @property
    def memory(self) -> Memory:
        """Whether earlier rows of noise are kept or drawn again."""

    def correlation(
        self, steps: int, sample_rate: float, sigma_of: SigmaOfBands | None
    ) -> Correlation:
        """How the noise of different steps hangs together.

        Args:
            steps: T.
            sample_rate: q.
            sigma_of: b to the sigma that the target epsilon needs with b bands; None
                where sigma itself is given.

        Raises:
            ValueError, TypeError: naming the setting and the remedy.
        """


@dataclass(frozen=True)
class IndependentNoise:
    """Every step's noise is its own.

    Attributes:
        source: "keyed", or "secure" for numbers from a cryptographic stream on a grid
            (docs/privacy/secure_noise.md), which needs the extra ``secure``.
    """

    source: Source = "keyed"

    def __post_init__(self) -> None:
        judge(self)
        noise_source(self.source)  # a missing package is said before any work

    @property
    def memory(self) -> Memory:
        """Nothing is kept."""
        return "rows"

    def correlation(
        self, steps: int, sample_rate: float, sigma_of: SigmaOfBands | None
    ) -> Correlation:
        """Not at all, see ``NoiseMethod``."""
        return None, None


@dataclass(frozen=True)
class BandedNoise:
    """Correlated over b steps, the best for a workload (DP-BandMF; NoiseCurve for ``Curvature``).

    Attributes:
        bands: b; "auto" chooses it from public facts (``choose_bands``), 1 is independent noise.
        family: "banded" (every banded matrix), "toeplitz" (columns alike: b numbers, for many
            steps), or "auto": banded up to 4096 steps.
        memory: "rows" (b - 1 copies of the trainable parameters) or "regenerate" (none, more time).
        source: see ``IndependentNoise``.
        workload: what is minimised: ``PrefixSums``, ``Curvature``, a [steps, steps] matrix, or a
            function from steps to one (None: prefix sums).
    """

    bands: Bands = "auto"
    family: Family = "auto"
    memory: Memory = "rows"
    source: Source = "keyed"
    workload: Workload | NDArray[np.float64] | Callable[[int], Workload] | None = None

    def __post_init__(self) -> None:
        judge(self)
        noise_source(self.source)

    def correlation(
        self, steps: int, sample_rate: float, sigma_of: SigmaOfBands | None
    ) -> Correlation:
        """See ``NoiseMethod``."""
        if self.bands == 1:
            return None, None
        given = PrefixSums if self.workload is None else self.workload
        load = as_workload(given(steps) if callable(given) else given)
        if load.steps != steps:
            raise ValueError(
                f"workload is for {load.steps} steps, the run has {steps}; build it for the steps "
                "of the run"
            )
        if self.bands != "auto":
            return mixing_matrix(load, self.bands, self.family), None
        if sigma_of is None:
            raise ValueError(
                "bands='auto' weighs correlation against the noise that target_epsilon needs; "
                "give target_epsilon instead of noise_multiplier, or a number of bands"
            )
        candidates = default_candidates(steps, sample_rate)
        choice = choose_bands(load, sigma_of, candidates, self.family)
        return choice.chosen.mixing, choice


@dataclass(frozen=True)
class MatrixNoise:
    """Correlated by a matrix that was already found.

    Attributes:
        mixing: from ``mixing_matrix``, for the steps of the run.
        memory, source: see ``BandedNoise``.
    """

    mixing: MixingMatrix
    memory: Memory = "rows"
    source: Source = "keyed"

    def __post_init__(self) -> None:
        judge(self)
        noise_source(self.source)
        if not isinstance(self.mixing, MixingMatrix):
            raise TypeError(
                "mixing must be what quietgrad.noise.mixing_matrix returned, not "
                f"{type(self.mixing).__name__}; for a matrix of your own give its workload and "
                "bands"
            )

    def correlation(
        self, steps: int, sample_rate: float, sigma_of: SigmaOfBands | None
    ) -> Correlation:
        """See ``NoiseMethod``."""
        if self.mixing.steps != steps:
            raise ValueError(
                f"mixing has {self.mixing.steps} rows for {steps} steps; build it for the steps "
                "of the run"
            )
        return self.mixing, None
