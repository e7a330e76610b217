"""Processes as torchrun starts them, for tests of trainers."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def forget_accelerate() -> None:
    """What trainers before have told accelerate, which keeps it for the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def enter(
    rank: int, size: int, port: int, folder: str, work: Callable[..., Any], more: Any
) -> None:
    """A process as torchrun starts it; what other tests have told accelerate is forgotten."""
    forget_accelerate()
    torch.set_num_threads(1)
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if size > 1:
        os.environ.update({name: str(value) for name, value in known.items()})
    try:
        found = work(*more)
        if size > 1:
            dist.barrier()
    except Exception as error:
        Path(folder, f"traceback{rank}.txt").write_text(traceback.format_exc())
        found = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder, f"found{rank}.pt"))
    os._exit(0)


def on_processes(size: int, folder: Path, work: Callable[..., Any], *more: Any) -> list[Any]:
    """What ``work(*more)`` returns in each; the text of its exception where it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        enter, (size, port, str(folder), work, more), nprocs=size, start_method="fork"
    )
    return [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(size)]
