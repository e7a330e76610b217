"""Parts of a data set for cyclic sampling: records are partitioned once, whoever else is there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PARTS_KEY = b"quietgrad parts of a data set"  # public: parts need to be fixed, not secret


def partition(record_ids: Sequence[bytes], bands: int) -> NDArray[np.int64]:
    """[N] the part of every record: a keyed hash of its identity modulo ``bands``, so that no
    record's coming or going moves another.

    Args:
        record_ids: what identifies each record, such as its content; equal ones fall into the same
            part.
        bands: b.
    """
    other = next((type(record) for record in record_ids if not isinstance(record, bytes)), None)
    if other is not None:  # never the record itself: it is private
        raise TypeError(
            f"record_ids holds a record of type {other.__name__}; give bytes, such as text.encode()"
        )
    hashes = (
        hashlib.blake2b(record, digest_size=8, key=PARTS_KEY).digest() for record in record_ids
    )
    return np.array([int.from_bytes(h, "little") % bands for h in hashes], dtype=np.int64)


def index_ids(dataset_size: int) -> list[bytes]:
    """Identities of records that are known by their position alone: removing one then means leaving
    its place empty.
    """
    return [i.to_bytes(8, "little") for i in range(dataset_size)]
