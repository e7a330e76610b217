"""Whether records lie where they lay when the run began.

With correlated noise and records that are known by their numbers, a record's number decides its
part, and so which steps it may take part in. Records in another order, such as those of a shuffle
without a seed, have other parts: a record would take part twice within a round, in rows that the
matrix correlates, and epsilon counts one.

So the first loader of a run keeps a digest of some records, at places that a random key draws; both
lie beside the secret file and go with it. Later loaders compare. What is read differently each time
is not compared. A session that goes on without a secret file has nothing to compare with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quietgrad.distributed.alike import records_digest
from quietgrad.durable import write_whole
from quietgrad.keyring import places_path
from quietgrad.randomness import RandomKey


class Places:
    """Of one run.

    Args:
        run: its name, that of its first session.
        released: releases of earlier sessions. Before the first, records may lie as they like.
        keys: the secret file; None: nothing is kept, and loaders of one session are compared.
    """

    def __init__(self, run: str, released: int, keys: Path | None) -> None:
        self._run = run
        self._unknown = keys is None and released > 0
        self._path = None if keys is None else places_path(keys)
        self._known = None if self._path is None or not released else _read(self._path, run)

    def require(self, dataset: Any) -> None:
        """Compares some records of a loader's data set.

        Args:
            dataset: records by number. Private.

        Raises:
            ValueError: with the remedy; it names no record.
        """
        if self._unknown and self._known is None:
            raise ValueError(
                "keys=None: this run goes on, with this plan's correlated noise the number of a "
                "record decides in which steps it takes part (record_ids were not given), and "
                "nothing was kept that tells whether records lie where they lay; where they do, "
                "give plan.start(keys=PATH), else begin a new run, with "
                "PrivacyConfig.build(record_ids=) where the order may change"
            )
        key = RandomKey.from_entropy() if self._known is None else self._known[0]
        found, steady = records_digest(dataset, key)
        if not steady:
            return
        if self._known is None:
            self._known = key, found
            if self._path is not None:
                told = {"run": self._run, "key": key.root.hex(), "records": found}
                _write(self._path, json.dumps(told) + "\n")
        elif found != self._known[1]:
            read = ""
            if self._path is not None:
                read = (
                    "; where they are the same, and only read otherwise by now (another version "
                    f"of a library), remove {str(self._path)!r}"
                )
            raise ValueError(
                "dataset holds other records than before, or in another order, and with this "
                "plan's correlated noise the number of a record decides in which steps it takes "
                "part (record_ids were not given): it would take part in more of them than are "
                "accounted for; give the records of the first start in their order (a shuffle by "
                "its seed), or begin a new run, with PrivacyConfig.build(record_ids=) where the "
                f"order may change{read}"
            )


def _write(path: Path, told: str) -> None:
    try:
        write_whole(path, told.encode(), secret=True)
    except OSError as error:
        raise ValueError(
            f"{str(path)!r}, a secret file beside the run's keys=, cannot be written: "
            f"{error.strerror or error}; without it no later start could tell whether records lie "
            "where they lay: make room on the disk, then start again"
        ) from error


def _read(path: Path, run: str) -> tuple[RandomKey, str] | None:
    """Of this run; None where there is nothing that can be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["run"] != run:
            return None
        return RandomKey(bytes.fromhex(told["key"]), False), str(told["records"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
