"""The secret roots of a run's random streams, one a session, kept in a file while the run lasts.

Correlated noise goes on after a stop from draws that were made before it, so their roots have to be kept. A root that is kept never draws a new step: every session
draws with a fresh one, or a copied or restored run directory would release two sums with the same noise.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class KeyRing:
    """Sessions in order: the first step that each drew, and its root.

    Attributes:
        sessions: (first step, root), first steps not decreasing.
    """

    sessions: tuple[tuple[int, RandomKey], ...]

    def key_of(self, step: int) -> RandomKey:
        """The root that drew ``step``."""
        return next(key for first, key in reversed(self.sessions) if first <= step)

    def covers(self, step: int) -> bool:
        """Whether the root of ``step`` is known."""
        return bool(self.sessions) and self.sessions[0][0] <= step

    def with_session(self, step: int, key: RandomKey) -> KeyRing:
        """With a session that begins at ``step``. One that drew nothing is dropped."""
        return KeyRing((*((first, old) for first, old in self.sessions if first < step), (step, key)))


def read_ring(path: Path) -> KeyRing:
    """Roots of earlier sessions; none where there is no file.

    Raises:
        ValueError: if the file is damaged.
    """
    if not path.exists():
        return KeyRing(())
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return KeyRing(tuple((int(x["step"]), RandomKey(bytes.fromhex(x["root"]), False)) for x in lines))
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
        file.writelines(json.dumps({"step": step, "root": key.root.hex()}) + "\n" for step, key in ring.sessions)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
