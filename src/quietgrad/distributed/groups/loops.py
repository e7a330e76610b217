"""Where each rank is in its loops over a run's batches, in the store of the process group. A rank
that waits for another reads there whether that one will come: leaving a loop meets nobody, so the
others would wait until the group's timeout.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist

BETWEEN = 1.0  # seconds between two looks of a rank that waits
PATIENCE = 20.0  # seconds, for a rank that has left a loop and may begin another one
LONGEST = 0.002  # seconds of sleep, at most an eighth of what was waited
LEFT = (
    "rank {} left its loop over the run's batches after release {}, and this rank goes on in the "
    "same loop; let all ranks leave at the same release (share the reason first: "
    "torch.distributed.all_reduce of a flag)"
)
CLOSED = (
    "rank {} closed the run after release {}, and this rank goes on; let all ranks leave the run "
    "at the same release (share the reason first: torch.distributed.all_reduce of a flag)"
)


class Loops:
    """Of one rank.

    Args:
        name: of the run, the same on all ranks and in no other run.
        rank, size: of this process.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore(f"quietgrad loops {name}", store)
        self._rank, self._size = rank, size
        self._loop = 0
        self._within = False

    def say(self, where: str, released: int) -> None:
        """What this rank does with its loop, after so many releases. Waits for nobody.

        Args:
            where: "begins", "leaves" (it was not at its end) or "closes" (the run).
            released: a public number.
        """
        self._within = where == "begins"
        self._loop += self._within
        with contextlib.suppress(Exception):  # a store that is gone: so is the group
            self._store.set(str(self._rank), f"{where} {self._loop} {released}")

    def met(self, work: Any) -> str:
        """Waits for an operation of all ranks; what kept one of them away, or nothing.

        Raises:
            RuntimeError: of the backend, where the operation failed.
        """
        began, looked = time.monotonic(), 0.0
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited > looked + BETWEEN:
                looked, away = waited, self._away(waited)
                if away:
                    return away
            time.sleep(min(LONGEST, waited / 8))
        work.wait()
        return ""

    def _away(self, waited: float) -> str:
        for rank in range(self._size):
            key = str(rank)
            with contextlib.suppress(Exception):
                if rank != self._rank and self._store.check([key]):
                    where, loop, released = self._store.get(key).decode().split()
                    if where == "closes":
                        return CLOSED.format(rank, released)
                    same = self._within and int(loop) == self._loop
                    if where == "leaves" and same and waited > PATIENCE:
                        return LEFT.format(rank, released)
        return ""
