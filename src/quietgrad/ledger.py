"""The ledger: an append-only file of what was released, each line on disk before its noise is drawn.

One JSON object per line. A ``mechanism`` line states the facts of a mechanism (a privacy event of one step), a ``release`` line says that one
noisy sum of it is about to exist. Nothing private is ever written: no batch size, loss, norm or clipping rate.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quietgrad.facts import EventSequence, PoissonGaussian, PrivacyEvent, event_from_json

LEDGER_NAME = "ledger.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class LedgerContents:
    """What a ledger says.

    Attributes:
        event: all releases so far as one privacy event; None if there was none.
        releases: number of noisy sums released, a torn last line counted as one.
        header: the last mechanism line: facts such as dataset size and target delta.
        noise_block: for correlated noise, the step at which the last block began and the digest of its mixing matrix.
        noise_sessions: first step and public name of every session that drew from that block.
        noise_drawn: how that block's noise is drawn: dtype, library and device; None before its first release.
        not_private: why the run gave up privacy (``PrivateRun.give_up_privacy``): no epsilon covers it; None for any other.
    """

    event: PrivacyEvent | None
    releases: int
    header: dict[str, Any]
    noise_block: tuple[int, str] | None = None
    noise_sessions: tuple[tuple[int, str], ...] = ()
    noise_drawn: str | None = None
    not_private: str | None = None


def ledger_path(path: str | Path) -> Path:
    """The ledger file of a run directory (or the file itself)."""
    given = Path(path)
    return given / LEDGER_NAME if given.is_dir() else given


def read_ledger(path: str | Path) -> LedgerContents:
    """Reads a ledger back.

    Args:
        path: a run directory or a ledger file.

    Raises:
        ValueError: if there is none, or a line other than the last is damaged.
    """
    file = ledger_path(path)
    if not file.is_file():
        raise ValueError(
            f"ledger={str(path)!r}: no ledger there; pass a run directory that holds {LEDGER_NAME}, or that file"
        )
    phases: list[PoissonGaussian] = []
    counts: list[int] = []
    header: dict[str, Any] = {}
    block: tuple[int, str] | None = None
    sessions: list[tuple[int, str]] = []
    drawn: str | None = None
    given_up: str | None = None
    lines = file.read_bytes().split(b"\n")
    complete, torn = lines[:-1], lines[-1]
    for number, line in enumerate(complete, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind = record["type"]
            if kind == "mechanism":
                stated = event_from_json(record["event"])
                if not isinstance(stated, PoissonGaussian):
                    raise ValueError("a mechanism line holds one mechanism")
                phases.append(stated)
                counts.append(0)
                header = record
            elif kind == "release":
                counts[-1] += 1
            elif kind == "noise-block":
                block, sessions, drawn = (int(record["step"]), str(record["mixing"])), [], None
            elif kind == "noise-session":
                sessions.append((int(record["step"]), str(record["name"])))
            elif kind == "noise-drawn":
                drawn = str(record["as"])
            elif kind == "not-private":
                given_up = str(record["reason"])
            else:
                raise ValueError(f"type {kind!r} is unknown to this version, which cannot count it")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"ledger={str(file)!r} is damaged at line {number}: {error}; restore it, nothing can be claimed without it"
            ) from error
    if torn.strip() and counts:
        counts[-1] += 1  # a release whose line was cut off: counted, because its noise may exist
    spent = tuple(p.after(n) for p, n in zip(phases, counts, strict=True) if n)
    total = sum(counts)
    event: PrivacyEvent | None = None
    if spent:
        event = spent[0] if len(spent) == 1 else EventSequence(spent)
    return LedgerContents(event, total, header, block, tuple(sessions), drawn, given_up)


class LedgerWriter:
    """Appends to a ledger; every line is flushed and synced to disk before the call returns.

    Use as a context manager, or call ``close``. One process at a time may hold a ledger.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "ab")  # noqa: SIM115 - held open for the life of the writer
        try:
            _lock(self._file, self._path)
        except ValueError:
            self._file.close()
            raise
        self._end_torn_line()

    def mechanism(self, event: PoissonGaussian, **facts: Any) -> None:
        """States the mechanism of the releases that follow; ``facts`` are public facts worth keeping beside it."""
        self._append(
            {"type": "mechanism", "format": FORMAT, "event": replace(event, steps=event.bands).to_json(), **facts}
        )

    def noise_block(self, step: int, mixing: str) -> None:
        """Says that noise correlated by the matrix of digest ``mixing`` refers to no release before ``step``."""
        self._append({"type": "noise-block", "step": step, "mixing": mixing})

    def noise_session(self, step: int, name: str) -> None:
        """Says that the draws from ``step`` on have roots of their own, known under ``name`` to those who keep them."""
        self._append({"type": "noise-session", "step": step, "name": name})

    def noise_drawn(self, how: str) -> None:
        """Says how the block's noise is drawn: with another dtype, library or device the same keys give other numbers."""
        self._append({"type": "noise-drawn", "as": how})

    def release(self, step: int) -> None:
        """Says that release number ``step`` is about to be made."""
        self._append({"type": "release", "step": step})

    def not_private(self, reason: str) -> None:
        """Says that values which no noise covers are looked at from here on: the run has no epsilon."""
        self._append({"type": "not-private", "reason": reason})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _end_torn_line(self) -> None:
        if self._path.stat().st_size == 0:
            return
        with open(self._path, "rb") as existing:
            existing.seek(0)
            last = existing.read().split(b"\n")[-1]
        if last.strip():
            # The torn line stays counted: it becomes a complete release line of unknown number.
            with open(self._path, "r+b") as repaired:
                repaired.seek(-len(last), os.SEEK_END)
                repaired.truncate()
            self._append({"type": "release", "step": None, "note": "line was cut off; counted"})


def _lock(file: Any, path: Path) -> None:
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"ledger={str(path)!r} is being written by another process; wait for it or use another run directory"
            ) from error
