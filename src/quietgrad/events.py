"""Torch-free frozen records that every room shares: what a step is allowed to depend on, and what
it released.

Symbols: N records, B expected batch size, q = B/N sampling rate, T steps, C clipping norm, b bands,
k sketch dimension, D total sketched rank, sigma noise multiplier (relative to C, on the sum of
clipped gradients).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from quietgrad.checks import (
    require_at_least,
    require_finite,
    require_int,
    require_positive,
    require_rate,
)

__all__ = ["EventSequence", "ExactClipping", "PoissonGaussian", "RandomizedClipping", "SideRelease"]

Envelope = Literal["mixed", "hutch"]
ENVELOPES: tuple[Envelope, ...] = ("mixed", "hutch")

# Neighbouring relation -> in words. Parts that a record's index decides stay as they are only if
# its place stays, empty.
# Below it the accountant has no numbers to count with.
SMALLEST_NOISE = 1e-6
ADD_REMOVE, ZERO_OUT = "add-remove", "zero-out"
ADD_REMOVE_USER = "add-remove-user"
RELATIONS = {
    ADD_REMOVE: "add or remove one record",
    ZERO_OUT: "leave one record's place empty",
    ADD_REMOVE_USER: "add or remove one user, with all records",
}
SMALLEST_SKETCH_DIM = 2


@dataclass(frozen=True)
class ExactClipping:
    """Every record's contribution to the clipped sum has norm at most C, always."""


@dataclass(frozen=True)
class RandomizedClipping:
    """Contributions are bounded by C * R^(-1/2), R the ratio of the sketched to the true squared
    norm.

    Attributes:
        sketch_dim: smallest sketch dimension k over the sketched layers; the others must be integer
            multiples of it.
        envelope: ``mixed`` (sound for any mixture of exact, Hutch and Hutch++ layers) or ``hutch``
            (only where every trainable parameter is sketched by Hutch).
        total_rank: D, sum over sketched layers of min(p, d, positions); needed by ``hutch`` only.

    Source: papers, DP-SGD-RC section 5; docs/privacy.md, section "Randomized clipping".
    """

    sketch_dim: int
    envelope: Envelope = "mixed"
    total_rank: int | None = None

    def __post_init__(self) -> None:
        require_int("sketch_dim", self.sketch_dim)
        require_at_least(
            "sketch_dim",
            self.sketch_dim,
            SMALLEST_SKETCH_DIM,
            "with one projection the norm estimate is near zero too often for any finite epsilon; "
            "use 8 or more",
        )
        if self.envelope not in ENVELOPES:
            raise ValueError(
                f"envelope={self.envelope!r} is unknown; use one of {', '.join(ENVELOPES)}"
            )
        if self.envelope == "hutch":
            if self.total_rank is None:
                raise ValueError(
                    "total_rank is required by envelope='hutch': pass the sum over sketched layers "
                    "of "
                    "min(rows, columns, positions), or use envelope='mixed', which needs none"
                )
            require_int("total_rank", self.total_rank)
            require_at_least(
                "total_rank", self.total_rank, 1, "it counts the ranks of the sketched layers"
            )
        elif self.total_rank is not None:
            require_int("total_rank", self.total_rank)
            require_at_least(
                "total_rank", self.total_rank, 1, "it counts the ranks of the sketched layers"
            )


ClippingClaim = ExactClipping | RandomizedClipping


# Clip factors of the longest gradients are then normal numbers of float32.
SMALLEST_CLIPPING_NORM = 1e-15


@dataclass(frozen=True)
class SensitivityClaim:
    """What a clipper promises about one record's contribution to its sum.

    Attributes:
        max_grad_norm: C; the contribution's norm is at most C (exact) or C * R^(-1/2) (randomized).
        clipping: which of the two, with the sketch facts that the accountant needs.
        rounding: unit roundoff of the sum itself, relative to C: adding n contributions in floating
            point moves the sum by about n times this (docs/privacy.md, section 3).
    """

    max_grad_norm: float
    clipping: ClippingClaim = ExactClipping()
    rounding: float = 2.0**-24

    def __post_init__(self) -> None:
        require_positive("max_grad_norm", self.max_grad_norm)
        # A float of its own: products of a numpy float16 would be rounded to that.
        object.__setattr__(self, "max_grad_norm", float(self.max_grad_norm))
        if not SMALLEST_CLIPPING_NORM <= self.max_grad_norm <= 1 / SMALLEST_CLIPPING_NORM:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm!r} must be in {SMALLEST_CLIPPING_NORM:g} .. "
                f"{1 / SMALLEST_CLIPPING_NORM:g}: beyond that, float32 sums of clipped gradients "
                "lose their bound; scale the loss and the clipping norm together"
            )


@dataclass(frozen=True)
class SideRelease:
    """A number that is released beside the noisy gradients of a step, made of the same batch: a sum
    to which one record adds at most 1 in absolute value, with Gaussian noise of its own.

    Attributes:
        name: of the kind of release, such as "training-loss".
        noise_multiplier: nu, standard deviation of its noise over what one record can add.
        every: it is made at steps 0, every, 2 every, ...
    """

    name: str
    noise_multiplier: float
    every: int = 1

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        require_at_least(
            "noise_multiplier",
            self.noise_multiplier,
            SMALLEST_NOISE,
            "no epsilon can be computed for so little noise; usual values are 5 to 50",
        )
        require_int("every", self.every)
        require_at_least("every", self.every, 1, "1 is every step")

    def at(self, step: int) -> bool:
        """Whether it is made at this step."""
        return step % self.every == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PoissonGaussian:
    """T steps of the (possibly banded) Gaussian mechanism on Poisson-sampled batches: one phase of
    DP-SGD.

    Attributes:
        noise_multiplier: sigma, standard deviation of the noise on the sum in units of the clipping
            norm.
        sample_rate: q = B/N, the rate of plain Poisson sampling, before the bands enlarge it.
        steps: T, noisy sums released.
        clipping: exact, or randomized with its sketch facts.
        bands: b; 1 is independent noise. With b > 1 the data are split into b parts, step t samples
            from part t mod b.
        beside: what is released with the gradients of a step, of the same batch.

    The accountant sees ``compositions`` steps at rate ``participation_rate`` (docs/privacy.md,
    section 6, and erratum E9 of docs/errata.md).
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    clipping: ClippingClaim = ExactClipping()
    bands: int = 1
    beside: tuple[SideRelease, ...] = ()

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        require_at_least(
            "noise_multiplier",
            self.noise_multiplier,
            SMALLEST_NOISE,
            "no epsilon can be computed for so little noise; usual values are 0.3 to 10",
        )
        require_rate("sample_rate", self.sample_rate)
        require_finite("steps", self.steps)
        require_int("steps", self.steps)
        require_at_least("steps", self.steps, 1, "an event releases at least one noisy sum")
        require_int("bands", self.bands)
        require_at_least("bands", self.bands, 1, "1 means independent noise")
        if self.bands > self.steps:
            raise ValueError(
                f"bands={self.bands} exceeds steps={self.steps}; use at most as many bands as steps"
            )

    @property
    def participation_rate(self) -> float:
        """Rate at which a record is sampled in the steps that may use it: min(1, b q)."""
        return min(1.0, self.bands * self.sample_rate)

    @property
    def compositions(self) -> int:
        """Number of steps that may use one given record: ceil(T / b)."""
        return math.ceil(self.steps / self.bands)

    def after(self, releases: int) -> PoissonGaussian:
        """This mechanism with so many releases made. Fewer than b count as b: one record may be in
        any one of them, so the composition is the same.
        """
        return replace(self, steps=max(releases, self.bands))

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "kind": "poisson-gaussian",
            "noise_multiplier": float(self.noise_multiplier),
            "sample_rate": float(self.sample_rate),
            "steps": int(self.steps),
            "bands": int(self.bands),
        }
        if isinstance(self.clipping, RandomizedClipping):
            record["randomized_clipping"] = {
                "sketch_dim": int(self.clipping.sketch_dim),
                "envelope": self.clipping.envelope,
                "total_rank": None
                if self.clipping.total_rank is None
                else int(self.clipping.total_rank),
            }
        if self.beside:
            record["beside"] = [side.to_json() for side in self.beside]
        return record


@dataclass(frozen=True)
class EventSequence:
    """Phases run one after the other on the same data; their privacy losses compose."""

    events: tuple[PoissonGaussian, ...]

    @property
    def steps(self) -> int:
        """Noisy sums released, or as many as they count for: with bands, whole turns."""
        return sum(event.steps for event in self.events)

    @property
    def bands(self) -> int:
        """Largest b."""
        return max(event.bands for event in self.events)

    @property
    def compositions(self) -> int:
        """Number of steps that may use one given record."""
        return sum(event.compositions for event in self.events)

    @property
    def participation_rate(self) -> float:
        """Highest rate at which a record is sampled in the steps that may use it."""
        return max(event.participation_rate for event in self.events)

    @property
    def clipping(self) -> ClippingClaim:
        """Of the first phase; those of one plan are alike."""
        return self.events[0].clipping

    @property
    def beside(self) -> tuple[SideRelease, ...]:
        """Of the first phase."""
        return self.events[0].beside

    def after(self, releases: int) -> PrivacyEvent:
        """This sequence with so many releases made, at least one. With bands a turn that began
        counts whole.
        """
        made: list[PoissonGaussian] = []
        for event in self.events:
            if releases > 0:
                made.append(
                    event.after(-(-min(releases, event.steps) // event.bands) * event.bands)
                )
            releases -= event.steps
        return made[0] if len(made) == 1 else EventSequence(tuple(made))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "sequence", "events": [event.to_json() for event in self.events]}


PrivacyEvent = PoissonGaussian | EventSequence


def event_from_json(record: dict[str, Any]) -> PrivacyEvent:
    """Reads back what ``to_json`` wrote.

    Raises:
        ValueError: if the record is of an unknown kind or lacks a field.
    """
    kind = record.get("kind")
    try:
        if kind == "sequence":
            return EventSequence(tuple(_phase_from_json(child) for child in record["events"]))
        return _phase_from_json(record)
    except KeyError as error:
        raise ValueError(f"privacy event of kind {kind!r} lacks the field {error}") from error


def _phase_from_json(record: dict[str, Any]) -> PoissonGaussian:
    if record.get("kind") != "poisson-gaussian":
        raise ValueError(
            f"unknown kind of privacy event: {record.get('kind')!r}; expected 'poisson-gaussian' "
            "or 'sequence'"
        )
    sketch = record.get("randomized_clipping")
    return PoissonGaussian(
        noise_multiplier=record["noise_multiplier"],
        sample_rate=record["sample_rate"],
        steps=record["steps"],
        bands=record.get("bands", 1),
        clipping=RandomizedClipping(**sketch) if sketch else ExactClipping(),
        beside=tuple(SideRelease(**side) for side in record.get("beside", ())),
    )


@dataclass(frozen=True)
class NotPrivate:
    """Permission to inspect values that no noise covers (``quietgrad.research``).
    ``PrivateRun.give_up_privacy`` gives it, and the run has no epsilon from then on.

    Attributes:
        reason: why there is nothing to protect, such as "synthetic data"; of a run it is written to
            the ledger.

    Raises:
        ValueError: without a reason.
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError(
                f"reason={self.reason!r}: say why these data need no protection; the ledger keeps "
                "it"
            )


def unit_of(relation: str) -> str:
    """What an epsilon under a neighbouring relation protects, in one word: "record" or "user"."""
    return "user" if relation == ADD_REMOVE_USER else "record"


def per_unit(relation: str) -> str:
    """What is put behind a number of epsilon in a short line: that it is a user's, where it is."""
    return " per user" if relation == ADD_REMOVE_USER else ""
