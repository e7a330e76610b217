"""What stays the same within a batch, however many parts it is read in: their number follows from
its size, which is private.
"""

from __future__ import annotations

import math
from typing import Any


class FixedDivisor:
    """The divisor of every mean: the expected batch size, never one that came about."""

    _mechanism: Any

    @property
    def expected_batch_size(self) -> float:
        """B = q N."""
        sampler = self._mechanism.source.sampler
        size: float = sampler.dataset_size * sampler.sample_rate
        return size

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        """Raises:
        RuntimeError: for another one.
        """
        if not math.isclose(value, self.expected_batch_size):
            raise RuntimeError(
                "optimizer.expected_batch_size is what means are divided by, and stays as it is: a "
                "batch's own size is private, and the weights would tell it; take the line out "
                "(another learning rate scales steps)"
            )


class SettingsOfABatch:
    """Noise multiplier and clipping norm, as they were when its first part was opened."""

    def __init__(self) -> None:
        self._first: tuple[Any, Any] = (None, None)

    def require(self, noise_multiplier: Any, max_grad_norm: Any, is_first: bool) -> None:
        """When a part of a batch is opened.

        Raises:
            RuntimeError: where a setting is another than at the first.
        """
        settings = noise_multiplier, max_grad_norm
        if is_first:
            self._first = settings
        for name, then, now in zip(
            ("noise_multiplier", "max_grad_norm"), self._first, settings, strict=True
        ):
            if then != now:
                raise RuntimeError(
                    f"{name} was changed within a batch that is read in parts, whose number "
                    "follows from its size; step schedules once a batch (if not "
                    "optimizer._is_last_step_skipped), or once an epoch"
                )


def steps_follow_the_data() -> RuntimeError:
    return RuntimeError(
        "the number of steps on a batch changed after values of the batch had been read (item(), "
        "if), so it may tell what they were: make the same number of steps on every batch"
    )


def other_gradient(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r} has a gradient that was not released: it was used beside the private "
        "model's own call (a weight penalty, a submodule called alone), or backward() ran on "
        "records that the loader did not give; use weight_decay, call the model itself, and "
        "zero_grad() before the private loop"
    )
