"""Whether records that are meant to be public are the training records: their scores would be
printed and saved. What is seen is what careless code does: the data set itself, a part of it (by
where its records lie in memory), a copy of it or of its beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quietgrad.integrations.contents import LETTERS, LOOKED_AT, contents_shared
from quietgrad.tensors import fields_of
from quietgrad.training.tasks.records import spread


def refuse_private_evaluation(
    eval_dataset: Any, private: tuple[Any, ...], name: str = "eval_dataset"
) -> None:
    """Refuses the training records as evaluation records.

    Raises:
        ValueError: with the remedy. It does not say which records.
    """
    named = eval_dataset.values() if isinstance(eval_dataset, dict) else (eval_dataset,)
    for one in named:
        for other in private:
            if one is None or other is None:
                continue
            if one is other or _is_part_of(one, other):
                raise ValueError(
                    f"{name} is the training data, or holds records of it: their scores are "
                    "private, and evaluation prints and saves them; evaluate on public records"
                )


def _is_part_of(one: Any, other: Any) -> bool:
    shared = _shared_rows(one, other)
    if shared is not None:
        return shared
    with contextlib.suppress(Exception):  # what cannot be read fails where it is needed
        if np.isin(_places(one), _places(other)).any():
            return True
    for found in (_objects_shared, _texts_shared, _rows_equal, contents_shared):
        with contextlib.suppress(Exception):
            if found(one, other):
                return True
    return False


def _shared_rows(one: Any, other: Any) -> bool | None:
    """Whether two parts of one data set have rows in common; None for parts of different ones."""
    (root, rows), (other_root, other_rows) = _rows_of(one), _rows_of(other)
    if root is not other_root:
        return None
    return rows is None or other_rows is None or bool(rows & other_rows)


def _rows_of(data: Any) -> tuple[Any, set[int] | None]:
    rows: list[int] | None = None
    while isinstance(data, Subset):
        kept = [int(i) for i in data.indices]
        rows = kept if rows is None else [kept[i] for i in rows]
        data = data.dataset
    return data, None if rows is None else set(rows)


def _places(data: Any) -> NDArray[np.int64]:
    """Addresses of the records that lie in memory of a kind that is known here: slices, selections
    and views of the same data have some in common.
    """
    if isinstance(data, Subset):
        return _places(data.dataset)[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([_places(part) for part in data.datasets])
    if isinstance(data, TensorDataset):
        widest = max(data.tensors, key=torch.Tensor.numel)
        step = widest.stride(0) * widest.element_size()
        rows = np.arange(len(widest) if step else 0, dtype=np.int64)
        return np.asarray(widest.data_ptr() + rows * step, dtype=np.int64)
    if hasattr(data, "features") and hasattr(data, "data"):  # datasets.Dataset
        return _places_of_table(data)
    return np.zeros(0, dtype=np.int64)


def _places_of_table(data: Any) -> NDArray[np.int64]:
    """Of an Arrow table: a record's place in the largest piece of memory of its first column."""
    found = [np.zeros(0, dtype=np.int64)]
    for chunk in data.data.column(0).chunks:
        pieces = [piece for piece in chunk.buffers() if piece is not None]
        begin = max(pieces, key=lambda piece: piece.size).address + chunk.offset
        found.append(begin + np.arange(len(chunk), dtype=np.int64))
    places = np.concatenate(found)
    chosen = getattr(data, "_indices", None)
    return places if chosen is None else places[chosen.column(0).to_numpy()]


def _objects_shared(one: Any, other: Any) -> bool:
    """Slices of a list hold its records themselves."""
    if not (isinstance(one, list | tuple) and isinstance(other, list | tuple)):
        return False
    records = {
        id(record) for record in other if isinstance(record, Mapping | list | tuple | torch.Tensor)
    }
    return any(id(record) in records for record in one)


def _texts_shared(one: Any, other: Any) -> bool:
    """``datasets.Dataset``: every text that is looked at is one of the other's."""
    features = getattr(one, "features", None)
    if not features or not hasattr(other, "column_names") or not len(one):
        return False
    texts = [
        name
        for name, kind in features.items()
        if getattr(kind, "dtype", None) == "string" and name in other.column_names
    ]
    if not texts:
        return False
    seen = set(zip(*(other[name][:] for name in texts), strict=True))
    looked = [tuple(one[int(i)][name] for name in texts) for i in spread(one, LOOKED_AT)]
    telling = [row for row in looked if sum(len(text or "") for text in row) >= LETTERS]
    return 2 * len(telling) >= len(looked) and all(row in seen for row in telling)


def _rows_equal(one: Any, other: Any) -> bool:
    """A copy, whole or of the beginning: the same records at the same places."""
    if not len(one) or len(one) > len(other):
        return False
    return all(_equal(one[int(i)], other[int(i)]) for i in spread(one, LOOKED_AT))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if fields_of(one) and type(one) is type(other):
        return _equal(fields_of(one), fields_of(other))
    return bool(one == other)
