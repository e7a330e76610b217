"""Ledgers that another version wrote, whole and with digests that fit: what this one does not know
how to count is refused, never read as something that it knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attacks.ledgers import plan_of
from quietgrad.events import EventSequence, PoissonGaussian
from quietgrad.ledger import LedgerWriter, read_ledger
from quietgrad.ledger.chain import START, Count, CountWriter, count_path, create_count, encoded
from quietgrad.ledger.records import Mechanism, Release, SessionStart
from quietgrad.schedules import Course, StepSettings

EVENT = PoissonGaussian(1.1, 0.1, 1)
COURSE = Course(((3, StepSettings(1.1, 0.1, 1.0)), (3, StepSettings(2.2, 0.1, 1.0))))
PLAIN = Mechanism(EVENT, {"delta": 1e-5}).to_json()
WITH_COURSE = Mechanism(EVENT, {"delta": 1e-5}, COURSE).to_json()
SESSION = SessionStart(0, "a name", "0" * 32).to_json()
RELEASE = Release(0).to_json()


class Line:
    """What another version may write."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    def to_json(self) -> dict[str, Any]:
        return self.told


def write(path: Path, *lines: dict[str, Any]) -> None:
    chain, whole = START, b""
    for number, told in enumerate(lines, 1):
        line, chain = encoded(number, Line(told), chain)  # type: ignore[arg-type]
        whole += line
    path.write_bytes(whole)
    create_count(count_path(path))
    counting = CountWriter(count_path(path))
    counting.write(Count(len(lines), sum(told["type"] == "release" for told in lines), chain))
    counting.close()


FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "a later format": (PLAIN | {"format": 4}, "it is of format 4"),
    "an earlier one": (PLAIN | {"format": 1}, "it is of format 1"),
    "a course in a format without": (WITH_COURSE | {"format": 2}, "format 3 states its course"),
    "no course in a format with one": (PLAIN | {"format": 3}, "format 3 states its course"),
    "several mechanisms": (
        PLAIN | {"event": EventSequence((EVENT, PoissonGaussian(9.9, 0.1, 1))).to_json()},
        "holds one mechanism",
    ),
    "no format": ({k: v for k, v in PLAIN.items() if k != "format"}, "lacks a field"),
}
LATER: dict[str, tuple[dict[str, Any], str]] = {
    "roots of another source": (SESSION | {"source": "dice"}, "source 'dice' is unknown"),
    "a start without a seal": ({k: v for k, v in SESSION.items() if k != "seal"}, "lacks a field"),
    "a release without its number": ({"type": "release"}, "lacks a field"),
    "a release with half its settings": (
        RELEASE | {"settings": {"noise_multiplier": 9.9}},
        "lacks a field",
    ),
}


@pytest.mark.parametrize("name", [*FIRST, *LATER])
def test_what_this_version_cannot_count_is_refused(name: str, path: Path) -> None:
    told, message = (FIRST | LATER)[name]
    write(path, *((told, SESSION) if name in FIRST else (PLAIN, told)), RELEASE)
    before = path.read_bytes()
    for attempt in (
        lambda: read_ledger(path),
        lambda: LedgerWriter(path),
        lambda: plan_of().start(path),
    ):
        with pytest.raises(ValueError, match=f"damaged at line .*{message}"):
            attempt()
    assert path.read_bytes() == before


@pytest.mark.parametrize("first", [PLAIN, WITH_COURSE], ids=["plain", "a course"])
def test_what_this_version_wrote_is_read(first: dict[str, Any], path: Path) -> None:
    settings = {} if first is PLAIN else {"settings": COURSE.at(0).to_json()}
    write(path, first, SESSION, RELEASE | settings)
    assert read_ledger(path).releases == 1
