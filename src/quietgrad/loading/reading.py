"""Whether a data set gives a record by itself, whatever was read before it.

A running mean over what was read, a difference to the record before, or one buffer that every
reading writes into: there a record changes what others add to the sum, and nothing that looks at a
batch can see it. So before the first batch is read a few records are read one after the other.
What this cannot see is in docs/privacy/data.md.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import secrets
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.generators import keyed_generators, seed_all
from quietgrad.tensors import fields_of

DEPENDS = (
    "dataset gives another record after one record than after another (a running mean, a "
    "difference to the record before, a cache of what was read): one record would change what "
    "others add to the sum; let record i follow from record i alone, and compute such numbers "
    "beforehand on public data"
)
WRITTEN_OVER = (
    "dataset gives records in memory that its next reading writes over, so that one record would "
    "take the place of another; return a copy (tensor.clone(), array.copy())"
)


# Forms in which Hugging Face's data sets give records, each a function of one record's cells. (A
# transform, "custom", is given all records that are asked for at once.)
PLAIN = {None, "python"}
# Where a cell is empty, these give the whole column of what is asked for at once as floats.
OF_ONE_TYPE = {"numpy", "torch"}


class OneByOne(Dataset[Any]):
    """A data set that gives several records at once when asked for several, asked for each by
    itself: what it makes of several together could be made of several.

    Attributes:
        dataset: the one that was given.
        as_several: whether it is asked for several, of which there is one: its types are others
            where it is asked for one.
    """

    __getitems__ = None  # which torch's fetcher would ask for several

    def __init__(self, dataset: Any, as_several: bool = False) -> None:
        self.dataset = dataset
        self.as_several = as_several

    def __getitem__(self, index: int) -> Any:
        if self.as_several:
            return self.dataset.__getitems__([index])[0]
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # before it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def one_by_one(dataset: Any) -> Any:
    """The data set, or one that asks it for one record at a time where it might mix several."""
    if getattr(dataset, "__getitems__", None) is None:
        return dataset
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    if getattr(inner, "__getitems__", None) is None:
        return dataset
    # Not by the package's name alone: scripts have a package "datasets" of their own.
    kind = type(inner)
    hugging_faces = (kind.__module__, kind.__qualname__) == ("datasets.arrow_dataset", "Dataset")
    form = inner.format["type"] if hugging_faces else ""
    if form in OF_ONE_TYPE:
        return OneByOne(dataset, as_several=True) if has_gaps(inner) else dataset
    return dataset if form in PLAIN else OneByOne(dataset)


def has_gaps(dataset: Any) -> bool:
    """Whether any cell of a ``datasets.Dataset`` is empty, or holds an empty one. Private."""
    columns = getattr(dataset.data, "table", dataset.data).columns
    return any(_has_gaps(chunk) for column in columns for chunk in column.chunks)


def _has_gaps(array: Any) -> bool:
    """Of an arrow array; those of lists and structures hold others."""
    if array.null_count:
        return True
    inner = getattr(array, "storage", None)
    if inner is None:
        inner = array.flatten() if hasattr(array, "flatten") else ()
    return any(_has_gaps(one) for one in (inner if isinstance(inner, list | tuple) else (inner,)))


def require_by_number(dataset: Any, name: str = "dataset") -> None:
    """Refuses tables, and dictionaries of several data sets, whose ``[i]`` is no record.

    Raises:
        TypeError: with the remedy.
    """
    kind = type(dataset)
    if kind.__module__.partition(".")[0] == "pandas":
        records = '.to_dict("records")' if kind.__name__ == "DataFrame" else ".tolist()"
        raise TypeError(
            f"{name} is a pandas {kind.__name__}, of which [i] is the column or the label i and "
            "not record i, so that one row would be in many records; give its records, "
            f"{name}{records}"
        )
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        raise TypeError(
            f"{name} is a {kind.__name__}, which has no record 0: a dictionary of data sets, or of "
            f'columns; give one of its data sets ({name}["train"], say), or a list of records'
        )


def require_records_apart(dataset: Any) -> None:
    """Reads a few records, each after one record and after another. Generators that the data set
    draws from (torch's, numpy's, Python's and its own) stand alike before each, and everything
    that was found of it is put back. Some twenty readings.

    Args:
        dataset: records by number; fewer than three are not looked at.

    Raises:
        ValueError: where a record depends on what was read before it. Says nothing of any record.
        TypeError: as ``require_by_number``.
    """
    require_by_number(dataset)
    size = len(dataset)
    if size < 3:
        return
    looks = [(0, 1, size - 1), (size - 1, 0, size // 2)]
    seed = secrets.randbits(63)
    with keyed_generators(seed):
        reading = _Reading(dataset, seed)
        try:
            for place, one, other in looks:
                reading.require_alike(place, one, other)
        finally:
            reading.before.put_back()


class _Reading:
    """A data set, and everything that it reaches, as it was before the first reading."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.before = Snapshot(nn.Identity(), list(_wrapped(dataset)))

    def require_alike(self, place: int, one: int, other: int) -> None:
        """Raises:
        ValueError: where the record at ``place`` is another after ``one`` than after ``other``.
        """
        found = self._after(one, place)
        if found != self._after(one, place):
            return  # drawn by means that cannot be put back: nothing can be compared
        if found != self._after(other, place):
            raise ValueError(DEPENDS)

    def _after(self, earlier: int, place: int) -> bytes:
        """The record at ``place``, read after another, as a digest."""
        self.before.put_back()
        first = self._read(earlier)
        told = digest_of(first)
        self.before.put_back_generators()
        record = self._read(place)
        # A memory map, or a table that all records lie in, is not written into.
        if told != digest_of(first):
            raise ValueError(WRITTEN_OVER)
        return digest_of(record)

    def _read(self, place: int) -> Any:
        seed_all(self.seed)
        return self.dataset[place]


def _wrapped(dataset: Any) -> Iterator[Any]:
    """A data set, and those that it is a part or a union of (Subset, ConcatDataset)."""
    yield dataset
    inner = [getattr(dataset, "dataset", None), *_several(getattr(dataset, "datasets", None))]
    for one in inner:
        if hasattr(one, "__getitem__"):
            yield from _wrapped(one)


def _several(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def digest_of(record: Any) -> bytes:
    """Of everything that a record holds. Private."""
    told = hashlib.blake2b(digest_size=16)
    for part in bytes_of(record):
        told.update(struct.pack("<q", len(part)) + part)
    return told.digest()


def bytes_of(value: Any) -> Iterator[bytes]:
    """A record as bytes: by contents where its kind is known, pickled otherwise, and of what cannot
    be pickled the kind alone. Private.
    """
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield _entries_of(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield b"mapping"
        for name in value:
            yield repr(name).encode()
            yield from bytes_of(value[name])
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}".encode()
        for part in value:
            yield from bytes_of(part)
    elif fields_of(value):
        yield type(value).__qualname__.encode()
        yield from bytes_of(fields_of(value))
    elif value is None or isinstance(value, str | bytes | int | float):
        yield f"{type(value).__name__} {value!r}".encode("utf-8", "backslashreplace")
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):  # PIL
        yield f"image {value.mode} {value.size}".encode()
        yield value.tobytes()
    else:
        try:
            written = io.BytesIO()
            _AlikeEverywhere(written, protocol=4).dump(value)
            yield written.getvalue()
        except Exception:  # of a record's own objects: any
            yield type(value).__qualname__.encode()


def _entries_of(tensor: Tensor) -> bytes:
    """Those of a sparse one where it has any; nothing of a layout that cannot be laid out."""
    plain = tensor.detach().cpu()
    try:
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        plain = plain.contiguous().resolve_conj().resolve_neg()
        return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    except (RuntimeError, TypeError):  # nested, quantised
        return str(plain.layout).encode()


class _AlikeEverywhere(pickle._Pickler):
    """Pickles with the same bytes in every process: torch writes a tensor with the whole memory
    that it lies in and a number of its own, and a set has an order of its process.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return bytes, (digest_of(value),)
        if type(value) in (set, frozenset):
            return type(value), (sorted(digest_of(one) for one in value),)
        return NotImplemented
