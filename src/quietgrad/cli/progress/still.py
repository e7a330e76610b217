"""Says again what lasts long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY = 30.0  # seconds
LOOKS = 30  # of the watching thread, in that time


class Still:
    """While the block lasts: what goes on, again and again with the time since it began.

    Nothing is said of what ends in less than ``every`` seconds. The thread that watches reads a
    clock and what ``now`` left; of the work itself it knows nothing.
    """

    def __init__(self, say: Callable[[str, float], None], every: float | None = None) -> None:
        """
        Args:
            say: called with what lasts, and the seconds since it began.
            every: seconds between two calls; None: half a minute.
        """
        self._say, self._every = say, EVERY if every is None else every
        self._current: tuple[str, float] = ("", 0.0)
        self._watched, self._due = self._current, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def now(self, what: str) -> None:
        """What begins now, in place of what went on before; "" for nothing worth a word."""
        self._current = what, time.monotonic()

    def __enter__(self) -> Still:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Says what goes on, where that is due."""
        now = time.monotonic()
        what, began = self._current
        if (what, began) != self._watched:
            self._watched, self._due = (what, began), began + self._every
        if what and now >= self._due:
            self._due = now + self._every
            self._say(what, now - began)

    def _watch(self) -> None:
        while not self._ended.wait(self._every / LOOKS):
            self.look()


def duration(seconds: float) -> str:
    """For people: seconds, from two minutes on minutes and halves of them."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{round(seconds / 30) / 2:g} min"
