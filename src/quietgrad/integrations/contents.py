"""Records that are known by what they hold, wherever they lie and in whatever order: a split that
was made again, a copy that was shuffled, rows read from the same file a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quietgrad.tensors import fields_of
from quietgrad.training.tasks.records import spread

LOOKED_AT = 32
READ_AT_ONCE = 1000

# Training records that are read for it; of larger data sets nothing is found out.
MOST_READ = 500_000

# What no other record has by chance: letters, or different numbers, of which fractions tell more.
LETTERS, NUMBERS, FRACTIONS = 20, 8, 3


def contents_shared(one: Any, other: Any) -> bool:
    """Whether at least half of the records that are looked at in ``one``, of those that no other
    record is like by chance, are in ``other``.

    Reads ``other`` once, where that is cheap: lists, tensors and tables, and parts of them. Some
    ten to a hundred microseconds a record.

    Raises:
        Exception: whatever reading raises; ``TypeError`` for records of a kind that is not known.
    """
    if not (_is_cheap(one) and _is_cheap(other)) or not len(one) or len(other) > MOST_READ:
        return False
    looked = [content_of(_plain(one)[int(i)]) for i in spread(one, LOOKED_AT)]
    telling = [content for content in looked if _tells(content)]
    if 2 * len(telling) < len(looked):
        return False
    missing, needed = set(telling), (len(telling) + 1) // 2
    for content in _contents(other):
        if content in missing:
            needed -= telling.count(content)
            missing.discard(content)
            if needed <= 0:
                return True
    return False


def content_of(record: Any) -> Any:
    """A record as something that is equal for equal records, however their numbers are kept."""
    if record is None or isinstance(record, str | bytes):
        return record
    if isinstance(record, Mapping):
        return tuple(sorted((str(name), content_of(value)) for name, value in record.items()))
    if isinstance(record, torch.Tensor):
        record = record.detach().cpu().to(torch.float64).numpy()
    if isinstance(record, list | tuple) and not all(isinstance(x, int | float) for x in record):
        return tuple(content_of(value) for value in record)
    if isinstance(record, bool | int | float | np.ndarray | np.generic | list | tuple):
        return np.asarray(record, dtype=np.float64).reshape(-1).tobytes()
    fields = fields_of(record)
    if not fields:
        raise TypeError(f"records of type {type(record).__name__} are not compared")
    return content_of(fields)


def _tells(content: Any) -> bool:
    letters, numbers = 0, set[float]()
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple):
            waiting += value
        elif isinstance(value, str):
            letters += len(value)
        elif isinstance(value, bytes) and len(value) % 8 == 0:
            numbers |= set(np.frombuffer(value).tolist())
    fractions = [x for x in numbers if not float(x).is_integer()]
    return letters >= LETTERS or len(numbers) >= NUMBERS or len(fractions) >= FRACTIONS


def _is_cheap(data: Any) -> bool:
    """Whether its records lie in memory or in a table, and nothing computes them."""
    if isinstance(data, Subset):
        return _is_cheap(data.dataset)
    if isinstance(data, ConcatDataset):
        return all(_is_cheap(part) for part in data.datasets)
    return isinstance(data, list | tuple | TensorDataset) or _is_table(data)


def _is_table(data: Any) -> bool:
    """``datasets.Dataset``; images and sounds among its columns are decoded when they are read."""
    features = getattr(data, "features", None)
    if not isinstance(features, Mapping) or not hasattr(data, "with_format"):
        return False
    return not any(hasattr(kind, "decode_example") for kind in features.values())


def _plain(data: Any) -> Any:
    return data.with_format(None) if _is_table(data) else data


def _contents(data: Any) -> Iterator[Any]:
    if not _is_table(data):
        for i in range(len(data)):
            yield content_of(data[i])
        return
    for columns in _plain(data).iter(READ_AT_ONCE):
        names = list(columns)
        for values in zip(*columns.values(), strict=True):
            yield content_of(dict(zip(names, values, strict=True)))
