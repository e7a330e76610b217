"""Earlier runs whose weights a run began with, as records say them: for records of both, the
epsilons and deltas add, and the run's own epsilon does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WITHOUT_PRIVACY, EPSILONS_ADD = "trained-without-privacy", "epsilons-add"
STARTS = (WITHOUT_PRIVACY, EPSILONS_ADD)
RUN = "run"  # in a record: the name of the run that it is of, as in its ledger
# Of all sessions on public records whose seed alone fixes the root: it tells none from the others.
PUBLIC_NAME = "public"

_SAID = {
    WITHOUT_PRIVACY: "started from weights that were trained without privacy: epsilon covers "
    "no record that those have seen",
    EPSILONS_ADD: "started from weights of a private run: for records of both runs their "
    "epsilons and deltas add",
}


def starts_of(record: Mapping[str, Any]) -> set[str]:
    """The names under which a start from such an output has to be asked for; none where all data
    were declared public.
    """
    found = set().union(*(starts_of(earlier) for earlier in record.get("started_from", ())))
    if not record.get("data_declared_public"):
        found.add(EPSILONS_ADD if record.get("private") else WITHOUT_PRIVACY)
    return found


def start_warnings(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a result has to say of its start."""
    kinds = set().union(*(starts_of(record) for record in records))
    return [_SAID[kind] for kind in STARTS if kind in kinds]


def tells_of(record: Mapping[str, Any], run: str, releases: int) -> bool:
    """Whether a record, or what its run began with, is of that run, with so many releases."""
    if (
        run not in ("", PUBLIC_NAME)
        and record.get(RUN) == run
        and int(record.get("steps", 0)) >= releases
    ):
        return True
    return any(tells_of(one, run, releases) for one in record.get("started_from", ()))


def told_starts(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """For a result or a line of JSON; empty where the weights were nobody's."""
    found = [dict(record) for record in records]
    if not found:
        return {}
    return {"started_from": found, "start_warnings": start_warnings(found)}


def start_row(told: Mapping[str, Any]) -> dict[str, str]:
    """The same as a row of a table; none where there is nothing to say."""
    lines = told.get("start_warnings", ())
    return {"start": "\n".join(lines)} if lines else {}
