"""How the processes of a benchmark find one another, on this machine."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def meet(rank: int, size: int, folder: str, backend: str = "gloo") -> None:
    """A group of ``size`` processes that share ``folder``."""
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=10),
    )
