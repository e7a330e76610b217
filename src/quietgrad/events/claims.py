"""What clipping claims: how far one record can move a sum.

Symbols: C clipping norm, k sketch dimension, D total sketched rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quietgrad.checks import require_at_least, require_int, require_positive

Envelope = Literal["mixed", "convex", "hutch", "hutch++"]
ENVELOPES: tuple[Envelope, ...] = ("mixed", "convex", "hutch", "hutch++")

SMALLEST_SKETCH_DIM = 2

# In the convex order R counts up to this much, so that Z^2 is never below half.
LARGEST_COUNTED_RATIO = 2.0

# Of the norm of a parameter's gradient: what rounding may hide of the sketch that the basis of
# Hutch++ spans, sqrt(k) |M^T S|. Where it may hide more, the estimator adds to the norm; where it
# hides less, the hutch++ envelope has allowed for it.
HIDDEN_SHARE = 2.0**-6


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
        envelope: ``mixed`` (sound for any mixture of exact, Hutch and Hutch++ layers), ``convex``
            (for the same mixtures, with less noise unless k or the noise multiplier is very small:
            docs/hutchpp_envelope/convexity.md), ``hutch`` (only where every trainable parameter is
            sketched by Hutch), or ``hutch++`` (only where every one is exact or sketched by Hutch++
            with k columns or more in both sketches, which are drawn for the release:
            docs/hutchpp_envelope.md).
        total_rank: D, sum over sketched layers of min(p, d, positions); needed by ``hutch`` only.

    Source: papers, DP-SGD-RC section 5; docs/privacy/sketches.md.
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

    @property
    def smallest_scale(self) -> float:
        """The least that a contribution counts for, in units of C. With ``hutch`` there is none."""
        if self.in_convex_order:
            return LARGEST_COUNTED_RATIO**-0.5
        return 1.0 if self.envelope == "mixed" else 0.0

    @property
    def in_convex_order(self) -> bool:
        """Whether the accountant replaces R by a law above it in the increasing convex order."""
        return self.envelope in ("convex", "hutch++")


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
            point moves the sum by about n times this (docs/privacy/clipping.md).
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
