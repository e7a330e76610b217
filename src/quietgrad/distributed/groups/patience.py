"""How long the groups that a run makes for itself wait. torch does not hand the timeout of
``init_process_group`` on to groups that are made later: a script that asked for hours, because one
rank evaluates for long, would be ended after half an hour.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def patience() -> timedelta | None:
    """The longest timeout of the default group; None where torch's own is no shorter."""
    group: Any = dist.distributed_c10d._get_default_group()
    longest: timedelta = dist.distributed_c10d.default_pg_timeout
    for device in group._device_types:
        with contextlib.suppress(Exception):  # a backend that tells nothing of it
            longest = max(longest, group._get_backend(device).options._timeout)
    return longest if longest > dist.distributed_c10d.default_pg_timeout else None
