"""What one rank cannot do, told to all: each of the others would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
WORD_BYTES = 2048


def tried(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What ``work`` returns, or what it raises: before this rank has said that it could."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def word_of(error: BaseException | None) -> str:
    """What the others are told of it; nothing where all is well."""
    return "" if error is None else str(error) or type(error).__name__


def given_by(rank: int, word: str, group: Any) -> str:
    """A short text of one rank, on all: a message of one size whatever it is."""
    told = word.encode("utf-8", "replace")[:WORD_BYTES].ljust(WORD_BYTES, b"\0")
    buffer = torch.tensor(list(told), dtype=torch.uint8, device="cpu")
    dist.broadcast(buffer, rank, group=group)
    return bytes(buffer.tolist()).rstrip(b"\0").decode("utf-8", "ignore")


def refuse_together(
    words: Sequence[str], own: BaseException | None, what: str, kind: type[Exception] = RuntimeError
) -> None:
    """Raises on every rank where one could not.

    Args:
        words: by rank, ``word_of`` there.
        own: this rank's error, which it raises as it is.
        what: could not be done, such as "start the run".
        kind: of the error elsewhere.
    """
    if own is not None:
        raise own
    for rank, word in enumerate(words):
        if word:
            raise kind(f"rank {rank} could not {what}: {word}")
