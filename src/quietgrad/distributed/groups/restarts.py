"""Whether torchrun has started these processes before.

An agent counts the restarts that its own processes asked for. Those that another machine asked for
it does not count, and nobody counts those that a machine brought about by joining or leaving. So
the counts of all ranks are compared, and a start leaves a mark in the agents' store, which outlives
the processes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

_OWN: list[str] = []  # the name of this process, once it is asked for


def counted(environment: Mapping[str, str] | None = None) -> int:
    """How many restarts this process' agent has counted; 0 where there is none."""
    known = os.environ if environment is None else environment
    count = known.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0


def agents_store() -> Any:
    """The store that outlives these processes; None where torchrun's agents keep none.

    Raises:
        RuntimeError: of torch, where it cannot be reached.
    """
    known = os.environ
    if known.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = known["MASTER_ADDR"], int(known["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"quietgrad of {known.get('TORCHELASTIC_RUN_ID', '')}", store)


def begun_before(what: str) -> bool:
    """Whether the first rank of an earlier start of these processes came here, as far as the
    agents' store tells. The first rank alone asks, and is found by later starts.

    Args:
        what: was begun, such as a run.
    """
    store = agents_store()
    if store is None:
        return False
    if not _OWN:
        _OWN.append(secrets.token_hex(16))
    mark: bytes = store.compare_set(f"the first to begin {what}", "", _OWN[0])
    return mark.decode() != _OWN[0]
