"""Torch-free frozen records that every room shares: what a step is allowed to depend on, and what
it released.

Symbols: N records, B expected batch size, q = B/N sampling rate, T steps, C clipping norm, b bands,
k sketch dimension, D total sketched rank, sigma noise multiplier (relative to C, on the sum of
clipped gradients).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quietgrad.checks import (
    make_plain,
    require_at_least,
    require_finite,
    require_int,
    require_positive,
    require_rate,
)
from quietgrad.events.claims import ENVELOPES as ENVELOPES
from quietgrad.events.claims import HIDDEN_SHARE as HIDDEN_SHARE
from quietgrad.events.claims import LARGEST_COUNTED_RATIO as LARGEST_COUNTED_RATIO
from quietgrad.events.claims import SMALLEST_CLIPPING_NORM as SMALLEST_CLIPPING_NORM
from quietgrad.events.claims import SMALLEST_SKETCH_DIM as SMALLEST_SKETCH_DIM
from quietgrad.events.claims import ClippingClaim as ClippingClaim
from quietgrad.events.claims import Envelope as Envelope
from quietgrad.events.claims import ExactClipping as ExactClipping
from quietgrad.events.claims import RandomizedClipping as RandomizedClipping
from quietgrad.events.claims import SensitivityClaim as SensitivityClaim
from quietgrad.events.relations import ADD_REMOVE as ADD_REMOVE
from quietgrad.events.relations import ADD_REMOVE_USER as ADD_REMOVE_USER
from quietgrad.events.relations import RELATIONS as RELATIONS
from quietgrad.events.relations import ZERO_OUT as ZERO_OUT
from quietgrad.events.relations import per_unit as per_unit
from quietgrad.events.relations import unit_of as unit_of

__all__ = ["EventSequence", "ExactClipping", "PoissonGaussian", "RandomizedClipping", "SideRelease"]

# Below the smallest the accountant has no numbers to count with. Above the largest, at a clipping
# norm of 1e15 and behind a mixing that amplifies noise a thousand times, float32 has none to draw.
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e18


def _require_noise(noise_multiplier: float, usual: str) -> None:
    name = "noise_multiplier"
    require_positive(name, noise_multiplier)
    noise_multiplier = float(noise_multiplier)
    require_at_least(
        name,
        noise_multiplier,
        SMALLEST_NOISE,
        f"no epsilon can be computed for so little noise; usual values are {usual}",
    )
    if noise_multiplier > LARGEST_NOISE:
        raise ValueError(
            f"{name}={noise_multiplier!r} is above {LARGEST_NOISE:g}: sums of float32 cannot hold "
            f"so much noise; usual values are {usual}"
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
        _require_noise(self.noise_multiplier, "5 to 50")
        require_int("every", self.every)
        require_at_least("every", self.every, 1, "1 is every step")
        make_plain(self, "noise_multiplier", "every")

    def at(self, step: int) -> bool:
        """Whether it is made at this step."""
        return step % self.every == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# More losses than these are added up to a number that rounding decides, on any grid that fits into
# memory.
MOST_STEPS = 10**9


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

    The accountant sees ``compositions`` steps at rate ``participation_rate``
    (docs/privacy/correlated_noise.md, and erratum E9 of docs/errata.md).
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    clipping: ClippingClaim = field(default_factory=ExactClipping)
    bands: int = 1
    beside: tuple[SideRelease, ...] = ()

    def __post_init__(self) -> None:
        _require_noise(self.noise_multiplier, "0.3 to 10")
        require_rate("sample_rate", self.sample_rate)
        require_finite("steps", self.steps)
        require_int("steps", self.steps)
        require_at_least("steps", self.steps, 1, "an event releases at least one noisy sum")
        if self.steps > MOST_STEPS:
            raise ValueError(
                f"steps={self.steps} is above {MOST_STEPS:,}, the most that are accounted for; "
                "leave out a zero or two, or count fewer and larger steps"
            )
        require_int("bands", self.bands)
        require_at_least("bands", self.bands, 1, "1 means independent noise")
        make_plain(self, "noise_multiplier", "sample_rate", "steps", "bands")
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
        run: name of the run that gave it, of whose sums alone it is; "" where none did.

    Raises:
        ValueError: without a reason.
    """

    reason: str
    run: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError(
                f"reason={self.reason!r}: say why these data need no protection; the ledger keeps "
                "it"
            )
