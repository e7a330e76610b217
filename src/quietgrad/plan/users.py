"""How users are protected where records have owners: all that a user contributes to a step is one
gradient of bounded norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quietgrad.records import Count, judge
from quietgrad.sampling.users import UserRecords


@dataclass(frozen=True)
class Users:
    """Which records stand for a user in a step, and what of them is clipped.

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
    choice: Literal["fixed", "fresh"] = "fixed"

    def __post_init__(self) -> None:
        judge(self)


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
                "build(..., record_owner=...) one owner a record and loop over run.loader "
                "(docs/users.md), or leave users out; Trainer, Lightning and Opacus scripts have "
                "no owners"
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
