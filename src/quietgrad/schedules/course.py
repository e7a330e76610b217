"""The settings of every step of a run, and the privacy event that they are.

With b bands a record is in one of b parts, and takes part in one step of every b in a row. What it
contributes there reaches rows of the mixing matrix that its other contributions do not, and each
row is released in units of its own noise, so its losses compose like those of independent noise,
each at the settings of its step (docs/privacy/correlated_noise.md). Which step of a turn is a
record's own depends on its part; the event counts every turn at the least noise and the highest
rate in it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quietgrad.checks import require_at_least, require_int, require_positive, require_rate
from quietgrad.events import (
    ClippingClaim,
    EventSequence,
    PoissonGaussian,
    PrivacyEvent,
)


@dataclass(frozen=True)
class StepSettings:
    """What a release is made with; public.

    Attributes:
        noise_multiplier: sigma, relative to the clipping norm, on the sum.
        sample_rate: q, before bands enlarge it.
        max_grad_norm: C.
    """

    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        require_rate("sample_rate", self.sample_rate)
        require_positive("max_grad_norm", self.max_grad_norm)

    def to_json(self) -> dict[str, float]:
        return {
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "max_grad_norm": self.max_grad_norm,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StepSettings:
        return cls(
            float(record["noise_multiplier"]),
            float(record["sample_rate"]),
            float(record["max_grad_norm"]),
        )


@dataclass(frozen=True)
class Course:
    """Settings by step, as stretches of steps that are alike.

    Attributes:
        stretches: (number of steps, their settings), in order; neighbours differ.
    """

    stretches: tuple[tuple[int, StepSettings], ...]

    def __post_init__(self) -> None:
        if not self.stretches:
            raise ValueError("a course without steps releases nothing; give at least one step")
        for count, _ in self.stretches:
            require_int("steps", count)
            require_at_least("steps", count, 1, "a stretch has at least one step")

    @classmethod
    def of(cls, settings: Iterable[StepSettings]) -> Course:
        """From the settings of step 0, 1, ..."""
        runs = itertools.groupby(settings)
        return cls(tuple((sum(1 for _ in alike), same) for same, alike in runs))

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(count for count, _ in self.stretches))

    @property
    def steps(self) -> int:
        """T."""
        return self._ends[-1]

    @property
    def varies(self) -> bool:
        """Whether not all steps are alike."""
        return len(self.stretches) > 1

    @property
    def settings(self) -> list[StepSettings]:
        """Of each stretch."""
        return [same for _, same in self.stretches]

    @property
    def highest_rate(self) -> float:
        """Of all steps."""
        return max(same.sample_rate for same in self.settings)

    @property
    def least_noise(self) -> float:
        """Smallest noise multiplier of any step."""
        return min(same.noise_multiplier for same in self.settings)

    @property
    def most_noise(self) -> float:
        """Largest noise multiplier of any step."""
        return max(same.noise_multiplier for same in self.settings)

    def at(self, step: int) -> StepSettings:
        """Of step ``step``, counted from 0.

        Raises:
            ValueError: for a step that the course does not have.
        """
        if not 0 <= step < self.steps:
            raise ValueError(f"step={step} is none of the {self.steps} steps of this course")
        return self.stretches[bisect.bisect_right(self._ends, step)][1]

    def scaled(self, noise: float) -> Course:
        """With every noise multiplier times ``noise``."""
        return Course(
            tuple(
                (count, replace(same, noise_multiplier=same.noise_multiplier * noise))
                for count, same in self.stretches
            )
        )

    def then(self, other: Course) -> Course:
        """This course and another after it."""
        *before, (count, last) = self.stretches
        (more, first), *after = other.stretches
        if last == first:
            return Course((*before, (count + more, last), *after))
        return Course((*before, (count, last), (more, first), *after))

    def worst(self, steps: int) -> Course:
        """So many steps at the least noise and the highest rate of any step."""
        sigma, rate = _worst(self.settings)
        return Course(((steps, StepSettings(sigma, rate, self.at(0).max_grad_norm)),))

    def first(self, steps: int) -> Course:
        """The first ``steps`` of it."""
        kept, left = [], steps
        for count, same in self.stretches:
            if left > 0:
                kept.append((min(count, left), same))
            left -= count
        return Course(tuple(kept))

    def event(self, clipping: ClippingClaim, bands: int = 1) -> PrivacyEvent:
        """What all steps release; of steps that are all alike, the plain event.

        Args:
            clipping: claim of the clipper, the same at all steps.
            bands: b.
        """
        pairs = _runs(
            (count, (same.noise_multiplier, same.sample_rate)) for count, same in self.stretches
        )
        if len(pairs) == 1:
            steps, (sigma, rate) = pairs[0]
            return PoissonGaussian(sigma, rate, max(steps, bands), clipping, bands)
        if bands > 1:
            pairs = self._turns(bands)
        events = tuple(
            PoissonGaussian(sigma, rate, steps, clipping, bands) for steps, (sigma, rate) in pairs
        )
        return events[0] if len(events) == 1 else EventSequence(events)

    def _turns(self, bands: int) -> list[tuple[int, tuple[float, float]]]:
        """Every b steps in a row at the least noise and the highest rate among them; the last few
        count as a whole turn.
        """
        each = list(itertools.chain.from_iterable([same] * count for count, same in self.stretches))
        turns = (each[start : start + bands] for start in range(0, len(each), bands))
        return _runs((bands, _worst(turn)) for turn in turns)

    def to_json(self) -> list[dict[str, Any]]:
        return [{"steps": count, **same.to_json()} for count, same in self.stretches]

    @classmethod
    def from_json(cls, record: Any) -> Course:
        """Reads back what ``to_json`` wrote.

        Raises:
            ValueError: if it lacks something.
        """
        try:
            return cls(tuple((int(r["steps"]), StepSettings.from_json(r)) for r in record))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a course of settings lacks a field: {error}") from error


def _worst(turn: Sequence[StepSettings]) -> tuple[float, float]:
    return min(s.noise_multiplier for s in turn), max(s.sample_rate for s in turn)


def _runs(
    pairs: Iterable[tuple[int, tuple[float, float]]],
) -> list[tuple[int, tuple[float, float]]]:
    alike = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [(sum(count for count, _ in run), same) for same, run in alike]
