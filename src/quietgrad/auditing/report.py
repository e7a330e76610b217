"""What an audit found, in numbers and in words that say no more than was shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietgrad.accounting.rounding import round_down_to, round_up_to
from quietgrad.auditing.bounds.errors import ErrorCounts, lower_rate, upper_rate
from quietgrad.auditing.bounds.thresholds import errors_at
from quietgrad.events import PrivacyEvent, per_unit

Attack = Literal["many runs", "one run"]
Kind = Literal["gradient", "input"]
KINDS: tuple[Kind, ...] = ("gradient", "input")

SHOWN = (
    0.005,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
)  # false positive rates in the figure

# Significant figures of a told epsilon: claimed ones are rounded up, shown ones down, so that two
# that are near each other need more.
FIGURES, FIGURES_OF_REFUTED = 4, 6

MEANING = (
    "A lower bound says what this attack could show, and nothing about better attacks: far "
    "below the claimed epsilon it is no evidence that less noise would do. Above it, the "
    "claim is wrong."
)


@dataclass(frozen=True)
class Guesses:
    """Right guesses of included canaries in one run."""

    correct: int
    guesses: int
    canaries: int


@dataclass(frozen=True)
class Finding:
    """One lower bound.

    Attributes:
        released: what the attack looked at: "whole run", "one release", "weights" and so on.
        method: how the errors became an epsilon.
        claimed: epsilon that is claimed of what was looked at.
        epsilon: lower bound that holds with the report's confidence, taken alone.
        joint: lower bound at a higher confidence, so that those of all findings hold together with
            the report's.
        evidence: the counts behind it.
    """

    released: str
    method: str
    claimed: float
    epsilon: float
    joint: float
    evidence: ErrorCounts | Guesses

    @property
    def refutes(self) -> bool:
        """Whether the claim is wrong, at the report's confidence over all findings."""
        return self.joint > self.claimed


@dataclass(frozen=True)
class Look:
    """A finding to be: what is claimed and how a bound follows from a confidence."""

    released: str
    method: str
    claimed: float
    bound: Callable[[float], float]
    evidence: ErrorCounts | Guesses


def findings_of(looks: Sequence[Look], confidence: float) -> tuple[Finding, ...]:
    """Every look's bound, alone and with Bonferroni's correction for all of them."""
    together = 1 - (1 - confidence) / len(looks)
    return tuple(
        Finding(
            look.released,
            look.method,
            look.claimed,
            look.bound(confidence),
            look.bound(together),
            look.evidence,
        )
        for look in looks
    )


@dataclass(frozen=True)
class RatePoint:
    """An attack's errors at one threshold, with limits of each rate at the report's confidence."""

    false_positive: float
    false_positive_limits: tuple[float, float]
    false_negative: float
    false_negative_limits: tuple[float, float]


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
        attack: "many runs" or "one run".
        kind: of canary.
        claimed: epsilon of the whole plan, an upper bound.
        delta: of every bound.
        confidence: of every finding alone, and of all joint bounds together.
        trials: runs, or canaries of the one run.
        neighbouring: the relation that the claim is about.
        event: what is accounted for.
        findings: lower bounds.
        points: errors at several thresholds, for the figure of the trade-off curve.
        notes: what has to be known to read them.
    """

    attack: Attack
    kind: Kind
    claimed: float
    delta: float
    confidence: float
    trials: int
    neighbouring: str
    event: PrivacyEvent
    findings: tuple[Finding, ...]
    points: tuple[RatePoint, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def lower_bound(self) -> float:
        """Largest lower bound on the whole plan's epsilon, at ``confidence`` over all findings."""
        return max((f.joint for f in self.findings if f.claimed == self.claimed), default=0.0)

    @property
    def refuted(self) -> bool:
        """Whether some claim is wrong. Of a mechanism that meets its claims this is said with
        probability at most 1 - ``confidence``.
        """
        return any(finding.refutes for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One sentence."""
        wrong, unit = (
            next((f for f in self.findings if f.refutes), None),
            per_unit(self.neighbouring),
        )
        if wrong is not None:
            return (
                f"REFUTED: epsilon = {round_up_to(wrong.claimed, FIGURES_OF_REFUTED)}{unit} is "
                f"claimed of {wrong.released}, and it is above "
                f"{round_down_to(wrong.joint, FIGURES_OF_REFUTED)} (confidence "
                f"{self.confidence:g} over all findings, {wrong.method}); nothing may be claimed "
                "of this mechanism until the cause is found"
            )
        return (
            f"Not refuted: this attack shows that epsilon{unit} is above "
            f"{round_down_to(self.lower_bound, FIGURES)} at delta = {round_up_to(self.delta, 3)} "
            f"(confidence {self.confidence:g}), and at most "
            f"{round_up_to(self.claimed, FIGURES)} is claimed. This is no proof of the claim."
        )

    def finding(self, released: str, method: str) -> Finding:
        """The one finding of that name."""
        return next(f for f in self.findings if (f.released, f.method) == (released, method))

    def to_json(self) -> dict[str, Any]:
        return {
            "attack": self.attack,
            "kind": self.kind,
            "claimed_epsilon": self.claimed,
            "delta": self.delta,
            "confidence": self.confidence,
            "lower_bound": self.lower_bound,
            "refuted": self.refuted,
            "verdict": self.verdict,
            "meaning": MEANING,
            "runs" if self.attack == "many runs" else "canaries": self.trials,
            "neighbouring": self.neighbouring,
            "event": self.event.to_json(),
            "findings": [
                {
                    "released": f.released,
                    "method": f.method,
                    "claimed": f.claimed,
                    "lower_bound": f.epsilon,
                    "joint_lower_bound": f.joint,
                    "refutes": f.refutes,
                    "evidence": asdict(f.evidence),
                }
                for f in self.findings
            ],
            "points": [asdict(point) for point in self.points],
            "notes": list(self.notes),
        }


def rate_points(
    scores: NDArray[np.float64], included: NDArray[np.bool_], confidence: float
) -> tuple[RatePoint, ...]:
    """Errors at thresholds between the highest and the lowest scores, each rate with
    Clopper-Pearson limits of its own (two-sided, at ``confidence``).
    """
    absent, present = scores[~included], scores[included]
    if not len(absent) or not len(present):
        return ()
    level = (1 - confidence) / 2
    points = []
    for threshold in np.quantile(absent, 1 - np.array(SHOWN)):
        counts = errors_at(scores, included, float(threshold))
        wrong, missed = counts.false_positives, counts.false_negatives
        points.append(
            RatePoint(
                wrong / len(absent),
                (lower_rate(wrong, len(absent), level), upper_rate(wrong, len(absent), level)),
                missed / len(present),
                (lower_rate(missed, len(present), level), upper_rate(missed, len(present), level)),
            )
        )
    return tuple(points)
