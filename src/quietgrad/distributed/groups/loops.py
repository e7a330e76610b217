"""Where each rank is in its loops over a run's batches, in the store of the process group. A rank
that waits for another reads there whether that one will come: leaving a loop meets nobody, so the
others would wait until the group's timeout.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from quietgrad.distributed.groups import news, waiting
from quietgrad.distributed.groups.failing import is_of_a_backend

BETWEEN = waiting.BETWEEN
PATIENCE = 20.0  # seconds, for a rank that has left a loop and may begin another one
LEFT = (
    "rank {} left its loop over the run's batches after release {}, and this rank goes on in the "
    "same loop; let all ranks leave at the same release (share the reason first: "
    "torch.distributed.all_reduce of a flag)"
)
FAILED = "rank {} stopped after an error of its own, which it has shown{}"
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
        self._within = self._failed = False
        self._tell("starts 0 0")  # in place of what an earlier group of that name left there

    def say(self, where: str, released: int) -> None:
        """What this rank does with its loop, after so many releases. Waits for nobody.

        Args:
            where: "begins", "leaves" (before the plan's end) or "closes" (the run).
            released: a public number.
        """
        self._within = where == "begins"
        self._loop += self._within
        if not self._failed:
            self._tell(f"{where} {self._loop} {released}")

    def fails(self, error: BaseException | None) -> None:
        """This rank goes on no more, whatever it says later. Waits for nobody. An error of a
        backend, in a wait of the user's own, says what is known of the others.
        """
        if not self._failed:
            self._failed = True
            self._explain(error)
            self._tell(f"fails 0 0 {news.in_public(error)}")

    def _explain(self, error: Any) -> None:
        if error is None or not is_of_a_backend(error):
            return
        said = self.a_failure() or news.told(range(self._size), 0.0)
        if said and hasattr(error, "add_note"):
            error.add_note(f"{said}; start all ranks again, and the run goes on from its ledger")

    def _tell(self, what: str) -> None:
        with contextlib.suppress(Exception):  # a store that is gone: so is the group
            self._store.set(str(self._rank), what)

    def said_by(self, rank: int) -> str:
        """That a rank has stopped, and what of."""
        with contextlib.suppress(Exception):
            where, _, _, *words = self._told(rank)
            if where == "fails" and words[0]:
                return FAILED.format(rank, f" ({words[0]})")
        return FAILED.format(rank, "")

    def a_failure(self) -> str:
        """What another rank has stopped of, if one has said so."""
        for rank in range(self._size):
            with contextlib.suppress(Exception):
                if rank != self._rank and self._told(rank)[0] == "fails":
                    return self.said_by(rank)
        return ""

    def _told(self, rank: int) -> list[str]:
        key = str(rank)
        found = self._store.get(key).decode() if self._store.check([key]) else "nothing 0 0"
        return [*found.split(" ", 3)]

    def met(self, work: Any) -> str:
        """Waits for an operation of all ranks; what kept one of them away, or nothing.

        Raises:
            RuntimeError: of the backend, where the operation failed.
        """
        return waiting.met(work, self._away, BETWEEN)

    def _away(self, waited: float) -> str:
        for rank in range(self._size):
            with contextlib.suppress(Exception):
                where, loop, released, *_ = self._told(rank)
                if rank == self._rank:
                    continue
                if where == "fails":
                    return self.said_by(rank)
                if where == "closes":
                    return CLOSED.format(rank, released)
                same = self._within and int(loop) == self._loop
                if where == "leaves" and same and waited > PATIENCE:
                    return LEFT.format(rank, released)
        return news.told(range(self._size), waited)
