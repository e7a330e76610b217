"""Noise that is correlated across steps: released row t is row t of C_mix^-1 z, produced online by forward substitution.

Symbols: T steps, b bands, C = C_mix, z_t independent draws, w_t = (z_t - sum_{m=1}^{b-1} C[t, t-m] w_{t-m}) / C[t, t] (methods.md, section 3).

What a step needs of the past is explicit: a ``NoiseHistory``. It holds the last b - 1 rows, or nothing, when rows are made anew from their keyed streams. Because streams are keyed
by (step, parameter), the noise is the same for any cut into micro-batches and any number of processes, and a process that releases some parameters only (a shard) holds
the history of those alone.

A block is a stretch of steps whose noise refers to no step before it. A run is one block, unless it goes on where the earlier draws are lost: a new block sets
C[t, j] = 0 for t in it and j before it, which only shortens columns, so the sensitivity stays within what was accounted for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quietgrad.checks import require_positive, require_word
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.noise.banded import BandedLower, Floats
from quietgrad.noise.gaussian import normal
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.randomness import RandomKey

COLUMN_TOLERANCE = 1e-10
NEGLIGIBLE = (
    1e-12  # regenerated rows leave out smaller coefficients: they move the accounted columns by at most 1e-12 T sqrt(b)
)
LARGEST_ROW = 1000.0  # norm of a row of C^-1: single precision then still leaves four digits of every independent draw
Rows = tuple[Mapping[str, Tensor], ...]
MEMORIES = ("rows", "regenerate")


@dataclass(frozen=True)
class NoiseHistory:
    """What the noise of one step depends on. Secret: it can be subtracted from what was released.

    Attributes:
        step: the release that comes next.
        since: first step of the block.
        rows: w_{step-1}, w_{step-2}, ... of the block, at most b - 1, unscaled; empty with memory="regenerate".
        coefficients: rows step-1, step-2, ... of C^-1, at most b - 1, [step] each; public.
    """

    step: int
    since: int
    rows: Rows = ()
    coefficients: tuple[Floats, ...] = ()


@dataclass(frozen=True)
class BandedNoise:
    """Noise of standard deviation sigma C per independent draw, correlated by a banded mixing matrix. Checking the matrix costs T^2 b once.

    Attributes:
        noise_multiplier: sigma, relative to the clipping norm, on the sum of clipped gradients.
        mixing: C_mix; every column has norm at most 1.
        memory: "rows" keeps b - 1 copies of the trainable parameters; "regenerate" keeps none and draws every earlier row of the block again, at most t + 1 draws an entry
            at step t (the inverse of a banded matrix is not banded; coefficients below 1e-12 are left out).
    """

    noise_multiplier: float
    mixing: BandedLower
    memory: str = "rows"

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        require_word("memory", self.memory, MEMORIES)
        largest = float(np.linalg.norm(self.mixing.columns, axis=1).max())
        if not largest <= 1 + COLUMN_TOLERANCE:  # a NaN too
            raise ValueError(
                f"mixing has a column of norm {largest:.12g}; columns of norm at most 1 are what is accounted for: divide each by its norm"
            )
        if not (self.mixing.columns[:, 0] > 0).all():
            raise ValueError("mixing has a diagonal entry that is not positive, so it has no inverse")
        amplified = self.mixing.largest_inverse_row()
        if not amplified <= LARGEST_ROW:
            raise ValueError(
                f"mixing amplifies the noise of some step {amplified:.3g} times, and rounding with it, so what would run is not what is accounted for (limit "
                f"{LARGEST_ROW:g}); give the workload a white part (Curvature(floor=1e-3), noise.floor) or use fewer bands"
            )

    @property
    def bands(self) -> int:
        return self.mixing.bands

    @property
    def digest(self) -> str:
        """Names the matrix: a block goes on only with the matrix that it began with."""
        return hashlib.sha256(np.ascontiguousarray(self.mixing.columns).tobytes()).hexdigest()

    def begin(self, step: int = 0) -> NoiseHistory:
        """The history of a block that begins at ``step``."""
        return NoiseHistory(step, step)

    def release(
        self,
        clipped: ClippedSum,
        key: RandomKey,
        step: int,
        history: NoiseHistory,
        key_of: Callable[[int], RandomKey] | None = None,
    ) -> tuple[NoisySum, NoiseHistory]:
        """Adds the noise of step ``step``.

        Args:
            clipped: the whole batch's sum (all micro-batches and ranks added up).
            key: root of the streams of this step.
            step: number of the release, below T, never used twice with one key.
            history: from the step before, or ``begin()``.
            key_of: for memory="regenerate", step to the root that drew it, where that is not ``key`` (None: always ``key``).

        Returns:
            The released sum and the history of the next step. Cost with "rows": one normal draw and b multiplications an entry.

        Raises:
            ValueError: if the history is of another step, or the matrix has no such row.
        """
        if history.step != step:
            raise ValueError(
                f"history is that of step {history.step}, not {step}; pass the one that the release before returned"
            )
        coefficients, later = self._advance(history)
        if self.memory == "rows":
            noise = self._next_row(clipped.gradients, key, history)
            later = NoiseHistory(later.step, later.since, (noise, *history.rows)[: self.bands - 1], later.coefficients)
        else:
            noise = self._regenerated(clipped.gradients, key_of or (lambda _: key), coefficients)
        scale = self.noise_multiplier * clipped.claim.max_grad_norm
        noisy = {name: g + noise[name] * scale for name, g in clipped.gradients.items()}
        return NoisySum(noisy, scale * float(np.linalg.norm(coefficients)), mixing_row=coefficients), later

    def replay(
        self, like: Mapping[str, Tensor], key_of: Callable[[int], RandomKey], since: int, step: int
    ) -> NoiseHistory:
        """The history at ``step`` of a block that began at ``since``, from its keyed streams alone: how a run goes on after a stop. Cost: the noise of all those steps.

        Args:
            like: tensors in the shape, dtype and device of the gradients.
            key_of: step to the root of the streams that drew it; sessions have roots of their own.
            since, step: first step of the block, step that comes next.
        """
        history = self.begin(since)
        for _ in range(since, step):
            _, later = self._advance(history)
            rows: Rows = ()
            if self.memory == "rows":
                rows = (self._next_row(like, key_of(history.step), history), *history.rows)[: self.bands - 1]
            history = NoiseHistory(later.step, later.since, rows, later.coefficients)
        return history

    def _advance(self, history: NoiseHistory) -> tuple[Floats, NoiseHistory]:
        """Row ``history.step`` of C^-1 within the block, [step + 1], and the history without rows."""
        t = history.step
        if t >= self.mixing.steps:
            raise ValueError(f"step={t} is beyond the mixing matrix, which has {self.mixing.steps} rows")
        band = self.mixing.row(t)
        row = np.zeros(t + 1)
        row[t] = 1.0
        for m, before in enumerate(history.coefficients, start=1):
            row[: len(before)] -= band[m] * before
        row /= band[0]
        return row, NoiseHistory(t + 1, history.since, (), (row, *history.coefficients)[: self.bands - 1])

    def _next_row(self, like: Mapping[str, Tensor], key: RandomKey, history: NoiseHistory) -> dict[str, Tensor]:
        band = self.mixing.row(history.step)
        made = {}
        for name, tensor in like.items():
            row = normal(tensor, key, history.step, name)
            for m, before in enumerate(history.rows, start=1):
                row.sub_(before[name], alpha=float(band[m]))
            made[name] = row.div_(float(band[0]))
        return made

    def _regenerated(
        self, like: Mapping[str, Tensor], key_of: Callable[[int], RandomKey], coefficients: Floats
    ) -> dict[str, Tensor]:
        used = np.flatnonzero(np.abs(coefficients) > NEGLIGIBLE)
        made = {}
        for name, tensor in like.items():
            row = tensor.new_zeros(tensor.shape)
            for j in used:
                row.add_(normal(tensor, key_of(int(j)), int(j), name), alpha=float(coefficients[j]))
            made[name] = row
        return made
