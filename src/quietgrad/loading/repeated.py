"""Whether a data set gives one record at several numbers, as where rare classes are drawn more
often: each number has a coin of its own, and the record would add several times what is counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

Places = NDArray[np.int64]
WINDOWS = "overflow_to_sample_mapping"  # of tokenizers that cut one text into several rows


def require_each_once(dataset: Any) -> None:
    """As far as torch's Subset and ConcatDataset, and the tables of Hugging Face's data sets, tell:
    rows that were selected twice, or joined to themselves, are the same cells in memory. Equal
    records that lie at places of their own are several (docs/privacy/assumptions.md). Nor may a
    table say that its rows are windows of texts.

    Raises:
        ValueError: with the remedy; it names no record.
    """
    if WINDOWS in (getattr(dataset, "column_names", None) or ()):
        raise ValueError(
            f"dataset has the column {WINDOWS!r}: the tokenizer cut texts into several rows "
            "(return_overflowing_tokens), and epsilon would be that of a row and not of a text; "
            "keep a number of the text in every row, and give it as record_owner= "
            "(docs/users.md), or remove the column where a row is all that is to be protected"
        )
    if type(dataset) not in (Subset, ConcatDataset) and not _is_joined(dataset):
        return
    found = _places(dataset, np.arange(len(dataset)))
    found = found[:, np.lexsort(found)]
    if bool((found[:, 1:] == found[:, :-1]).all(0).any()):
        raise ValueError(
            "dataset gives one record at several numbers (repeated indices of a Subset or of "
            "select, parts of a ConcatDataset or of concatenate_datasets that overlap): each "
            "number has a coin of its own, and the record would add several times what epsilon "
            "counts; give every record once and weigh its loss, or build the plan with "
            "record_owner=, where all that is one record's has one owner (docs/users.md)"
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
    if _is_table(dataset):
        rows, indices = _rows(dataset.data.table), dataset._indices
        if indices is not None:
            rows = rows[np.asarray(indices.column(0).to_numpy(), dtype=np.int64)]
        return np.stack([np.zeros(len(numbers), dtype=np.int64), rows[numbers]])
    return np.stack([np.full(len(numbers), id(dataset)), numbers])


def _taken(indices: Any, numbers: Places) -> Places:
    return np.asarray(indices, dtype=np.int64).reshape(-1)[numbers]


def _is_table(dataset: Any) -> bool:
    kind = type(dataset)
    return (kind.__module__, kind.__qualname__) == ("datasets.arrow_dataset", "Dataset")


def _is_joined(dataset: Any) -> bool:
    """Whether a ``datasets.Dataset`` is more than one table's rows in their order."""
    if not _is_table(dataset):
        return False
    columns = dataset.data.table.columns
    return dataset._indices is not None or any(column.num_chunks > 1 for column in columns)


def _rows(table: Any) -> Places:
    """[rows] where each row of an Arrow table lies, a number of the memory of all of its cells: a
    slice of a table has its memory. Two rows have one number by accident once in 2^64 pairs.
    """
    found = np.zeros(table.num_rows, dtype=np.uint64)
    for column in table.columns:
        cells = [np.zeros(0, dtype=np.uint64)]
        for chunk in column.chunks:
            memory = next((part for part in chunk.buffers() if part is not None), None)
            first = np.array([0 if memory is None else memory.address], dtype=np.uint64)
            places = np.arange(chunk.offset, chunk.offset + len(chunk), dtype=np.uint64)
            cells.append(_mixed(first) + places)
        found = _mixed(found) + np.concatenate(cells)
    return found.view(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Of 64 bits, so that near numbers are far from each other (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
