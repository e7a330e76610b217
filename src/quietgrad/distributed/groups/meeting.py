"""Where the ranks of a start meet: in a part of the agents' store that no earlier start has seen.

torch 2.13 takes the agents' store as it is, in the belief that it is new with every start. It still
says where the ranks of an earlier start listened, and one that reads that waits minutes for a
process that is gone, and fails (pytorch issue 135712). A count of restarts names no start: agents
of several machines count each for itself. So the first rank draws a name, and every other one asks
it for the name under a question of its own, which no earlier start can have answered.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from quietgrad.distributed.groups.restarts import agents_store

FIRST = 0
WAITING = timedelta(minutes=5)  # for a rank that has not come yet
BETWEEN = 0.05  # seconds between two looks


def place_of_this_start() -> dict[str, Any]:
    """Arguments of ``init_process_group``: none where torchrun's agents keep no store.

    Raises:
        RuntimeError: where a rank does not come.
    """
    store = agents_store()
    if store is None:
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = _given(store, size) if rank == FIRST else _asked(store, rank)
    return {"store": dist.PrefixStore(f"start {name}", store), "rank": rank, "world_size": size}


def _given(store: Any, size: int) -> str:
    """A new name, once every other rank has been told it."""
    name = secrets.token_hex(16)
    answered: dict[int, bytes] = {}
    until = time.monotonic() + WAITING.total_seconds()
    while store.add(f"heard {name}", 0) < size - 1:
        for rank in range(1, size):
            asked = f"question of {rank}"
            # An old question is answered too, to nobody; the new one comes in its place.
            question = store.get(asked) if store.check([asked]) else b""
            if question and answered.get(rank) != question:
                answered[rank] = question
                store.set(f"answer to {question.decode()}", name)
        if time.monotonic() > until:
            heard = store.add(f"heard {name}", 0)
            raise RuntimeError(
                f"rank {FIRST} waited {WAITING} for {size - 1 - heard} other ranks, which did not "
                "come to the process group; see what their processes said, and start all again"
            )
        time.sleep(BETWEEN)
    return name


def _asked(store: Any, rank: int) -> str:
    question = secrets.token_hex(16)
    store.set(f"question of {rank}", question)
    answer = f"answer to {question}"
    try:
        store.wait([answer], WAITING)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} waited {WAITING} for rank {FIRST}, which did not come to the process "
            "group; see what its process said, and start all again"
        ) from error
    name: str = store.get(answer).decode()
    store.add(f"heard {name}", 1)
    return name
