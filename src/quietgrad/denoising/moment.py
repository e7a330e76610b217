"""How much of the mechanism's noise an exponential average of released gradients holds.

Symbols: h_tk the weight of release k in the average at step t; row r_k of the mixing matrix:
release k holds sum_j r_kj z_j with independent draws z_j. The average's noise is (sigma C) ||sum_k
h_tk r_k||; with independent noise that is (sigma C) ||h_t||, smaller than one release's by about
sqrt((1-b)/(1+b)). Its mass is sum_k h_tk: what it holds of a gradient that stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import require_at_least


@dataclass(frozen=True)
class MomentNoise:
    """Noise of a running average m <- decay m + gain g, from the noise of the g that went into it.
    Immutable; ``after`` gives the next.

    Attributes:
        variance: of every entry, of releases with independent noise.
        row: coefficients of the mechanism's draws, of releases with correlated noise; grows by one
            a step.
        releases: how many went into it.
        mass: sum of their weights.
    """

    variance: float = 0.0
    row: NDArray[np.float64] | None = None
    releases: int = 0
    mass: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the noise in every entry of the average."""
        correlated = 0.0 if self.row is None else float(self.row @ self.row)
        return math.sqrt(self.variance + correlated)

    def after(
        self,
        decay: float,
        gain: float,
        noise_std: float,
        mixing_row: Sequence[float] | NDArray[np.float64] | None = None,
    ) -> MomentNoise:
        """The average after one more release.

        Args:
            decay, gain: m <- decay m + gain g.
            noise_std: standard deviation of g's noise.
            mixing_row: r of that release, up to a positive factor; None where its noise is
                independent of all others. Cost: its length.

        Raises:
            ValueError: if releases with and without correlation are mixed, or a row is shorter than
                an earlier one.
        """
        require_at_least(
            "noise_std",
            noise_std,
            0,
            "pass the standard deviation of the released gradient's noise",
        )
        mass = decay * self.mass + gain
        if mixing_row is None:
            if self.row is not None:
                raise ValueError(
                    "mixing_row=None after releases with correlated noise: one mechanism releases "
                    "all gradients of a run; begin a new optimiser with a new run"
                )
            return MomentNoise(
                decay**2 * self.variance + (gain * noise_std) ** 2, None, self.releases + 1, mass
            )
        if self.variance:
            raise ValueError(
                "mixing_row is given after releases with independent noise: one mechanism releases "
                "all gradients of a run; begin a new optimiser with a new run"
            )
        row = np.asarray(mixing_row, dtype=np.float64)
        before = np.zeros(0) if self.row is None else self.row
        if len(row) < len(before):
            raise ValueError(
                f"mixing_row has {len(row)} entries after one of {len(before)}: rows grow with the "
                "steps"
            )
        norm = float(np.linalg.norm(row))
        new = gain * noise_std / norm * row if norm else np.zeros_like(row)
        new[: len(before)] += decay * before
        return MomentNoise(0.0, new, self.releases + 1, mass)

    def share_in(
        self, noise_std: float, mixing_row: Sequence[float] | NDArray[np.float64] | None
    ) -> float:
        """How much of the average's own noise a further release holds: its noise is this multiple
        of the average's, and noise that is independent of the average.

        Args:
            noise_std, mixing_row: of that release, as for ``after``. Without correlation the share
                is 0.

        Raises:
            ValueError: if the row is shorter than an earlier one.
        """
        if mixing_row is None or self.row is None or not self.row.any():
            return 0.0
        row = np.asarray(mixing_row, dtype=np.float64)
        if len(row) < len(self.row):
            raise ValueError(
                f"mixing_row has {len(row)} entries after one of {len(self.row)}: rows grow with "
                "the steps"
            )
        norm = float(np.linalg.norm(row))
        if not norm:
            return 0.0
        return (
            noise_std / norm * float(row[: len(self.row)] @ self.row) / float(self.row @ self.row)
        )
