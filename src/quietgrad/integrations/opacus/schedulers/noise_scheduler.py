"""Schedules of the noise multiplier under Opacus' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quietgrad.integrations.opacus.schedulers.schedules import Scheduler


class _NoiseScheduler(Scheduler):
    """A schedule of the noise multiplier: ``get_noise_multiplier`` gives it for ``last_epoch``."""

    attribute = "noise_multiplier"
    getter = "get_noise_multiplier"

    def get_noise_multiplier(self) -> float:
        """The value of this epoch.

        Raises:
            NotImplementedError: where a subclass has none.
        """
        raise NotImplementedError


class ExponentialNoise(_NoiseScheduler):
    """The noise multiplier times ``gamma`` every epoch."""

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """The value of this epoch."""
        return self._times(self.gamma)


class LambdaNoise(_NoiseScheduler):
    """The first noise multiplier times ``noise_lambda(epoch)``."""

    def __init__(
        self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.noise_lambda = noise_lambda
        self.base_noise_multiplier = getattr(optimizer, "noise_multiplier", 0.0)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """The value of this epoch."""
        return self.base_noise_multiplier * self.noise_lambda(self.last_epoch)


class StepNoise(_NoiseScheduler):
    """The noise multiplier times ``gamma`` every ``step_size`` epochs."""

    def __init__(
        self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """The value of this epoch."""
        return self._times(self.gamma, self.step_size)
