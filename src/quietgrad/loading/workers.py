"""Workers that stay between the passes over a loader, and may have died there: the system kills
what takes too much memory.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def let_go_of_dead_workers(reader: DataLoader[Any]) -> None:
    """Where a worker that stayed is dead, the next pass begins with new ones. DataLoader would ask
    the dead one, for ever, and what it held on to may keep the others waiting.
    """
    stayed: Any = getattr(reader, "_iterator", None)
    workers = getattr(stayed, "_workers", ())
    # A process that was forked from the one that has them knows nothing of them: None.
    if any(worker.exitcode is not None for worker in workers):
        reader._iterator = None
        stayed._shutdown_workers()
