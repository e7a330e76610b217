"""Whether records lie where they lay when the run began.

A record's number decides whose coin is its own: with owners by what was given for that number, and
with correlated noise, which draws from one part of the data set at a time, by the number itself or
by the identity that was given for it. Records in another order, such as those of a shuffle without
a seed, have other parts: a record would take part twice within a round, in rows that the matrix
correlates, and epsilon counts one. And the records of one user would be drawn and clipped as those
of many. Other identities, such as Python's ``hash`` of a text gives in another process, move a
record to another part too.

So the first loader of a run keeps a digest of some records, at places that a random key draws, and
of what was given for them; all lie beside the secret file and go with it. Later loaders compare,
where the same was given in the same order. What is read differently each time is not compared. A
session that goes on without a secret file has nothing to compare with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.distributed.alike import records_digest
from quietgrad.durable import make_folder, write_whole
from quietgrad.keyring import places_path
from quietgrad.randomness import RandomKey
from quietgrad.sampling.assignment import Assignment


@dataclass(frozen=True)
class _Kept:
    """Of the records as they lay; ``records`` is empty before a loader has read some."""

    key: RandomKey
    order: str
    identities: str
    records: str = ""


class Places:
    """Of one run.

    Args:
        run: its name, that of its first session.
        released: releases of earlier sessions. Before the first, records may lie as they like.
        keys: the secret file; None: nothing is kept, and loaders of one session are compared.
        assignment: what was given for the records.

    Raises:
        ValueError: for other identities than the run began with, with the remedy.
    """

    def __init__(self, run: str, released: int, keys: Path | None, assignment: Assignment) -> None:
        self._run, self._given = run, assignment
        self._unknown = keys is None and released > 0 and not assignment.order
        self._path = None if keys is None else places_path(keys)
        self._known = None if self._path is None or not released else _read(self._path, run)
        if not assignment.identities:
            return
        if self._known is None:
            self._keep(_Kept(RandomKey.from_entropy(), assignment.order, assignment.identities))
        elif self._known.identities != assignment.identities:
            name = assignment.given_as
            raise ValueError(
                f"{name} holds other identities than those that this run began with, and with this "
                "plan's correlated noise they decide in which steps a record takes part: it would "
                f"take part in more of them than are accounted for; build the plan with {name} of "
                "the same records, by a function of the record alone that gives the same in every "
                "process (Python's hash of a text does not), or begin a new run (the epsilons add)"
            )

    def require(self, dataset: Any) -> None:
        """Compares some records of a loader's data set.

        Args:
            dataset: records by number. Private.

        Raises:
            ValueError: with the remedy; it names no record.
        """
        known, given = self._known, self._given
        if self._unknown and known is None:
            raise ValueError(
                "keys=None: this run goes on, with this plan's correlated noise the number of a "
                "record decides in which steps it takes part (record_ids were not given), and "
                "nothing was kept that tells whether records lie where they lay; where they do, "
                "give plan.start(keys=PATH), else begin a new run, with "
                "PrivacyConfig.build(record_ids=) where the order may change"
            )
        key = RandomKey.from_entropy() if known is None else known.key
        found, steady = records_digest(dataset, key)
        if not steady:
            return
        if known is None or known.order != given.order or not known.records:
            self._keep(_Kept(key, given.order, given.identities, found))
        elif found != known.records:
            raise ValueError(self._moved() if given.order else self._others())

    def _keep(self, kept: _Kept) -> None:
        self._known = kept
        if self._path is None:
            return
        told = {"run": self._run, "key": kept.key.root.hex(), "records": kept.records}
        told |= {"order": kept.order, "identities": kept.identities}
        _write(self._path, json.dumps(told) + "\n")

    def _others(self) -> str:
        return (
            "dataset holds other records than before, or in another order, and with this "
            "plan's correlated noise the number of a record decides in which steps it takes "
            "part (record_ids were not given): it would take part in more of them than are "
            "accounted for; give the records of the first start in their order (a shuffle by "
            "its seed), or begin a new run, with PrivacyConfig.build(record_ids=) where the "
            f"order may change{self._read_otherwise()}"
        )

    def _moved(self) -> str:
        name = self._given.given_as
        return (
            f"dataset holds other records than before, or in another order, and the plan's {name} "
            "are those of the records as they lay: each would count as another one, and add more "
            "than is accounted for; give the records in that order, or build the plan with "
            f"{name} in the order of now and start the run again with its "
            f"ledger{self._read_otherwise()}"
        )

    def _read_otherwise(self) -> str:
        if self._path is None:
            return ""
        return (
            "; where they are the same, and only read otherwise by now (another version "
            f"of a library), remove {str(self._path)!r}"
        )


def _write(path: Path, told: str) -> None:
    try:
        make_folder(path.parent)
        write_whole(path, told.encode(), secret=True)
    except OSError as error:
        raise ValueError(
            f"{str(path)!r}, a secret file beside the run's keys=, cannot be written: "
            f"{error.strerror or error}; without it no later start could tell whether records lie "
            "where they lay: make room on the disk, then start again"
        ) from error


def _read(path: Path, run: str) -> _Kept | None:
    """Of this run; None where there is nothing that can be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["run"] != run:
            return None
        key = RandomKey(bytes.fromhex(told["key"]), False)
        given = str(told.get("order", "")), str(told.get("identities", ""))
        return _Kept(key, *given, str(told["records"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
