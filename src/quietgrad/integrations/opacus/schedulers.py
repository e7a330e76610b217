"""Schedules of noise and clipping norm. Every release is accounted for with the noise that it had,
so a schedule costs nothing but what it spends. It may look at the epoch, never at the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Scheduler:
    """Sets one attribute of the optimiser, once at the start and again at every ``step``."""

    attribute = ""

    def __init__(self, optimizer: Any, *, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, self.attribute):
            raise ValueError(
                f"optimizer has no {self.attribute}; pass the one that make_private returned"
            )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.base = getattr(optimizer, self.attribute)
        self.step()

    def _value(self, now: float) -> float:
        raise NotImplementedError

    def step(self) -> None:
        """One epoch on."""
        self.last_epoch += 1
        now = getattr(self.optimizer, self.attribute)
        setattr(self.optimizer, self.attribute, self._value(now))

    def state_dict(self) -> dict[str, Any]:
        """All but the optimiser and functions."""
        return {k: v for k, v in vars(self).items() if k != "optimizer" and not callable(v)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` gave; set the optimiser's value by hand, it is no
        part of it."""
        vars(self).update(state_dict)


class _Exponential(_Scheduler):
    """Times ``gamma`` every epoch."""

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def _value(self, now: float) -> float:
        return now if self.last_epoch == 0 else now * self.gamma


class _Lambda(_Scheduler):
    """The first value times ``scheduler_function(epoch)``."""

    def __init__(
        self,
        optimizer: Any,
        *,
        scheduler_function: Callable[[int], float],
        last_epoch: int = -1,
    ) -> None:
        self.scheduler_function = scheduler_function
        super().__init__(optimizer, last_epoch=last_epoch)

    def _value(self, now: float) -> float:
        return self.base * self.scheduler_function(self.last_epoch)


class _Step(_Scheduler):
    """Times ``gamma`` every ``step_size`` epochs."""

    def __init__(
        self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def _value(self, now: float) -> float:
        turn = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return now * self.gamma if turn else now


class ExponentialNoise(_Exponential):
    """The noise multiplier times ``gamma`` every epoch."""

    attribute = "noise_multiplier"


class LambdaNoise(_Lambda):
    """The first noise multiplier times a function of the epoch."""

    attribute = "noise_multiplier"


class StepNoise(_Step):
    """The noise multiplier times ``gamma`` every ``step_size`` epochs."""

    attribute = "noise_multiplier"


class ExponentialGradClip(_Exponential):
    """The clipping norm times ``gamma`` every epoch."""

    attribute = "max_grad_norm"


class LambdaGradClip(_Lambda):
    """The first clipping norm times a function of the epoch."""

    attribute = "max_grad_norm"


class StepGradClip(_Step):
    """The clipping norm times ``gamma`` every ``step_size`` epochs."""

    attribute = "max_grad_norm"
