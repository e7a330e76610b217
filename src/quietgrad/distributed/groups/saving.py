"""A group for checkpoints that are written while training goes on: from a thread of its own, whose
messages are none of the training's.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from quietgrad.distributed.groups.patience import patience

# Held for good: another group at the same address must not be taken for one of these.
_made: list[Any] = []


def group_for_saving() -> Any:
    """A process group over all ranks for ``torch.distributed.checkpoint.async_save``, which meets
    the other ranks from a thread of its own while records are clipped. Called by all ranks, once.

    On the training's own group its messages would be taken for the training's, and gloo aborts. On
    any other they are taken for those of a loss, which a run refuses; on this one they are not.
    Give it to nothing else: what a loss would hear over it, nobody sees.

    Returns:
        A ``torch.distributed.ProcessGroup`` (gloo), for ``async_save(process_group=)``.

    Raises:
        RuntimeError: where no process group is initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group is initialised; call torch.distributed.init_process_group first, or "
            "leave process_group out of async_save in a single process"
        )
    group = dist.new_group(backend="gloo", timeout=patience())
    _made.append(group)
    return group


def is_for_saving(group: Any) -> bool:
    """Whether it was made by ``group_for_saving``."""
    return any(group is one for one in _made)
