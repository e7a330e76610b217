"""What torch does where a collective operation under NCCL breaks off: the process has to end."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import torch.distributed as dist

# As torch 2.13 reads them; the newer name is the first (ProcessGroupNCCL.hpp).
NAMES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
GOES_ON = (0, 2)  # no handling; clean up, and let the process go on
NUMBER = re.compile(r"\s*[+-]?\d+", re.ASCII)  # as std::stoi reads: "02" and "2 # mode" are 2


def setting_that_goes_on(environment: Mapping[str, str] | None = None) -> str:
    """``NAME=value`` where NCCL is told to go on in this process, and one of its groups has NCCL (a
    mesh may have it where the default group has not); else nothing.
    """
    known = os.environ if environment is None else environment
    name = next((name for name in NAMES if name in known), None)
    number = None if name is None else NUMBER.match(known[name])
    if not name or not number or int(number[0]) not in GOES_ON:
        return ""
    groups = [None, *dist.distributed_c10d._world.pg_map]
    under_nccl = any("nccl" in str(dist.get_backend_config(group)) for group in groups)
    return f"{name}={known[name]}" if under_nccl else ""


def require_to_end_at_failures(settings: Sequence[str]) -> None:
    """A gather of parameters that broke off leaves weights of any content, which bounds nothing of
    what was in that memory before; torch's default ends the process.

    Args:
        settings: by rank, ``setting_that_goes_on`` there.

    Raises:
        RuntimeError: where a rank goes on.
    """
    for rank, setting in enumerate(settings):
        _refuse(rank, setting)


def require_to_end_here() -> None:
    """The same of this rank, before it meets others in a group that was made since the start.

    Raises:
        RuntimeError: where it goes on.
    """
    _refuse(dist.get_rank(), setting_that_goes_on())


def _refuse(rank: int, setting: str) -> None:
    if setting:
        raise RuntimeError(
            f"{setting} on rank {rank}: with it a process goes on after a collective operation "
            "that broke off, and what it clips then is unknown; unset it (torch's own 3 ends "
            "the process) and start all ranks again"
        )
