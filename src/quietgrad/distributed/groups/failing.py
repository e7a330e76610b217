"""Collective operations that break off: what torch then does under NCCL (the process has to end),
and what is said of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import torch.distributed as dist

# As torch 2.13 reads them; the newer name is the first (ProcessGroupNCCL.hpp).
NAMES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
GOES_ON = (0, 2)  # no handling; clean up, and let the process go on
# What backends say of a peer that is gone, and what it means. Their own words, with places in their
# source, stay in the error's __cause__.
MEANING = {
    "closed by peer": "its connection was closed",
    "reset by peer": "its connection was closed",
    "broken pipe": "its connection was closed",
    "connection refused": "it does not answer",
    "timed out": "nothing came of it until the timeout",
    "timeout": "nothing came of it until the timeout",
}
OF_GLOO = ("/gloo/", "caused pair closure")
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


def is_of_a_backend(error: BaseException) -> bool:
    """Whether an operation with other ranks failed; gloo has no class of its own for it."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OF_GLOO)
    )


def in_short(error: BaseException) -> str:
    """What a backend's error means, where that is known; else its class."""
    said = str(error).lower()
    return next((short for words, short in MEANING.items() if words in said), type(error).__name__)


def lost_in_words(error: BaseException) -> str:
    """For somebody who waits, where an operation with other processes failed."""
    return (
        f"another process failed, ended or cannot be reached ({in_short(error)}), and this one "
        "cannot go on alone; see what that one said, and start all again (a private run goes on "
        "from its ledger)"
    )
