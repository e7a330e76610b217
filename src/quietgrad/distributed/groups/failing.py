"""What torch does where a collective operation under NCCL breaks off: the process has to end."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

# As torch 2.13 reads them; the newer name is the first (ProcessGroupNCCL.hpp).
NAMES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
GOES_ON = ("0", "2")  # no handling; clean up, and let the process go on


def require_to_end_at_failures(environment: Mapping[str, str] | None = None) -> None:
    """A gather of parameters that broke off leaves weights of any content, which bounds nothing of
    what was in that memory before; torch's default ends the process.

    Raises:
        RuntimeError: where NCCL is told to go on.
    """
    if "nccl" not in str(dist.get_backend_config()):
        return
    known = os.environ if environment is None else environment
    name = next((name for name in NAMES if name in known), None)
    if name is not None and known[name].strip() in GOES_ON:
        raise RuntimeError(
            f"{name}={known[name]}: with it a process goes on after a collective operation that "
            "broke off, and what it clips then is unknown; unset it (torch's own 3 ends the "
            "process) and start all ranks again"
        )
