"""What a process says of its end to those who may wait for it, in the store of the process group.

Who waits for a process that has failed elsewhere, or is gone, hears nothing of it: a new group of
torch's is waited for in the store until the timeout, and a process that caught its own error keeps
its connections. So a process that fails at one of the library's doors leaves a line there, and one
that ends leaves one on its way out.

A line holds this library's own words, which tell of no record, and of any other error its type
alone: what a user's code says may be about records.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 20.0  # seconds, for a rank that has failed and may begin again
MOST_WORDS = 600
FAILED, ENDED, BEGAN = "failed", "ended", "began"
_HERE = time.time()  # lines of before are of another start, in a store that outlived it
AFTER = ", and this rank would wait for it; see what that one said, and start all ranks again"


def in_public(error: BaseException | None) -> str:
    """What may be told of an error to others and their logs; nothing where all is well."""
    if error is None:
        return ""
    name, last = type(error).__name__, error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    own = where.partition(".")[0] == "quietgrad"
    return f"{name}: {error}"[:MOST_WORDS] if own and str(error) else name


def tell(what: str, words: str = "") -> None:
    """Says what this process does; waits for nobody."""
    with contextlib.suppress(Exception):  # a store that is gone: so is the group
        found = _store()
        if found is not None:
            store, rank = found
            store.set(str(rank), f"{what} {time.time()} {words}")


def told(ranks: Iterable[int], waited: float) -> str:
    """Why one of these ranks does not come, after so many seconds; nothing where it may."""
    with contextlib.suppress(Exception):
        found = _store()
        for rank in ranks if found is not None else ():
            assert found is not None
            store, own = found
            if rank == own or not store.check([str(rank)]):
                continue
            what, at, words = store.get(str(rank)).decode().split(" ", 2)
            if float(at) < _HERE:
                continue
            if what == ENDED:
                return f"rank {rank} ended{f' ({words})' if words else ''}"
            if what == FAILED and waited > PATIENCE:
                return f"rank {rank} failed ({words})"
    return ""


def _store() -> tuple[Any, int] | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    group: Any = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"quietgrad news {group.group_name}", store), dist.get_rank()


def telling(work: Callable[P, R]) -> Callable[P, R]:
    """A door of the library, such as a trainer's ``__init__``, which every rank passes by itself:
    where this rank alone fails in it, the others hear of it where they next wait.
    """

    @functools.wraps(work)
    def told_to_others(*args: P.args, **options: P.kwargs) -> R:
        tell(BEGAN)
        try:
            return work(*args, **options)
        except BaseException as error:
            tell(FAILED, in_public(error))
            raise

    return told_to_others


def _on_the_way_out() -> None:
    tell(ENDED, in_public(getattr(sys, "last_value", None)))  # the error that ended the script


atexit.register(_on_the_way_out)
