"""What decides which coin is a record's: the identities that its part follows from, and its owner.
Both are given by the records' numbers, so they belong to one order of the data set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quietgrad.sampling.users import UserRecords


@dataclass(frozen=True)
class Assignment:
    """Digests of what was given for the records of a data set. Private.

    Attributes:
        order: of what was given, number by number; empty where nothing was.
        identities: of the identities that parts follow from, in any order; empty where the parts
            follow from the records' numbers, or there is one.
        given_as: the argument that it is of.
    """

    order: str = field(default="", repr=False)
    identities: str = field(default="", repr=False)
    given_as: str = ""


def assignment_of(
    record_ids: Sequence[bytes] | None, users: UserRecords | None, bands: int
) -> Assignment:
    """Of what a plan was built with.

    Args:
        record_ids: one a record, with users one a user; None where the number counts.
        users: whose the records are.
        bands: b; with one part identities decide nothing.
    """
    ids = () if record_ids is None or bands == 1 else tuple(record_ids)
    together = _digest(sorted(map(_hash, ids))) if ids else ""
    if users is not None:
        numbers = (users.order.tobytes(), users.offsets.tobytes())
        return Assignment(_digest([*users.identities, *numbers]), together, "record_owner")
    return Assignment(_digest(ids), together, "record_ids") if ids else Assignment()


def _hash(identity: bytes) -> bytes:
    return hashlib.blake2b(identity, digest_size=32).digest()


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(_hash(part))
    return whole.hexdigest()
