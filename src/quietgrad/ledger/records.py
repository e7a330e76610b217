"""The lines of a ledger: one frozen record a kind. Public facts only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quietgrad.events import PoissonGaussian, event_from_json
from quietgrad.schedules.course import Course, StepSettings

FORMAT = 2
# With settings that change: a version that does not know them would count the first for all.
FORMAT_OF_COURSES = 3
SOURCES = ("entropy", "seed", "public seed")


@dataclass(frozen=True)
class Mechanism:
    """The first line, and the only one of its kind: the mechanism of all releases.

    Attributes:
        event: of one step (of b steps with b bands); with a course, of its first.
        facts: public facts kept beside it, such as dataset size and target delta.
        course: the settings of every planned step, where they change.
    """

    event: PoissonGaussian
    facts: Mapping[str, Any] = field(default_factory=dict)
    course: Course | None = None

    def to_json(self) -> dict[str, Any]:
        event = replace(self.event, steps=self.event.bands).to_json()
        if self.course is None:
            return {"type": "mechanism", "format": FORMAT, "event": event, **self.facts}
        course = {"format": FORMAT_OF_COURSES, "course": self.course.to_json()}
        return {"type": "mechanism", **course, "event": event, **self.facts}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Mechanism:
        of = record["format"]
        if of not in (FORMAT, FORMAT_OF_COURSES):
            raise ValueError(
                f"it is of format {of!r}, and this version reads {FORMAT} and {FORMAT_OF_COURSES}"
            )
        if (of == FORMAT_OF_COURSES) != ("course" in record):
            raise ValueError(f"a mechanism of format {FORMAT_OF_COURSES} states its course")
        course = Course.from_json(record["course"]) if "course" in record else None
        event = event_from_json(record["event"])
        if not isinstance(event, PoissonGaussian):
            raise ValueError("a mechanism line holds one mechanism")
        if course is not None and event.beside:  # which a course does not count
            raise ValueError("a course of settings, and numbers beside the gradients")
        own = ("type", "format", "event", "course", "line")
        return cls(event, {k: v for k, v in record.items() if k not in own}, course)


@dataclass(frozen=True)
class Extension:
    """From here on more releases are planned, after those planned so far.

    Attributes:
        step: releases made when it was decided.
        course: settings of the steps that come on top.
        target_epsilon: the target of the whole, where one was given for it.
    """

    step: int
    course: Course
    target_epsilon: float | None = None

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"type": "extension", "step": self.step}
        record["course"] = self.course.to_json()
        if self.target_epsilon is not None:
            record["target_epsilon"] = self.target_epsilon
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Extension:
        target = record.get("target_epsilon")
        course = Course.from_json(record["course"])
        return cls(int(record["step"]), course, None if target is None else float(target))


@dataclass(frozen=True)
class SessionStart:
    """A start of the run: from ``step`` on all draws have a root of their own.

    Attributes:
        step: the first release that it can make.
        name: public and random, of this start alone; with a seed the root follows from seed and
            name.
        seal: a digest of the root, by which a root that is kept elsewhere is known to be this one.
        source: where the root comes from: one of SOURCES.
    """

    step: int
    name: str
    seal: str
    source: str = "entropy"

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "session",
            "step": self.step,
            "name": self.name,
            "seal": self.seal,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SessionStart:
        if record["source"] not in SOURCES:
            raise ValueError(f"source {record['source']!r} is unknown to this version")
        return cls(
            int(record["step"]), str(record["name"]), str(record["seal"]), str(record["source"])
        )


@dataclass(frozen=True)
class NoiseBlock:
    """Noise correlated by the matrix of digest ``mixing`` refers to no release before ``step``."""

    step: int
    mixing: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "noise-block", "step": self.step, "mixing": self.mixing}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> NoiseBlock:
        return cls(int(record["step"]), str(record["mixing"]))


@dataclass(frozen=True)
class NoiseDrawn:
    """How the block's noise is drawn: with another dtype, library or device the same keys give
    other numbers.
    """

    how: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "noise-drawn", "as": self.how}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> NoiseDrawn:
        return cls(str(record["as"]))


@dataclass(frozen=True)
class ClippingNorm:
    """From release ``step`` on gradients are clipped to ``max_grad_norm``: a function of what was
    released before it.
    """

    step: int
    max_grad_norm: float

    def to_json(self) -> dict[str, Any]:
        return {"type": "clipping-norm", "step": self.step, "max_grad_norm": self.max_grad_norm}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ClippingNorm:
        return cls(int(record["step"]), float(record["max_grad_norm"]))


@dataclass(frozen=True)
class Release:
    """Release number ``step`` is about to be made. ``torn``: its line was cut
    off, and is counted. ``settings``: its own, where those of a run change.
    """

    step: int
    torn: bool = False
    settings: StepSettings | None = None

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"type": "release", "step": self.step}
        if self.settings is not None:
            record["settings"] = self.settings.to_json()
        return record | ({"torn": True} if self.torn else {})

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Release:
        own = record.get("settings")
        settings = None if own is None else StepSettings.from_json(own)
        return cls(int(record["step"]), bool(record.get("torn", False)), settings)


@dataclass(frozen=True)
class EarlierRun:
    """Weights of an earlier run are among those that the releases from ``step`` on begin with.

    Attributes:
        record: public facts of that run (``ledger.earlier``).
    """

    step: int
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"type": "earlier-run", "step": self.step, "of": dict(self.record)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EarlierRun:
        return cls(int(record["step"]), dict(record["of"]))


@dataclass(frozen=True)
class PrivacyGivenUp:
    """From here on values that no noise covers are looked at: the run has no epsilon."""

    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "not-private", "reason": self.reason}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PrivacyGivenUp:
        return cls(str(record["reason"]))


Record = (
    Mechanism
    | Extension
    | SessionStart
    | NoiseBlock
    | NoiseDrawn
    | ClippingNorm
    | Release
    | EarlierRun
    | PrivacyGivenUp
)
_KINDS: dict[str, Any] = {
    "mechanism": Mechanism,
    "extension": Extension,
    "session": SessionStart,
    "noise-block": NoiseBlock,
    "noise-drawn": NoiseDrawn,
    "clipping-norm": ClippingNorm,
    "release": Release,
    "earlier-run": EarlierRun,
    "not-private": PrivacyGivenUp,
}


def record_from_json(record: Mapping[str, Any]) -> Record:
    """Reads back what ``to_json`` wrote.

    Raises:
        ValueError: if the line is of an unknown kind or lacks a field; it may stand for a release
            that this version does not know how to count.
    """
    kind = record.get("type")
    if kind not in _KINDS:
        raise ValueError(f"type {kind!r} is unknown to this version, which cannot count it")
    try:
        made: Record = _KINDS[str(kind)].from_json(record)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"a line of type {kind!r} lacks a field, or it is not as it was written: {error}"
        ) from error
    return made
