"""How long the rest takes, from what was made."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Of numbered steps, some of which hold a look of the guard's besides: such a step may take
    minutes where others take seconds, and comes ever more rarely.
    """

    def __init__(self, looked: Callable[[int], bool] | None = None) -> None:
        """
        Args:
            looked: whether step number n, from 1, holds a look; None: none does.
        """
        self._looked = looked
        self._last: int | None = None
        self._began = time.monotonic()
        self._seconds = {False: 0.0, True: 0.0}
        self._steps = {False: 0, True: 0}

    def made(self, done: int) -> None:
        """So many steps are made. The first call tells of no time: much comes before it."""
        now, last = time.monotonic(), self._last
        took, self._last, self._began = now - self._began, done, now
        if last is None or done <= last:
            return
        kind = self._looks(last, done) > 0
        self._seconds[kind] += took
        self._steps[kind] += done - last

    def left(self, total: int) -> tuple[float, bool] | None:
        """Seconds until all are made, and whether it is an estimate: else it is the most, as no
        step without a look was seen; None where nothing is known.
        """
        if self._last is None or not any(self._steps.values()):
            return None
        plain, look = (self._seconds[k] / max(self._steps[k], 1) for k in (False, True))
        looks = self._looks(self._last, total)
        others = total - self._last - looks
        if not self._steps[False]:
            return (looks + others) * look, False
        return others * plain + looks * (look if self._steps[True] else plain), True

    def _looks(self, after: int, until: int) -> int:
        if self._looked is None:
            return 0
        return sum(self._looked(n) for n in range(after + 1, until + 1))
