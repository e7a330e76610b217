"""Waits for other ranks that end where one of them does not come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from quietgrad.distributed.groups import news
from quietgrad.distributed.groups.failing import lost_in_words
from quietgrad.distributed.groups.patience import patience

BETWEEN = 1.0  # seconds between two looks of a rank that waits
LONGEST = 0.002  # seconds of sleep, at most an eighth of what was waited
AT_A_DOOR = 0.05  # the same where a group is made
IN_SILENCE = 60.0  # seconds at such a door, until those who look on are told


def met(work: Any, away: Callable[[float], str], between: float = BETWEEN) -> str:
    """Waits for an operation of all ranks; what keeps one of them away, or nothing.

    Args:
        work: begun.
        away: seconds waited -> what keeps a rank away. Asked twice: a rank may have sent what it
            had to, and ended.

    Raises:
        RuntimeError: of the backend, where the operation failed.
    """
    began, looked, before = time.monotonic(), 0.0, ""
    while not work.is_completed():
        waited = time.monotonic() - began
        if waited > looked + between:
            looked, found = waited, away(waited)
            if found and found == before:
                return found
            before = found
        time.sleep(min(LONGEST, waited / 8))
    work.wait()
    return ""


def meet_before_a_group() -> None:
    """Waits until all ranks are about to make a group. torch waits for them in the store, where a
    rank that has failed or ended does not show, until the timeout.

    Raises:
        RuntimeError: naming the rank that does not come.
    """
    try:
        _meet()
    except dist.DistError as error:  # the store is gone, with the process that kept it
        raise RuntimeError(lost_in_words(error)) from error


def _meet() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    default: Any = dist.distributed_c10d._get_default_group()
    # Groups are counted alike on all ranks, or torch could not make them.
    place = f"quietgrad door {default.group_name} {dist.distributed_c10d._world.group_count}"
    store: Any = dist.PrefixStore(place, dist.distributed_c10d._get_default_store())
    store.set(str(rank), "here")
    news.tell(news.BEGAN)
    left, began, looked, said = set(range(size)) - {rank}, time.monotonic(), 0.0, False
    longest = patience() or dist.distributed_c10d.default_pg_timeout
    while left := {r for r in left if not store.check([str(r)])}:
        waited = time.monotonic() - began
        if waited > looked + BETWEEN:
            looked, away = waited, news.told(sorted(left), waited)
            if away:
                raise RuntimeError(f"{away}{news.AFTER}")
        if waited > IN_SILENCE and not said:
            said = True  # no warning: where those are errors, a slow rank would end the others
            print(
                f"quietgrad: rank {rank} has waited {waited:.0f} s for rank {min(left)}, and waits "
                f"until {longest}: every rank has to come here, to plan.start, to a Trainer or to "
                "the command, not the first alone",
                file=sys.stderr,
                flush=True,
            )
        if timedelta(seconds=waited) > longest:
            raise RuntimeError(
                f"rank {rank} waited {longest} for rank {min(left)}, which did not come where all "
                "make a process group; see what its process said, and start all ranks again"
            )
        time.sleep(min(AT_A_DOOR, waited / 8 + 1e-4))
