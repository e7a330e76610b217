"""Batches in micro-batches that fit the memory."""

from __future__ import annotations

from typing import Any

from quietgrad.checks import require_at_least, require_int
from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.data_loader import DPDataLoader


class BatchMemoryManager:
    """``with BatchMemoryManager(...) as loader``: the loader gives batches in parts of at most so
    many records; ``optimizer.step()`` adds up clipped sums and releases at the last part of each.

    Args:
        data_loader: the one that ``make_private`` returned.
        max_physical_batch_size: most records of a part.
        optimizer: the one that ``make_private`` returned.

    Raises:
        ValueError: for a loader that is not private.
    """

    def __init__(self, *, data_loader: Any, max_physical_batch_size: int, optimizer: Any) -> None:
        require_int("max_physical_batch_size", max_physical_batch_size)
        require_at_least("max_physical_batch_size", max_physical_batch_size, 1, "of records")
        if not isinstance(data_loader, DPDataLoader):
            raise ValueError("data_loader is not private; pass the one that make_private returned")
        self._loader = DPDataLoader(data_loader, data_loader.source, max_physical_batch_size)

    def __enter__(self) -> DPDataLoader:
        return self._loader

    def __exit__(self, *_: Any) -> None:
        return None


def wrap_data_loader(*, data_loader: Any, max_batch_size: int, optimizer: Any) -> DPDataLoader:
    """The loader that ``BatchMemoryManager`` gives.

    Args:
        data_loader, optimizer: those that ``make_private`` returned.
        max_batch_size: most records of a part.

    Raises:
        ValueError: for a loader that is not private.
    """
    manager = BatchMemoryManager(
        data_loader=data_loader, max_physical_batch_size=max_batch_size, optimizer=optimizer
    )
    return manager.__enter__()


__getattr__ = absent(
    __name__,
    {
        "BatchSplittingSampler": "BatchMemoryManager cuts batches in parts",
    },
)
