"""The one mechanism: a clipped sum gets Gaussian noise, independent or correlated across steps.

Released row t is row t of C_mix^-1 z, produced online by forward substitution; independent noise is
one band, C_mix = I. Symbols: T steps, b bands, C = C_mix, z_t independent draws,
w_t = (z_t - sum_{m=1}^{b-1} C[t, t-m] w_{t-m}) / C[t, t] (docs/privacy/correlated_noise.md).

What a step needs of the past is explicit: a ``NoiseHistory``. It holds the last b - 1 rows, or
nothing, when rows are made anew from their keyed streams. Because streams are keyed by (step,
parameter), the noise is the same for any cut into micro-batches and any number of processes, and a
process that releases some parameters only (a shard) holds the history of those alone.

A block is a stretch of steps whose noise refers to no step before it. A run is one block, unless it
goes on where the earlier draws are lost: a new block sets C[t, j] = 0 for t in it and j before it,
which only shortens columns, so the sensitivity stays within what was accounted for.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from quietgrad.checks import make_plain, require_positive, require_word
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.events import SensitivityClaim, SideRelease
from quietgrad.noise.beside import cover_side_sums
from quietgrad.noise.correlation.banded import BandedLower, Floats, inside
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.noise.sources.grid import covered, drift, noise_std
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.noise.sources.of_stretches import OfStretches
from quietgrad.noise.sources.source import NoiseSource
from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.randomness import RandomKey

COLUMN_TOLERANCE = 1e-10
# regenerated rows leave out smaller coefficients: they move the accounted columns by at most 1e-12
# T sqrt(b)
NEGLIGIBLE = 1e-12
LARGEST_NORMAL = 14.0  # exceeded with probability 2e-44 by a normal number
# norm of a row of C^-1: single precision then still leaves four digits of every independent draw
LARGEST_ROW = 1000.0
Rows = tuple[Mapping[str, Tensor], ...]
Memory = Literal["rows", "regenerate"]
MEMORIES: tuple[Memory, ...] = get_args(Memory)


@dataclass(frozen=True)
class NoiseHistory:
    """What the noise of one step depends on. Secret: it can be subtracted from what was released.

    Attributes:
        step: the release that comes next.
        since: first step of the block.
        rows: w_{step-1}, w_{step-2}, ... of the block, at most b - 1, unscaled; empty with
            memory="regenerate".
        coefficients: rows step-1, step-2, ... of C^-1, at most b - 1, [step] each; public.
    """

    step: int
    since: int
    rows: Rows = field(default=(), repr=False)
    coefficients: tuple[Floats, ...] = ()


@dataclass(frozen=True)
class GaussianNoise:
    """Noise of standard deviation sigma C per independent draw, in every entry of every parameter.

    State goes in and out: ``init`` gives the first, ``update`` adds the noise of one step and gives
    the next. Checking a mixing matrix costs T^2 b once.

    Attributes:
        noise_multiplier: sigma, relative to the clipping norm, on the sum of clipped gradients.
        mixing: C_mix, whose columns have norm at most 1; None is the identity, independent noise.
        memory: "rows" keeps b - 1 copies of the trainable parameters; "regenerate" keeps none and
            draws every earlier row of the block again, at most t + 1 draws an entry at step t (the
            inverse of a banded matrix is not banded; coefficients below 1e-12 are left out).
        source: where the independent draws come from. A secure one makes them larger by what its
            grid costs (``quietgrad.noise.grid``), keeps rows in float64 on its grid, and cannot
            regenerate them.
        beside: what is released with the gradients of a step, with independent noise.

    Raises:
        ValueError: naming the setting and the remedy.
    """

    noise_multiplier: float
    mixing: BandedLower | None = None
    memory: str = "rows"
    source: NoiseSource = field(default_factory=KeyedSource)
    beside: tuple[SideRelease, ...] = ()

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        make_plain(self, "noise_multiplier")
        require_word("memory", self.memory, MEMORIES)
        if self.mixing is not None:
            self._require_sound(self.mixing)

    def _require_sound(self, mixing: BandedLower) -> None:
        largest = float(np.linalg.norm(mixing.columns, axis=1).max())
        if not largest <= 1 + COLUMN_TOLERANCE:  # a NaN too
            raise ValueError(
                f"mixing has a column of norm {largest:.12g}; columns of norm at most 1 are what "
                "is accounted for: divide each by its norm"
            )
        if not (mixing.columns[:, 0] > 0).all():
            raise ValueError(
                "mixing has a diagonal entry that is not positive, so it has no inverse"
            )
        amplified = mixing.largest_inverse_row()
        if not amplified <= LARGEST_ROW:
            raise ValueError(
                f"mixing amplifies the noise of some step {amplified:.3g} times, and rounding with "
                "it, so what would run is not what is accounted for (limit "
                f"{LARGEST_ROW:g}); give the workload a white part (Curvature(floor=1e-3), "
                "noise.floor) or use fewer bands"
            )
        if self.source.grid:
            self._require_exact_rows(mixing, amplified)

    def _require_exact_rows(self, mixing: BandedLower, amplified: float) -> None:
        """For rows on a grid: what float64 adds to the rounding of a row's second part stays within
        half a step of the grid (``quietgrad.noise.sources.grid``).
        """
        if self.memory != "rows":
            raise ValueError(
                f"memory={self.memory!r} sums rows with rounded coefficients, which leaves the "
                f"grid of source={self.source.name!r}; use memory='rows' (noise.memory)"
            )
        rows = (mixing.row(t) for t in range(mixing.steps))
        largest = (
            LARGEST_NORMAL
            * amplified
            * max(float(np.abs(band[1:]).sum() / band[0]) for band in rows)
        )
        if not largest * (self.bands + 1) * 2.0**-52 <= self.source.grid / 2:
            raise ValueError(
                f"mixing amplifies the noise of some step {amplified:.3g} times: float64 cannot "
                f"keep its rows on the grid of source={self.source.name!r}; use fewer bands, "
                "or "
                "give the workload a white part (Curvature(floor=1e-3), noise.floor)"
            )

    @property
    def bands(self) -> int:
        return 1 if self.mixing is None else self.mixing.bands

    @property
    def digest(self) -> str | None:
        """Names the matrix, with which alone a block that it began goes on. None: no matrix."""
        if self.mixing is None:
            return None
        return hashlib.sha256(np.ascontiguousarray(self.mixing.columns).tobytes()).hexdigest()

    def at(self, noise_multiplier: float) -> GaussianNoise:
        """The same noise of another sigma; rows are correlated in units of their own noise. The
        matrix is not looked at again: nothing that is checked of it depends on sigma.
        """
        if noise_multiplier == self.noise_multiplier:
            return self
        require_positive("noise_multiplier", noise_multiplier)
        return self._but("noise_multiplier", noise_multiplier)

    def require_fine_grid(self, claim: SensitivityClaim, entries: int) -> None:
        """Before a release is written down: that the source's grid is fine enough for it.

        Raises:
            ValueError: as ``update`` would, when the release is spent.
        """
        noise_std(self.noise_multiplier, claim, entries, self.bands, self.source.grid)
        for side in self.beside:
            noise_std(side.noise_multiplier, SensitivityClaim(1.0), 1, 1, self.source.grid)

    def of(self, places: Mapping[str, Stretch | Columns]) -> GaussianNoise:
        """The same noise, for a process that holds stretches of these parameters: its tensors,
        gradients and rows, are those stretches.
        """
        return self._but("source", OfStretches(self.source, places)) if places else self

    def _but(self, name: str, value: object) -> GaussianNoise:
        other = copy.copy(self)
        object.__setattr__(other, name, value)
        return other

    def init(self, step: int = 0) -> NoiseHistory:
        """The state of a block that begins at ``step``."""
        return NoiseHistory(step, step)

    def update(
        self,
        clipped: ClippedSum,
        key_of: Callable[[int], RandomKey],
        history: NoiseHistory,
        entries: int | None = None,
        with_beside: bool = True,
    ) -> tuple[NoisySum, NoiseHistory]:
        """Adds the noise of step ``history.step``.

        Args:
            clipped: the whole batch's sum (all micro-batches and ranks added up), of all trainable
                parameters. Private.
            key_of: step to the root that draws it, or drew it (with memory="regenerate"). A step is
                never used twice with one root: two sums with the same noise give away their
                difference.
            history: from the step before, ``init()`` or ``replay()``.
            entries: d, of all parameters, where ``clipped`` holds those of one owner.
            with_beside: whether this process draws the numbers beside the gradients: one does.

        Returns:
            The released sum and the state of the next step. Cost: one normal draw an entry, and
            with "rows" b multiplications; memory: a copy of the trainable parameters, and the rows.

        Raises:
            ValueError: if the matrix has no such row.
        """
        step, grid = history.step, self.source.grid
        if entries is None:
            entries = sum(g.numel() for g in clipped.gradients.values())
        sides = self.beside if with_beside else ()
        scale = noise_std(self.noise_multiplier, clipped.claim, entries, self.bands, grid)
        if self.mixing is None:  # needs nothing of the past, and one parameter's draw at a time
            key = key_of(step)
            drawn = {
                name: covered(g, self.source.normal(g, key, step, name), scale, grid)
                for name, g in clipped.gradients.items()
            }
            noisy = NoisySum(drawn, scale, beside=self._beside(clipped, key, step, sides))
            return noisy, NoiseHistory(step + 1, history.since)
        coefficients, later = self._advance(self.mixing, history)
        if self.memory == "rows":
            noise = self._next_row(clipped.gradients, key_of(step), history)
            later = replace(later, rows=(noise, *history.rows)[: self.bands - 1])
        else:
            noise = self._regenerated(clipped.gradients, key_of, coefficients)
        sums = {name: covered(g, noise[name], scale, grid) for name, g in clipped.gradients.items()}
        std, beside = (
            scale * float(np.linalg.norm(coefficients)),
            self._beside(clipped, key_of(step), step, sides),
        )
        return NoisySum(sums, std, mixing_row=coefficients, beside=beside), later

    def _beside(
        self, clipped: ClippedSum, key: RandomKey, step: int, sides: tuple[SideRelease, ...]
    ) -> dict[str, float]:
        return cover_side_sums(clipped.private.beside, sides, self.source, key, step)

    def replay(
        self,
        like: Mapping[str, Tensor],
        key_of: Callable[[int], RandomKey],
        since: int,
        step: int,
        kept: NoiseHistory | None = None,
    ) -> NoiseHistory:
        """The history at ``step`` of a block that began at ``since``, from its keyed streams alone:
        how a run goes on after a stop. Cost with "rows": the noise of the steps drawn again.

        Args:
            like: tensors in the shape, dtype and device of the gradients.
            key_of: step to the root of the streams that drew it; sessions have roots of their own.
            since, step: first step of the block, step that comes next.
            kept: an earlier history of the same block, with its rows: only the steps after it are
                drawn again.
        """
        rows: Rows = () if kept is None else kept.rows
        if self.memory == "rows" and self.bands > 1:
            for t in range(since if kept is None else kept.step, step):
                rows = (self._next_row(like, key_of(t), NoiseHistory(t, since, rows)), *rows)[
                    : self.bands - 1
                ]
        return NoiseHistory(step, since, rows, self._inverse_rows(since, step))

    def _inverse_rows(self, since: int, step: int) -> tuple[Floats, ...]:
        """Rows step - 1, step - 2, ... of C^-1 within the block, at most b - 1, [row + 1] each. One
        solve: row i is C^-T applied to the i-th unit vector. Cost 4 (step - since) b^2.
        """
        size = step - since
        count = min(self.bands - 1, size)
        if self.mixing is None or not count:
            return ()
        bands = min(self.bands, size)
        columns = self.mixing.columns[since:step, :bands] * inside(size, bands)
        units = np.zeros((size, count))
        units[size - 1 - np.arange(count), np.arange(count)] = 1.0
        solved = BandedLower(columns).solve_transposed(units)
        before = np.zeros(since)
        return tuple(np.concatenate((before, solved[: size - k, k])) for k in range(count))

    def _advance(self, mixing: BandedLower, history: NoiseHistory) -> tuple[Floats, NoiseHistory]:
        """Row ``history.step`` of C^-1 within the block, [step + 1], and the
        history without rows.
        """
        t = history.step
        if t >= mixing.steps:
            raise ValueError(f"step={t} is beyond the mixing matrix, which has {mixing.steps} rows")
        band = mixing.row(t)
        row = np.zeros(t + 1)
        row[t] = 1.0
        for m, before in enumerate(history.coefficients, start=1):
            row[: len(before)] -= band[m] * before
        row /= band[0]
        return row, NoiseHistory(
            t + 1, history.since, (), (row, *history.coefficients)[: self.bands - 1]
        )

    def _next_row(
        self, like: Mapping[str, Tensor], key: RandomKey, history: NoiseHistory
    ) -> dict[str, Tensor]:
        assert self.mixing is not None
        band = self.mixing.row(history.step)
        made = {}
        for name, tensor in like.items():
            row = self.source.normal(tensor, key, history.step, name, 1 / float(band[0]))
            if history.rows:
                before = [kept[name] for kept in history.rows]
                row.add_(
                    drift(
                        before,
                        [float(c / band[0]) for c in band[1 : len(before) + 1]],
                        self.source.grid,
                    )
                )
            made[name] = row
        return made

    def _regenerated(
        self, like: Mapping[str, Tensor], key_of: Callable[[int], RandomKey], coefficients: Floats
    ) -> dict[str, Tensor]:
        used = np.flatnonzero(np.abs(coefficients) > NEGLIGIBLE)
        made = {}
        for name, tensor in like.items():
            row = tensor.new_zeros(tensor.shape)
            for j in used:
                row.add_(
                    self.source.normal(tensor, key_of(int(j)), int(j), name),
                    alpha=float(coefficients[j]),
                )
            made[name] = row
        return made
