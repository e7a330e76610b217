"""The first type a gradient has on its way out: bounded, and still private."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from quietgrad.facts import SensitivityClaim


@dataclass(frozen=True)
class PrivateCounts:
    """Private counters of a batch. They are never released, logged or saved: a batch's size and clipping rate depend on the data."""

    examples: int = 0
    nonfinite: Tensor | None = None

    def __add__(self, other: PrivateCounts) -> PrivateCounts:
        both = [c for c in (self.nonfinite, other.nonfinite) if c is not None]
        total = None if not both else both[0] if len(both) == 1 else both[0] + both[1]
        return PrivateCounts(self.examples + other.examples, total)

    def __repr__(self) -> str:
        return "PrivateCounts(hidden)"


@dataclass(frozen=True)
class ClippedSum:
    """Sum over a batch of clipped per-example gradients, with the bound on one example's share.

    Attributes:
        gradients: parameter name -> sum of the clipped per-example gradients, in the parameter's shape. Private.
        claim: what one record can contribute to the sum.
        private: counters that must not be released.
    """

    gradients: dict[str, Tensor] = field(repr=False)
    claim: SensitivityClaim
    private: PrivateCounts = field(default_factory=PrivateCounts, repr=False)

    def __add__(self, other: ClippedSum) -> ClippedSum:
        """Micro-batches and ranks add up.

        Raises:
            ValueError: if the two make different claims or hold different parameters.
        """
        if self.claim != other.claim:
            raise ValueError(f"cannot add clipped sums with different claims: {self.claim} and {other.claim}")
        if self.gradients.keys() != other.gradients.keys():
            raise ValueError(
                "cannot add clipped sums of different parameters; trainable parameters changed between micro-batches"
            )
        gradients = {name: g + other.gradients[name] for name, g in self.gradients.items()}
        return ClippedSum(gradients, self.claim, self.private + other.private)
