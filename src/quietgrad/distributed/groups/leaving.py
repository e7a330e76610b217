"""How a process that failed alone leaves its groups, so that nobody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHORTLY = timedelta(milliseconds=10)
NEVER_SENT = 2**20  # a tag of no message


def close_connections(groups: Iterable[Any] | None = None) -> None:
    """Closes this process' connections in process groups, in all where none are given: operations
    that others have begun there fail at once, as if it had ended, and what this process has left
    open ends too (the interpreter, or ``destroy_process_group``, would wait for it until the
    group's timeout).

    gloo has no operation for it, but closes a group's connections where a wait for a message ends
    by its own, short timeout. NCCL has ``abort``, which ends what runs on this device. Others' NCCL
    kernels do not notice. Their processes do where they next meet through gloo, before each
    micro-batch; one that waits for its device in the middle of a pass (for whether a norm is in
    doubt) gets no further, and is ended by its launcher once this process is gone, or by torch's
    watchdog at the group's timeout.
    """
    for group in list(dist.distributed_c10d._world.pg_map if groups is None else groups):
        if group.size() < 2:
            continue
        for kind in {"cpu", *(device.type for device in group._device_types)}:
            with contextlib.suppress(Exception):
                backend: Any = group._get_backend(torch.device(kind))
                if "nccl" in backend.name():
                    backend.abort()
                else:
                    other = int(group.rank() == 0)
                    backend.recv([torch.zeros(1, device="cpu")], other, NEVER_SENT).wait(SHORTLY)
