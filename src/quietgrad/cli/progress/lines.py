"""Progress where there is no terminal for a bar."""

from __future__ import annotations

import time

from rich.console import Console

from quietgrad.cli.progress.pace import Pace


class Lines:
    """A line when half a minute has passed without one."""

    EVERY = 30.0  # seconds

    def __init__(self, target: Console, unit: str, pace: Pace | None = None) -> None:
        """
        Args:
            target: where they are shown.
            unit: what is counted.
            pace: of it, where somebody else tells it what is made.
        """
        self._target, self._unit = target, unit
        self._own = Pace() if pace is None else None
        self._pace = pace or self._own or Pace()
        self._last = time.monotonic()

    def show(self, done: int, total: int, more: str, said: bool = False) -> None:
        """``said``: whether a line about this step is there already."""
        if self._own is not None:
            self._own.made(done)
        now, left = time.monotonic(), self._pace.left(total)
        if said:
            self._last = now
        if self._target.is_terminal or now - self._last < self.EVERY or left is None:
            return
        self._last = now
        seconds, known = left
        about = "about" if known else "at most"
        self._target.print(
            f"{self._unit} {done}/{total}{more}, {about} {max(1, round(seconds / 60))} min left"
        )
