"""The secret roots of a run's random streams, one a session, and the file that keeps them (or the
seed they follow from) while the run lasts.

Correlated noise goes on after a stop from draws that were made before it, so their roots have to be
kept. A root that is kept never draws a new step: every session draws with a fresh one, or a copied
or restored run directory would release two sums with the same noise. That holds with a seed too: a
session's root follows from the seed and the session's own random name. Only where the data were
declared public does a seed alone fix the root.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from quietgrad.durable import make_folder, temporary_of, write_whole
from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class Session:
    """One start of a run.

    Attributes:
        step: the first that it draws.
        name: public and random; the ledger holds it too, so that roots are not taken for those of
            other draws.
        root: secret.
        source: what the root follows from: "entropy", "seed" (and the name), or "public seed" (the
            seed alone).
    """

    step: int
    name: str
    root: RandomKey
    source: str = "entropy"


@dataclass(frozen=True)
class KeyRing:
    """Sessions in order, first steps not decreasing."""

    sessions: tuple[Session, ...] = ()

    def key_of(self, step: int) -> RandomKey:
        """The root that drew ``step``."""
        return next(session.root for session in reversed(self.sessions) if session.step <= step)

    def with_session(self, session: Session) -> KeyRing:
        """With a session that begins now. Those that drew nothing are dropped."""
        return KeyRing((*(old for old in self.sessions if old.step < session.step), session))


@dataclass(frozen=True)
class Secrets:
    """What the secret file of a run holds: a seed as it was given, if one was, and roots that
    follow from none.
    """

    seed: int | str | None = field(default=None, repr=False)
    ring: KeyRing = KeyRing()


def read_secrets(path: Path) -> Secrets:
    """What earlier sessions kept; nothing where there is no file.

    Raises:
        ValueError: if the file is damaged, no file, or one that others may read. The message holds
            nothing of its contents.
    """
    try:
        if not path.exists():
            return Secrets()
        if not path.is_file():
            raise ValueError(
                f"keys={str(path)!r} is no file; move what is there, and give the place of a file"
            )
        mode, text = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"keys={str(path)!r} cannot be read: {error.strerror or error}; go on as the user "
            "whose file it is"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"keys={str(path)!r} may be read or written by others than its owner, and who reads it "
            "can take the noise off; if nobody else did, run chmod 600 on it; "
            "if somebody may have, what was released so far must be taken as not private"
        )
    try:
        record = json.loads(text)
        seed, sessions = record["seed"], []
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | str)):
            raise TypeError("its seed is no seed")
        for line in record["sessions"]:
            sessions.append(
                Session(
                    int(line["step"]),
                    str(line["name"]),
                    RandomKey(bytes.fromhex(line["root"]), False),
                )
            )
        return Secrets(seed, KeyRing(tuple(sessions)))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"keys={str(path)!r} is damaged ({type(error).__name__}); remove it: the noise then "
            "begins a new block, as private as before"
        ) from None


def write_secrets(kept: Secrets, path: Path) -> None:
    """Writes the file whole, readable by its owner alone, and synced to disk before the call
    returns. Its folder is made where it is missing.

    Raises:
        ValueError: if it cannot be written.
    """
    lines = [
        {"step": s.step, "name": s.name, "root": s.root.root.hex()} for s in kept.ring.sessions
    ]
    told = json.dumps({"seed": kept.seed, "sessions": lines}, indent=1) + "\n"
    try:
        make_folder(path.parent)
        write_whole(path, told.encode(), secret=True)
    except OSError as error:
        raise ValueError(
            f"keys={str(path)!r} cannot be written: {error.strerror or error}; make room on the "
            "disk, or use a directory that can be written; nothing was released by this start"
        ) from error


def rows_path(keys: Path) -> Path:
    """Beside the secret file: the last rows of correlated noise, as secret."""
    return keys.with_name(keys.name + ".rows")


def places_path(keys: Path) -> Path:
    """Beside the secret file: a digest of some records, as secret."""
    return keys.with_name(keys.name + ".places")


def secret_files(keys: Path) -> tuple[Path, ...]:
    """All that may lie there while a run lasts, and what a kill may leave of them."""
    whole = (keys, rows_path(keys), places_path(keys))
    return (*whole, *map(temporary_of, whole))


def forget_secrets(keys: Path) -> None:
    """Removes them."""
    for path in secret_files(keys):
        path.unlink(missing_ok=True)
