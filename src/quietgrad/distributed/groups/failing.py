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
    """``NAME=value`` where NCCL is told to go on in this process; else nothing."""
    if "nccl" not in str(dist.get_backend_config()):
        return ""
    known = os.environ if environment is None else environment
    name = next((name for name in NAMES if name in known), None)
    number = None if name is None else NUMBER.match(known[name])
    return f"{name}={known[name]}" if name and number and int(number[0]) in GOES_ON else ""


def require_to_end_at_failures(settings: Sequence[str]) -> None:
    """A gather of parameters that broke off leaves weights of any content, which bounds nothing of
    what was in that memory before; torch's default ends the process.

    Args:
        settings: by rank, ``setting_that_goes_on`` there.

    Raises:
        RuntimeError: where a rank goes on.
    """
    for rank, setting in enumerate(settings):
        if setting:
            raise RuntimeError(
                f"{setting} on rank {rank}: with it a process goes on after a collective operation "
                "that broke off, and what it clips then is unknown; unset it (torch's own 3 ends "
                "the process) and start all ranks again"
            )
