"""The secret roots of a run's random streams, one a session, kept in a file while the run lasts.

Correlated noise goes on after a stop from draws that were made before it, so their roots have to be kept. A root that is kept never draws a new step: every session
draws with a fresh one, or a copied or restored run directory would release two sums with the same noise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class Session:
    """One start of a run.

    Attributes:
        step: the first that it draws.
        name: public and random; the ledger holds it too, so that roots are not taken for those of other draws.
        root: secret.
    """

    step: int
    name: str
    root: RandomKey


@dataclass(frozen=True)
class KeyRing:
    """Sessions in order, first steps not decreasing."""

    sessions: tuple[Session, ...]

    def key_of(self, step: int) -> RandomKey:
        """The root that drew ``step``."""
        return next(session.root for session in reversed(self.sessions) if session.step <= step)

    def covers(self, recorded: Iterable[tuple[int, str]]) -> bool:
        """Whether the roots of all recorded sessions, (first step, name), are here. One that drew nothing is not asked for."""
        in_order = list(recorded)
        drew = [session for session, after in pairwise(in_order) if after[0] > session[0]] + in_order[-1:]
        return set(drew) <= {(session.step, session.name) for session in self.sessions}

    def with_session(self, session: Session) -> KeyRing:
        """With a session that begins now. Those that drew nothing are dropped."""
        return KeyRing((*(old for old in self.sessions if old.step < session.step), session))


def read_ring(path: Path) -> KeyRing:
    """Roots of earlier sessions; none where there is no file.

    Raises:
        ValueError: if the file is damaged.
    """
    if not path.exists():
        return KeyRing(())
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return KeyRing(
            tuple(Session(int(x["step"]), str(x["name"]), RandomKey(bytes.fromhex(x["root"]), False)) for x in lines)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"keys={str(path)!r} is damaged: {error}; remove it: the noise then begins a new block, as private as before"
        ) from error


def write_ring(ring: KeyRing, path: Path) -> None:
    """Writes the file whole, readable by its owner alone, and synced to disk before the call returns."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"step": s.step, "name": s.name, "root": s.root.root.hex()}) + "\n" for s in ring.sessions
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the new name, too, has to outlast a power cut
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
