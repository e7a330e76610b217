"""Whose the records are, at the doors of other libraries: a column of the data set, or one owner a
record (docs/users.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quietgrad.sampling.identities import identities_of


class Owners:
    """Of a data set that is trained on. Private, up to the column's name.

    Args:
        record_owner: the name of a column, or [records] owners; None where records are protected.
        dataset: as it was given, before anything was made of it.

    Attributes:
        of_records: [records] for ``PrivacyConfig.build``; None where records are protected.

    Raises:
        ValueError, TypeError: for a column that is not there. No message names an owner.
    """

    def __init__(self, record_owner: str | Iterable[Any] | None, dataset: Any) -> None:
        self._column = record_owner if isinstance(record_owner, str) else None
        self.of_records: Any = record_owner
        if self._column is not None:
            self.of_records = column_of(dataset, self._column)
            if self.of_records is None:
                raise ValueError(
                    f"record_owner={self._column!r} is no column of the training data (a "
                    f"{type(dataset).__name__}); name one that every record has, or give "
                    "record_owner one owner a record"
                )

    def refuse_shared(self, public: Any, name: str = "eval_dataset") -> None:
        """Refuses public records of users who are trained on: what is published of them would not
        be covered. Where owners are a column, and the public records have it.

        Raises:
            ValueError: with the remedy. It names nobody.
        """
        if self._column is None:
            return
        for one in public.values() if isinstance(public, Mapping) else (public,):
            found = None if one is None else column_of(one, self._column)
            if found is None:
                continue
            if set(identities_of(self.of_records)) & set(identities_of(found)):
                raise ValueError(
                    f"{name} holds records of users who are trained on: scores are published, and "
                    f"a user is protected with all records; divide them by {self._column!r}, so "
                    "that nobody is in both"
                )

    def require_in_place(self, dataset: Any, planned: Any) -> None:
        """Refuses records that were replaced, or put in another order, since owners were read: a
        user's would count as those of many.

        Args:
            dataset: as it is trained on now.
            planned: as it was when the plan was made.

        Raises:
            ValueError: with the remedy. It names nobody.
        """
        if self.of_records is None:
            return
        found = None if self._column is None else column_of(dataset, self._column)
        if found is None:
            moved = dataset is not planned
        else:
            moved = list(identities_of(found)) != list(identities_of(self.of_records))
        if moved:
            raise ValueError(
                "train_dataset was replaced, or put in another order, after the trainer was made, "
                "and record_owner says by a record's place whose it is; make a trainer of the "
                "data set as it is now"
            )


def column_of(dataset: Any, name: str) -> list[Any] | None:
    """A column of a ``datasets.Dataset``, or of records that are dictionaries; None for others."""
    if hasattr(dataset, "column_names"):
        return list(dataset[name]) if name in (dataset.column_names or ()) else None
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or not len(dataset):
        return None
    if not _has(dataset[0], name):
        return None
    records = (dataset[i] for i in range(len(dataset)))
    # A record without an owner is refused where the owners are looked at.
    return [record[name] if _has(record, name) else None for record in records]


def _has(record: Any, name: str) -> bool:
    return isinstance(record, Mapping) and name in record
