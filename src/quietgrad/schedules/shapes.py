"""Shapes of a schedule: small frozen records, and the way to them from a configuration file.

A shape gives one positive factor a step, of a number that is set elsewhere: the noise multiplier
(given, or found for a target epsilon), the clipping norm, the expected batch size. Nothing else
goes in than the step's number and how many steps there are, so a schedule says nothing of data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from quietgrad.checks import listed, nearest, require_finite, require_positive
from quietgrad.records import Above0, Count, conformed, hints_of, judge


@runtime_checkable
class Schedule(Protocol):
    """What a plan takes; objects of your own will do."""

    def values(self, steps: int) -> Sequence[float]:
        """[steps] factors above 0, the same at every call."""


@dataclass(frozen=True)
class Constant:
    """The same at all steps.

    Attributes:
        value: the factor.
    """

    value: Above0 = 1.0

    def __post_init__(self) -> None:
        judge(self)

    def values(self, steps: int) -> Sequence[float]:
        """See ``Schedule``."""
        return [self.value] * steps


@dataclass(frozen=True)
class Linear:
    """A straight line from the first step to the last.

    Attributes:
        first, last: the factors at the two ends.
    """

    first: Above0 = 1.0
    last: Above0 = 1.0

    def __post_init__(self) -> None:
        judge(self)

    def values(self, steps: int) -> Sequence[float]:
        """See ``Schedule``."""
        return [_between(self.first, self.last, x) for x in _ramp(steps)]


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave: slow at both ends, fast in the middle.

    Attributes:
        first, last: the factors at the two ends.
    """

    first: Above0 = 1.0
    last: Above0 = 1.0

    def __post_init__(self) -> None:
        judge(self)

    def values(self, steps: int) -> Sequence[float]:
        """See ``Schedule``."""
        halves = [0.5 - 0.5 * math.cos(math.pi * x) for x in _ramp(steps)]
        return [_between(self.first, self.last, x) for x in halves]


@dataclass(frozen=True)
class Exponential:
    """Times the same number at every step.

    Attributes:
        first, last: the factors at the two ends.
    """

    first: Above0 = 1.0
    last: Above0 = 1.0

    def __post_init__(self) -> None:
        judge(self)

    def values(self, steps: int) -> Sequence[float]:
        """See ``Schedule``."""
        low, high = math.log(self.first), math.log(self.last)
        if low == high:
            return [self.first] * steps
        return [math.exp(_between(low, high, x)) for x in _ramp(steps)]


@dataclass(frozen=True)
class Stepwise:
    """One factor for a while, then the next.

    Attributes:
        factors: in order.
        begins: the steps, counted from 0, at which the second and the others begin; rising.
    """

    factors: tuple[Above0, ...]
    begins: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        judge(self)
        if len(self.begins) != len(self.factors) - 1:
            raise ValueError(
                f"begins={list(self.begins)!r} has {len(self.begins)} entries for "
                f"{len(self.factors)} factors; give one a change, one fewer than factors"
            )
        if list(self.begins) != sorted(set(self.begins)):
            raise ValueError(f"begins={list(self.begins)!r} must rise; give step numbers in order")

    def values(self, steps: int) -> Sequence[float]:
        """See ``Schedule``."""
        if self.begins and self.begins[-1] >= steps:
            raise ValueError(
                f"begins={list(self.begins)!r} names a step that the {steps} steps do not have; "
                f"use steps below {steps}"
            )
        ends = [*self.begins, steps]
        starts = [0, *self.begins]
        return [
            factor
            for factor, start, end in zip(self.factors, starts, ends, strict=True)
            for _ in range(end - start)
        ]


@dataclass(frozen=True)
class Listed:
    """A plain list.

    Attributes:
        factors: one a step.
    """

    factors: tuple[Above0, ...]

    def __post_init__(self) -> None:
        judge(self)

    def values(self, steps: int) -> Sequence[float]:
        """See ``Schedule``."""
        if len(self.factors) != steps:
            raise ValueError(
                f"the list of factors has {len(self.factors)} entries for {steps} steps; give one "
                "a step"
            )
        return list(self.factors)


SHAPES: Mapping[str, Any] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "step": Stepwise,
    "list": Listed,
}


def shape_from(name: str, given: Mapping[str, Any] | float) -> Schedule:
    """The schedule that a file means: ``{shape = "cosine", first = 1, last = 0.5}``, or a number.

    Raises:
        ValueError: naming key, value and remedy.
    """
    if not isinstance(given, Mapping):
        require_positive(name, given)
        return Constant(float(given))
    values = dict(given)
    word = values.pop("shape", None)
    if word not in SHAPES:
        raise ValueError(f"{name}.shape={word!r} is unknown{nearest(str(word), SHAPES)}")
    hints = hints_of(SHAPES[str(word)])
    for key, value in values.items():
        if key not in hints:
            raise ValueError(
                f"{name}.{key}={value!r} is no key of shape={word!r}, whose keys are "
                f"{listed(hints, 'and')}"
            )
        values[key] = conformed(f"{name}.{key}", value, hints[key])
    try:
        made: Schedule = SHAPES[str(word)](**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}.{error}") from None
    return made


def factors_of(name: str, schedule: Schedule | float, steps: int) -> list[float]:
    """[steps] factors, checked.

    Raises:
        ValueError, TypeError: naming ``name`` and the remedy.
    """
    is_one = isinstance(schedule, Schedule) and callable(schedule.values)  # of pandas it is none
    if isinstance(schedule, bool | Mapping) or not (is_one or isinstance(schedule, Real)):
        raise TypeError(
            f"{name}={schedule!r} is no schedule; pass a number or one of "
            "quietgrad.schedules, such as Cosine(1.0, 0.5)"
        )
    if not isinstance(schedule, Schedule):
        require_positive(name, schedule)
        return [float(schedule)] * steps
    try:
        values = [float(value) for value in schedule.values(steps)]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if len(values) != steps:
        raise ValueError(
            f"{name}={schedule!r} gives {len(values)} factors for {steps} steps; give one a step"
        )
    for step, value in enumerate(values):
        require_finite(f"{name} at step {step}", value)
        require_positive(f"{name} at step {step}", value)
    return values


def _ramp(steps: int) -> list[float]:
    """0 at the first step, 1 at the last."""
    return [t / max(steps - 1, 1) for t in range(steps)]


def _between(first: float, last: float, share: float) -> float:
    """Exactly ``first`` where both are the same, and at share 0; exactly ``last`` at share 1."""
    if share == 1:
        return last
    return first + (last - first) * share
