"""What schedules of noise and clipping norm have in common. Every release is accounted for with the
noise that it had, so a schedule costs nothing but what it spends. It may look at the epoch, never
at the data.
"""

from __future__ import annotations

from typing import Any


class Scheduler:
    """Sets one attribute of the optimiser, once at the start and again at every ``step``.

    Attributes:
        attribute: its name.
        getter: the method that gives its value for ``last_epoch``; a subclass of a script's own
            has it.
    """

    attribute = ""
    getter = ""

    def __init__(self, optimizer: Any, *, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, self.attribute):
            raise ValueError(
                f"optimizer has no {self.attribute}; pass the one that make_private returned"
            )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    @property
    def _now(self) -> float:
        value: float = getattr(self.optimizer, self.attribute)
        return value

    def step(self) -> None:
        """One epoch on."""
        self.last_epoch += 1
        setattr(self.optimizer, self.attribute, getattr(self, self.getter)())

    def state_dict(self) -> dict[str, Any]:
        """All but the optimiser and functions."""
        return {k: v for k, v in vars(self).items() if k != "optimizer" and not callable(v)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` gave; set the optimiser's value by hand, it is no part of it."""
        vars(self).update(state_dict)

    def _times(self, gamma: float, step_size: int = 1) -> float:
        """The value now, times ``gamma`` at every ``step_size``-th epoch but the first."""
        turn = self.last_epoch > 0 and self.last_epoch % step_size == 0
        return self._now * gamma if turn else self._now
