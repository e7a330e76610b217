"""Schedules of a whole plan, and phases that follow one another."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from quietgrad.checks import require_at_least, require_int, require_positive
from quietgrad.events import MOST_STEPS as MOST_ACCOUNTED
from quietgrad.events import SMALLEST_CLIPPING_NORM
from quietgrad.schedules.course import Course, StepSettings
from quietgrad.schedules.shapes import Constant, Schedule, factors_of

MOST_STEPS = 100_000  # of settings that change


@dataclass(frozen=True)
class Schedules:
    """Factors by step on a plan's settings; each a schedule or a number.

    Attributes:
        noise: on the noise multiplier, given or found for a target epsilon.
        clipping_norm: on ``max_grad_norm``; the noise goes with it, so it costs nothing.
        batch_size: on the expected batch size, and so on the sampling rate.
    """

    noise: Schedule | float = 1.0
    clipping_norm: Schedule | float = 1.0
    batch_size: Schedule | float = 1.0

    @property
    def are_constant(self) -> bool:
        """Whether no factor changes from step to step."""
        every = (self.noise, self.clipping_norm, self.batch_size)
        return not any(isinstance(f, Schedule) and not isinstance(f, Constant) for f in every)

    def factors(self, steps: int, where: str = "schedules") -> list[tuple[float, float, float]]:
        """[steps] of (noise, clipping norm, batch size).

        Raises:
            ValueError, TypeError: naming the schedule and the remedy.
        """
        return list(
            zip(
                factors_of(f"{where}.noise", self.noise, steps),
                factors_of(f"{where}.clipping_norm", self.clipping_norm, steps),
                factors_of(f"{where}.batch_size", self.batch_size, steps),
                strict=True,
            )
        )


@dataclass(frozen=True)
class Phase(Schedules):
    """A part of a run with settings of its own; where it ends is public. Schedules run over the
    phase's own steps.

    Attributes:
        steps: how many; give this or ``epochs``.
        epochs: passes over the records at the phase's rate, where that stays the same.
    """

    steps: int | None = None
    epochs: float | None = None

    def steps_at(self, sample_rate: float, where: str) -> int:
        """T of the phase.

        Args:
            sample_rate: q of the plan.
            where: what to call the phase in errors.

        Raises:
            ValueError, TypeError: naming the setting and the remedy.
        """
        return steps_of(self.steps, self.epochs, sample_rate, self.batch_size, where)


def steps_of(
    steps: int | None,
    epochs: float | None,
    sample_rate: float,
    batch_size: Schedule | float,
    where: str,
) -> int:
    """T, from steps or epochs, of which one is given.

    Raises:
        ValueError, TypeError: naming the setting and the remedy.
    """
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"{where}steps={steps!r} and {where}epochs={epochs!r}: give exactly one of "
            f"{where}steps and {where}epochs"
        )
    if steps is not None:
        require_int(f"{where}steps", steps)
        require_at_least(f"{where}steps", steps, 1, "train for at least one step")
        return int(steps)
    assert epochs is not None
    require_positive(f"{where}epochs", epochs)
    same = batch_size.value if isinstance(batch_size, Constant) else batch_size
    if not isinstance(same, int | float):
        raise ValueError(
            f"{where}epochs={epochs!r} with a schedule of the batch size: how many steps that is "
            "depends on itself; give steps"
        )
    whole = epochs / (sample_rate * same)
    if not whole <= MOST_ACCOUNTED:
        raise ValueError(
            f"{where}epochs={epochs!r} are {whole:.3g} steps at sampling rate "
            f"{sample_rate * same:.4g}, and {MOST_ACCOUNTED:,} are the most that are accounted "
            "for; train for fewer epochs, or with a larger expected batch size"
        )
    return max(1, round(whole))


def course_of(
    parts: Sequence[tuple[int, Schedules, str]],
    sample_rate: float,
    max_grad_norm: float,
) -> Course:
    """The settings of every step at noise multiplier 1 (``Course.scaled`` gives another).

    Args:
        parts: (steps, factors, name in errors) of each phase.
        sample_rate: q.
        max_grad_norm: C.

    Raises:
        ValueError, TypeError: for factors that are no numbers above 0, a rate above 1, or a norm
            that no clipper takes.
    """

    def settings(factors: tuple[float, float, float], where: str) -> StepSettings:
        noise, norm, size = factors
        rate = sample_rate * size
        if rate > 1:
            raise ValueError(
                f"{where}.batch_size reaches {size:g} times the sampling rate {sample_rate:.4g}, "
                f"which is above 1; use factors of at most {1 / sample_rate:.4g}"
            )
        reached = max_grad_norm * norm
        if not SMALLEST_CLIPPING_NORM <= reached <= 1 / SMALLEST_CLIPPING_NORM:
            raise ValueError(  # now, and not when that step comes
                f"{where}.clipping_norm reaches {norm:g} times max_grad_norm={max_grad_norm:g}, "
                f"and clipping norms must stay in {SMALLEST_CLIPPING_NORM:g} .. "
                f"{1 / SMALLEST_CLIPPING_NORM:g}; use factors nearer to 1"
            )
        return StepSettings(noise, rate, reached)

    courses = []
    for steps, schedules, where in parts:
        if schedules.are_constant:
            (only,) = schedules.factors(1, where)
            courses.append(Course(((steps, settings(only, where)),)))
            continue
        if steps > MOST_STEPS:
            raise ValueError(
                f"{where} over steps={steps}: settings are kept step by step, for at most "
                f"{MOST_STEPS:,}; use constant factors in phases, or fewer steps"
            )
        courses.append(Course.of(settings(each, where) for each in schedules.factors(steps, where)))
    return functools.reduce(Course.then, courses)
