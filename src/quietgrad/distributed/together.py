"""What a training command needs beside its private run where a launcher started several of it: the
process group, one word for all, and which of them writes files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from quietgrad.distributed.alike import digest
from quietgrad.distributed.groups import news
from quietgrad.distributed.groups.failing import is_of_a_backend, lost_in_words
from quietgrad.distributed.groups.leaving import close_connections
from quietgrad.distributed.groups.meeting import place_of_this_start
from quietgrad.distributed.groups.patience import patience
from quietgrad.distributed.groups.restarts import begun_before, counted
from quietgrad.distributed.groups.saving import group_for_saving as group_for_saving
from quietgrad.distributed.groups.telling import refuse_together, tried, word_of
from quietgrad.distributed.groups.waiting import meet_before_a_group, met

Result = TypeVar("Result")


class Together:
    """The processes of a command. Alone, every method gives back what it was given.

    Attributes:
        rank, size: of this process.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        if size > 1:
            meet_before_a_group()
            self._group = dist.new_group(backend="gloo", timeout=patience())

    @property
    def first(self) -> bool:
        """Whether this process writes the run directory, and says what there is to say."""
        return self.rank == 0

    def any_of(self, flag: bool) -> bool:
        """Whether it holds on some rank: a request to stop has to reach all at the same step."""
        if self._group is None:
            return flag
        told = torch.tensor([int(flag)], device="cpu")
        self._met(dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return bool(told.item())

    def of_first(self, value: Any) -> Any:
        """What the first process gives, on all; waits for it."""
        if self._group is None:
            return value
        box = [value]
        self._met(dist.barrier(group=self._group, async_op=True))
        with _lost():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on the first process, which alone does it. What it raises there is
        raised there; the others raise a ValueError that says so, and do not wait.
        """
        if self._group is None:
            return work()
        found, error = tried(work) if self.first else (None, None)
        found, refused = self.of_first((found, None if error is None else str(error)))
        if error is not None:
            raise error
        if refused is not None:
            raise ValueError(refused)
        return found

    def all_of(
        self,
        work: Callable[[], Result],
        what: str,
        words: Callable[[BaseException | None], str] = word_of,
    ) -> Result:
        """What ``work`` returns, on each process; all do it. Where it fails on one, all raise: that
        one what it raised, the others a ValueError with its words.

        Args:
            work: does not meet the others itself.
            what: it does, such as "read the data".
            words: told of its error; ``news.in_public`` where a user's code may say what it is of.
        """
        if self._group is None:
            return work()
        found, error = tried(work)
        refuse_together(self._of_all(words(error)), error, what, ValueError)
        return cast(Result, found)

    def require_same(self, name: str, value: object, remedy: str) -> None:
        """Raises RuntimeError on all ranks where ``value`` is not the same."""
        if self._group is None:
            return
        told = self._of_all(digest(value))
        other = next((rank for rank, one in enumerate(told) if one != told[0]), None)
        if other is not None:
            raise RuntimeError(f"ranks 0 and {other} differ in {name}: {remedy}")

    def require_alike(self, facts: Mapping[str, object], remedy: str) -> None:
        """Raises RuntimeError on all ranks where one of the named facts is not the same."""
        if self._group is None:
            return
        told = self._of_all({name: digest(value) for name, value in facts.items()})
        for rank, one in enumerate(told):
            other = next(
                (name for name in {**told[0], **one} if one.get(name) != told[0].get(name)), ""
            )
            if other:
                raise RuntimeError(f"ranks 0 and {rank} differ in {other}: {remedy}")

    def _of_all(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.size
        self._met(dist.barrier(group=self._group, async_op=True))
        with _lost():
            dist.all_gather_object(told, value, group=self._group)
        return told

    def _met(self, work: Any) -> None:
        """Waits for all, as long as none of them says that it will not come."""
        with _lost():
            away = met(work, lambda waited: news.told(range(self.size), waited))
        if away:
            close_connections([self._group])  # what was begun would be waited for at the end, too
            raise RuntimeError(f"{away}{news.AFTER}")


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """A backend's error says where in its source it is, and not what to do."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_backend(error):
            raise
        said = news.told(range(dist.get_world_size()), 0.0) if dist.is_initialized() else ""
        raise RuntimeError(f"{said and f'{said}: '}{lost_in_words(error)}") from error


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun started this process as one of several."""
    known = os.environ if environment is None else environment
    size = known.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1 and "RANK" in known and "MASTER_ADDR" in known


def restarted(together: Together) -> bool:
    """Whether torchrun has started these processes before, as far as any of them can tell."""
    return together.any_of(bool(counted()) or (together.first and begun_before("a command")))


def meet(device: str) -> Together:
    """Joins the group of the launcher: NCCL for GPUs, one each, and gloo for processors. After a
    restart, too, whose ranks would otherwise look for those of before.

    Args:
        device: "cpu" or "cuda".

    Raises:
        RuntimeError: where a rank does not come.
    """
    if not launched():
        return Together()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, **place_of_this_start())
    return Together(dist.get_rank(), dist.get_world_size())


def here() -> Together:
    """The processes of the group that somebody has initialised, if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return Together()
    return Together(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    """Takes this process out of the group, where it is in one, once all are here: gloo may abort a
    process whose peer is gone.
    """
    if dist.is_available() and dist.is_initialized():
        with _lost():
            dist.barrier()
        dist.destroy_process_group()
