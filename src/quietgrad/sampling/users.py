"""Whose each record is: users are drawn, and with a user some of the user's records.

Which records stand for a user depends on how many there are, on who the user is and on the
step: never on other users. So adding or removing a user with all records changes nothing about the
others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import require_at_least, require_int, require_word
from quietgrad.randomness import RandomKey
from quietgrad.records import Count, judge
from quietgrad.sampling.identities import identities_of

Indices = NDArray[np.int64]
Choice = Literal["fixed", "fresh"]
CHOICES: tuple[Choice, ...] = ("fixed", "fresh")
ORDER_KEY = b"quietgrad records of a user"  # public: the order needs to be fixed, not secret


@dataclass(frozen=True)
class Users:
    """How users are protected where records have owners: which records stand for a user in a step,
    and what of them is clipped.

    Attributes:
        records_per_user: at most so many of a user's records are used in a step. Public: choose it
            without looking at how many anybody has.
        combined: "mean" or "sum" of the gradients of a user's records, whose norm is clipped. With
            the sum a user with many records pulls harder, up to the clipping norm.
        choice: of the records of a user who has more: "fixed" takes the same ones in every step,
            "fresh" draws them anew.

    Raises:
        ValueError: naming the setting and the remedy.
    """

    records_per_user: Count = 16
    combined: Literal["mean", "sum"] = "mean"
    choice: Choice = "fixed"

    def __post_init__(self) -> None:
        judge(self)


@dataclass(frozen=True, eq=False)
class UserIndices:
    """The users of a step, and which records stand for them. Private.

    Attributes:
        users: [users] their numbers.
        records: [records] indices into the data set, those of a user side by side.
        sizes: [users] how many of the records are each user's.
    """

    users: Indices = field(repr=False)
    records: Indices = field(repr=False)
    sizes: tuple[int, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.sizes)

    def span(self, users: slice) -> UserIndices:
        """Some of the users, in order."""
        start, sizes = sum(self.sizes[: users.start]), self.sizes[users]
        return UserIndices(self.users[users], self.records[start : start + sum(sizes)], sizes)

    def where(self, kept: NDArray[np.bool_]) -> UserIndices:
        """Those of the users, by [users] booleans, in order."""
        sizes = np.array(self.sizes, dtype=np.int64)
        records = self.records[np.repeat(kept, sizes)]
        return UserIndices(self.users[kept], records, tuple(sizes[kept].tolist()))


@dataclass(frozen=True, eq=False)
class UserRecords:
    """Records by user. Users are numbered in the order of their first records.

    Attributes:
        identities: [N] what each user is known by.
        order: [records] indices, user after user; a user's in the order of the data set, or with
            ``choice="fixed"`` in one that is fixed.
        offsets: [N + 1] where each user's begin in ``order``.
        at_most: records that stand for a user in a step.
        choice: "fixed": always the same ones; "fresh": drawn anew in every step.
    """

    identities: tuple[bytes, ...] = field(repr=False)
    order: Indices = field(repr=False)
    offsets: Indices = field(repr=False)
    at_most: int
    choice: Choice = "fixed"

    @classmethod
    def of(
        cls,
        owners: Iterable[Any],
        at_most: int,
        choice: Choice = "fixed",
        name: str = "record_owner",
    ) -> UserRecords:
        """From one owner a record.

        Args:
            owners: [records] text, bytes or whole numbers; a list, an array, a column.
            at_most: records that stand for a user in a step.
            choice: see above.
            name: of the argument, for messages.

        Raises:
            ValueError, TypeError: for a record without an owner, owners of several types, or one
                owner of everything. Messages name no record and no owner.
        """
        require_int("records_per_user", at_most)
        require_at_least("records_per_user", at_most, 1, "a user needs a record to be learnt from")
        require_word("choice", choice, CHOICES)
        known = identities_of(owners, name)
        numbers: dict[bytes, int] = {}
        user_of = np.array([numbers.setdefault(k, len(numbers)) for k in known], dtype=np.int64)
        if len(numbers) < 2:
            raise ValueError(
                f"{name} names a single user: all records together would be the one unit that is "
                "protected, and nothing could be learnt; give the column that tells people apart"
            )
        order = np.argsort(user_of, kind="stable").astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(user_of))]).astype(np.int64)
        found = cls(tuple(numbers), order, offsets, at_most, choice)
        return found._in_fixed_order() if choice == "fixed" else found

    def _in_fixed_order(self) -> UserRecords:
        order = self.order.copy()
        for user in np.flatnonzero(np.diff(self.offsets) > self.at_most):
            own = slice(self.offsets[user], self.offsets[user + 1])
            rank = [_rank(self.identities[user], j) for j in range(own.stop - own.start)]
            order[own] = order[own][np.argsort(rank, kind="stable")]
        return replace(self, order=order)

    @property
    def count(self) -> int:
        """N, users."""
        return len(self.identities)

    @property
    def records(self) -> int:
        """Of all users. Private: it says how many a user has to who knows the others."""
        return len(self.order)

    @cached_property
    def sizes(self) -> Indices:
        """[N] how many records stand for each user in a step. Private."""
        return np.minimum(np.diff(self.offsets), self.at_most)

    def drawn(self, users: Indices, key: RandomKey, step: int) -> UserIndices:
        """The records that stand for some users in a step, users with few records first. Private.

        Cost: of users with more than ``at_most`` records one small generator each where they are
        drawn anew.
        """
        chosen = users[np.argsort(self.sizes[users], kind="stable")]
        records = [self._of(int(user), key, step) for user in chosen]
        return UserIndices(
            chosen,
            np.concatenate(records) if records else np.zeros(0, dtype=np.int64),
            tuple(len(own) for own in records),
        )

    def _of(self, user: int, key: RandomKey, step: int) -> Indices:
        own = self.order[self.offsets[user] : self.offsets[user + 1]]
        if len(own) <= self.at_most:
            return own
        if self.choice == "fixed":
            return own[: self.at_most]
        drawn = key.generator("user", step, self.identities[user].hex())
        return own[np.sort(drawn.permutation(len(own))[: self.at_most])]

    def without_last(self) -> UserRecords:
        """All users but the last, with all records: a neighbouring data set. Indices are kept,
        so the data set may hold records that are nobody's.
        """
        end = self.offsets[-2]
        return replace(
            self,
            identities=self.identities[:-1],
            order=self.order[:end],
            offsets=self.offsets[:-1],
        )


def _rank(identity: bytes, own: int) -> bytes:
    text = identity + own.to_bytes(8, "little")
    return hashlib.blake2b(text, digest_size=16, key=ORDER_KEY).digest()


def users_of(
    users: Users | None,
    record_owner: Iterable[Any] | None,
    dataset_size: int,
    record_ids: Sequence[bytes] | None,
) -> tuple[Users | None, UserRecords | None]:
    """The settings that act and whose the records are; None twice where records are protected.

    Raises:
        ValueError, TypeError: for settings without owners, another number of owners than records,
            and owners that ``UserRecords.of`` refuses. No message names a record or an owner.
    """
    if record_owner is None:
        if users is not None:
            raise ValueError(
                f"users={users!r} is set, but nothing says whose the records are; give "
                "record_owner= to PrivacyConfig.build, PrivateTrainer or PrivateLightningModule "
                "(docs/users.md), or leave users out; Opacus scripts have no owners"
            )
        return None, None
    if record_ids is not None:
        raise ValueError(
            "record_ids are what records are known by, and with record_owner users take their "
            "place, known by their owner; leave record_ids out"
        )
    how = Users() if users is None else users
    if not isinstance(how, Users):
        raise TypeError(f"users={users!r} is no record; pass one, such as {Users()!r}")
    owned = UserRecords.of(record_owner, how.records_per_user, how.choice)
    if owned.records != dataset_size:
        raise ValueError(
            "record_owner has another number of entries than dataset_size says; give one owner a "
            "record, and the number of records as dataset_size"
        )
    return how, owned
