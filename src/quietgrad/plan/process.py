"""A run belongs to the process that started it: a fork, a copy or a pickle of it would draw the
same noise again, and the difference of the two releases would be the data.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

_forks = 0  # of this process, counted in the child: process ids come round again


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


class BoundToProcess:
    """Remembers the process that made it, and cannot be copied or pickled."""

    def __init__(self) -> None:
        self._made_in = (os.getpid(), _forks)

    def _require_own_process(self) -> None:
        """Raises in any other process.

        Raises:
            RuntimeError: with the remedy.
        """
        if self._made_in != (os.getpid(), _forks):
            raise RuntimeError(
                "this run was started in another process, of which this one is a fork: both would "
                "draw the same noise, and the difference of their releases would be the data; use "
                "the run "
                "in the process that started it (workers that only load records may be forked), or "
                "start a run here with a ledger of its own"
            )

    def __copy__(self) -> NoReturn:
        self._refuse_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy()

    def __getstate__(self) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: the copy would draw the same "
            "noise, and the difference of two releases would be the data; pass the run itself, or "
            "start "
            "another with plan.start() (their epsilons add)"
        )
