"""Schedules of the clipping norm under Opacus' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quietgrad.integrations.opacus.schedulers.schedules import Scheduler


class _GradClipScheduler(Scheduler):
    """A schedule of the clipping norm: ``get_max_grad_norm`` gives it for ``last_epoch``."""

    attribute = "max_grad_norm"
    getter = "get_max_grad_norm"

    def get_max_grad_norm(self) -> float:
        """The value of this epoch.

        Raises:
            NotImplementedError: where a subclass has none.
        """
        raise NotImplementedError


class ExponentialGradClip(_GradClipScheduler):
    """The clipping norm times ``gamma`` every epoch."""

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        """The value of this epoch."""
        return self._times(self.gamma)


class LambdaGradClip(_GradClipScheduler):
    """The first clipping norm times ``scheduler_function(epoch)``."""

    def __init__(
        self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.scheduler_function = scheduler_function
        self.base_max_grad_norm = getattr(optimizer, "max_grad_norm", 0.0)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        """The value of this epoch."""
        return self.base_max_grad_norm * self.scheduler_function(self.last_epoch)


class StepGradClip(_GradClipScheduler):
    """The clipping norm times ``gamma`` every ``step_size`` epochs."""

    def __init__(
        self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        """The value of this epoch."""
        return self._times(self.gamma, self.step_size)
