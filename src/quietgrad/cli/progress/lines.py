"""Progress where there is no terminal for a bar."""

from __future__ import annotations

import time

from rich.console import Console


class Lines:
    """A line when half a minute has passed without one."""

    EVERY = 30.0  # seconds

    def __init__(self, target: Console, unit: str) -> None:
        self._target, self._unit = target, unit
        self._began = self._last = time.monotonic()
        self._first: int | None = None

    def show(self, done: int, total: int, more: str, said: bool = False) -> None:
        """``said``: whether a line about this step is there already."""
        now = time.monotonic()
        if self._first is None:  # what comes before the first is not its time
            self._first, self._began = done, now
        if said:
            self._last = now
        if self._target.is_terminal or now - self._last < self.EVERY or done == self._first:
            return
        self._last = now
        left = (now - self._began) / (done - self._first) * (total - done)
        self._target.print(
            f"{self._unit} {done}/{total}{more}, about {max(1, round(left / 60))} min left"
        )
