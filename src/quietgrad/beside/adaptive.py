"""A clipping norm that follows a quantile of the gradients' norms, by a noisy count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quietgrad.beside.values import Observed, judge_noise
from quietgrad.events import SMALLEST_CLIPPING_NORM
from quietgrad.records import Above0, Count, judge

# A record counts in full below (1 - RAMP) C, not at all above (1 + RAMP) C, and by its place in
# between. With a jump at C, the last bit of a norm, which depends on the size of the micro-batch,
# would move the count by a whole record.
RAMP = 2.0**-5
LARGEST_MOVE = 100.0  # of the logarithm of the norm, in one step


@dataclass(frozen=True)
class AdaptiveClipping:
    """Lets the clipping norm C follow a quantile of the norms that gradients are divided by.

    Beside a step's gradients, and of the same batch, a noisy count of the records that are not
    shortened is released; over the expected batch size it estimates their fraction b, and the next
    step's norm is C exp(-rate (b - quantile)). The noise on the gradients follows C from step to
    step, sigma C.

    A record adds 1/2 to the count if its norm is below C, and -1/2 if not (a gradient that is not
    finite too): at most 1/2 in absolute value, half of what 0 and 1 would give.

    Attributes:
        quantile: fraction of the records that should not be shortened, above 0 and below 1.
        rate: of the geometric updates: the norm moves by at most a factor exp(rate) a step.
        share: of each step's privacy budget that the count takes; None, without ``own_noise``
            either, takes 0.01.
        own_noise: nu, the noise's standard deviation over 1/2, instead of a share. (The paper's
            sigma_b is nu / 2; it recommends nu of a tenth of the batch size.)
        every: steps between two counts; the norm stays as it is between them.

    Raises:
        ValueError: naming the setting and the remedy.

    Source: G. Andrew, O. Thakkar, B. McMahan, S. Ramaswamy, Differentially Private Learning with
        Adaptive Clipping, 2021, section 2 and Theorem 1; docs/privacy/side_numbers.md.
    """

    quantile: float = 0.5
    rate: Above0 = 0.2
    share: Above0 | None = None
    own_noise: Above0 | None = None
    every: Count = 1

    name: ClassVar[str] = "records-below-the-clipping-norm"

    def __post_init__(self) -> None:
        judge(self)
        judge_noise(self)
        if not 0 < self.quantile < 1:
            raise ValueError(
                f"quantile={self.quantile!r} must be above 0 and below 1; 0.5 shortens half of "
                "the records"
            )

    def of(self, observed: Observed) -> Tensor:
        """[b] 1 below the clipping norm, -1 above it, in between on the ramp: twice what a record
        adds to the count.
        """
        return ((1 - observed.shares) / RAMP).nan_to_num(nan=-1.0)

    def fraction(self, noisy: float, expected_batch_size: float) -> float:
        """Estimated fraction of records below the norm, from what was released."""
        return min(max(0.5 + noisy / (2 * expected_batch_size), 0.0), 1.0)

    def next_norm(self, max_grad_norm: float, noisy: float, expected_batch_size: float) -> float:
        """The clipping norm of the next step."""
        below = self.fraction(noisy, expected_batch_size)
        # Beyond that exp overflows, after the release is made; no norm is so far from another.
        exponent = min(max(-self.rate * (below - self.quantile), -LARGEST_MOVE), LARGEST_MOVE)
        moved = max_grad_norm * math.exp(exponent)
        return min(max(moved, SMALLEST_CLIPPING_NORM), 1 / SMALLEST_CLIPPING_NORM)
