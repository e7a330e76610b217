"""Whether a data set gives one record at several numbers, as where rare classes are drawn more
often: each number has a coin of its own, and the record would add several times what is counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

Places = NDArray[np.int64]


def require_each_once(dataset: Any) -> None:
    """As far as torch's Subset and ConcatDataset, and the selections of Hugging Face's data sets,
    tell. Equal records that lie at places of their own are several (docs/privacy/assumptions.md).

    Raises:
        ValueError: with the remedy; it names no record.
    """
    if type(dataset) not in (Subset, ConcatDataset) and _selected(dataset) is None:
        return
    found = _places(dataset, np.arange(len(dataset)))
    if len(np.unique(found, axis=1).T) < found.shape[1]:
        raise ValueError(
            "dataset gives one record at several numbers (repeated indices of a Subset or of "
            "select, parts of a ConcatDataset that overlap): each number has a coin of its own, "
            "and the record would add several times what epsilon counts; give every record once "
            "and weigh its loss, or build the plan with record_owner=, where all that is one "
            "record's has one owner (docs/users.md)"
        )


def _places(dataset: Any, numbers: Places) -> Places:
    """[2, numbers]: in which data set the records of these numbers lie, and where in it."""
    if hasattr(dataset, "__len__") and len(dataset):  # -1 is the last
        numbers = numbers % len(dataset)
    if type(dataset) is Subset:
        return _places(dataset.dataset, _taken(dataset.indices, numbers))
    if type(dataset) is ConcatDataset:
        part = np.searchsorted(dataset.cumulative_sizes, numbers, side="right")
        found = np.empty((2, len(numbers)), dtype=np.int64)
        for i, (one, start) in enumerate(
            zip(dataset.datasets, (0, *dataset.cumulative_sizes), strict=False)
        ):
            found[:, part == i] = _places(one, numbers[part == i] - start)
        return found
    selected = _selected(dataset)
    if selected is not None:
        return np.stack([np.full(len(numbers), id(dataset.data.table)), selected[numbers]])
    return np.stack([np.full(len(numbers), id(dataset)), numbers])


def _taken(indices: Any, numbers: Places) -> Places:
    return np.asarray(indices, dtype=np.int64).reshape(-1)[numbers]


def _selected(dataset: Any) -> Places | None:
    """Rows of its table that a ``datasets.Dataset`` gives, where these are not all in order."""
    kind = type(dataset)
    if (kind.__module__, kind.__qualname__) != ("datasets.arrow_dataset", "Dataset"):
        return None
    indices = getattr(dataset, "_indices", None)
    return None if indices is None else np.asarray(indices.column(0).to_numpy(), dtype=np.int64)
