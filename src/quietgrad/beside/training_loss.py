"""A private estimate of the training loss: the noisy mean of clipped per-record losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quietgrad.beside.values import Observed, judge_noise
from quietgrad.records import Above0, Amount, Count, judge


@dataclass(frozen=True)
class TrainingLoss:
    """Releases, beside a step's gradients and of the same batch, the sum of per-record losses with
    noise of its own; over the expected batch size it estimates the mean loss.

    A record adds its loss clipped to ``low`` .. ``high``, less the middle of that range, so at most
    half the range: that is the sensitivity. A loss that is not a number counts as ``high``, an
    infinite one as the end on its side. What lies outside of the range is not seen: the estimate is
    of the mean of *clipped* losses.

    Attributes:
        low, high: the range, public: choose it from what a loss can be, such as the loss of a
            guess, never by looking at private losses.
        share: of each step's privacy budget that it takes; None, without ``own_noise`` either,
            takes 0.01.
        own_noise: nu, the noise's standard deviation over half the range, instead of a share.
        every: steps between two releases.
        smoothing: decay of the exponential average that is shown (0: none); post-processing.

    Raises:
        ValueError: naming the setting and the remedy.

    Source: docs/privacy/side_numbers.md.
    """

    low: float = 0.0
    high: float = 5.0
    share: Above0 | None = None
    own_noise: Above0 | None = None
    every: Count = 1
    smoothing: Amount = 0.9

    name: ClassVar[str] = "training-loss"

    def __post_init__(self) -> None:
        judge(self)
        judge_noise(self)
        # The width in float64 must be that of a range, not of two infinite ends, nor nothing.
        if not (self.width > 0 and self.high - self.low < float("inf")):
            raise ValueError(
                f"low={self.low!r} and high={self.high!r} are no range; give the smallest and the "
                "largest loss that counts, such as 0 and 5"
            )
        if self.smoothing >= 1:
            raise ValueError(
                f"smoothing={self.smoothing!r} never takes in a step; use a number below 1, such "
                "as 0.9, or 0 for none"
            )

    @property
    def centre(self) -> float:
        """Middle of the range: what a batch without records is estimated at."""
        return self.low + (self.high - self.low) / 2

    @property
    def width(self) -> float:
        """Half the range: the most that one record adds."""
        return (self.high - self.low) / 2

    def of(self, observed: Observed) -> Tensor:
        """[b] clipped losses from the centre, in units of the width; 0 without losses."""
        if observed.losses is None:
            return torch.zeros_like(observed.shares, dtype=torch.float64)
        return (observed.losses.detach().to(torch.float64) - self.centre) / self.width

    def estimate(self, noisy: float, expected_batch_size: float) -> float:
        """The mean loss, from what was released."""
        return self.centre + self.width * noisy / expected_batch_size
