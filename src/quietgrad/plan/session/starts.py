"""Starts of a run: every one draws with a root of its own, and correlated noise goes on where the
roots of its earlier draws can be had.

With a seed the root of a start follows from the seed and the start's random name, which the ledger
holds. So no start, resume, copy or restored backup can draw the noise of another again, whatever
its seed; who has the seed and the ledger can make all draws again. Only where the data were
declared public does the seed alone fix the root, and a run is the same at every start.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quietgrad.durable import temporary_of
from quietgrad.keyring import (
    KeyRing,
    Secrets,
    Session,
    read_secrets,
    secret_files,
    write_secrets,
)
from quietgrad.ledger import LedgerContents, LedgerWriter, SessionStart
from quietgrad.ledger.chain import count_path
from quietgrad.ledger.earlier import PUBLIC_NAME
from quietgrad.plan.seeds import Seed, key_of_seed
from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class Begun:
    """What a run starts with.

    Attributes:
        ring: roots by step; the last is this session's.
        block: first step of the block of correlated noise that goes on or begins here.
        drawn: how that block's noise was drawn so far.
    """

    ring: KeyRing
    block: int = 0
    drawn: str | None = None


def new_session(step: int, seed: Seed | None, data_are_public: bool) -> Session:
    """A session that begins now."""
    if seed is None:
        return Session(step, secrets.token_hex(16), RandomKey.from_entropy())
    if data_are_public:
        return Session(step, PUBLIC_NAME, key_of_seed(seed), "public seed")
    name = secrets.token_hex(16)
    return Session(step, name, key_of_seed(seed, name), "seed")


def begin_session(
    session: Session,
    writer: LedgerWriter,
    contents: LedgerContents,
    seed: Seed | None,
    keys: Path | None,
    digest: str | None,
) -> Begun:
    """Writes down a session: in the secret file what has to be kept of it, in the ledger its name
    and seal.

    Args:
        session: from ``new_session``.
        writer, contents: of the run's ledger.
        seed: of the run.
        keys: the secret file; None keeps nothing.
        digest: of the mixing matrix of correlated noise; None where noise is independent.
    """
    secret_seed = seed if session.source == "seed" else None
    if digest is None:
        if keys is not None and secret_seed is not None:
            write_secrets(Secrets(secret_seed), keys)
        writer.session(start_of(session))
        return Begun(KeyRing((session,)))
    # Roots that a ledger without releases knows nothing of are another run's.
    kept = read_secrets(keys) if keys is not None and contents.releases else Secrets()
    earlier = roots_of_block(contents, digest, kept, seed)
    ring = (KeyRing() if earlier is None else earlier).with_session(session)
    if keys is not None and session.source != "public seed":
        write_secrets(
            Secrets(secret_seed, KeyRing(tuple(s for s in ring.sessions if s.source == "entropy"))),
            keys,
        )
    writer.session(start_of(session))
    if earlier is None or contents.noise_block is None:
        writer.noise_block(session.step, digest)
        return Begun(ring, session.step)
    return Begun(ring, contents.noise_block[0], contents.noise_drawn)


def roots_of_block(
    contents: LedgerContents, digest: str, kept: Secrets, seed: Seed | None
) -> KeyRing | None:
    """The roots that drew the block so far; None where there is none, it is of another matrix, or a
    root is lost.

    A root counts only if its seal is the recorded one: another seed, or an older secret file, would
    make other numbers than those that were drawn.
    """
    if contents.noise_block is None or contents.noise_block[1] != digest:
        return None
    known = []
    for start in drew(contents.sessions, contents.noise_block[0], contents.releases):
        root = _root_of(start, kept, seed)
        if root is None or root.seal() != start.seal:
            return None
        known.append(Session(start.step, start.name, root, start.source))
    return KeyRing(tuple(known))


def require_apart(keys: Path, ledger: Path) -> None:
    """Before any work: secret files are written whole, and would replace the ledger or its count.

    Raises:
        ValueError: where one of them is the ledger's, by any name.
    """
    counts = count_path(ledger)
    kept = {_place(path) for path in (ledger, counts, temporary_of(counts))}
    if any(_place(path) in kept for path in secret_files(keys)):
        raise ValueError(
            f"keys={str(keys)!r} and ledger={str(ledger)!r} lead to one file, or to one that the "
            "other keeps beside it, and the secrets would be written over the ledger; give keys= "
            "a file of its own, such as secrets.json"
        )


def _place(path: Path) -> tuple[int, int] | str:
    """One for all names of a file, hard links too."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


Start = TypeVar("Start", Session, SessionStart)


def drew(starts: tuple[Start, ...], since: int, until: int) -> tuple[Start, ...]:
    """The starts that drew steps ``since`` to ``until - 1``, in order."""
    after = [*(start.step for start in starts[1:]), until]
    return tuple(
        start
        for start, end in zip(starts, after, strict=False)
        if max(start.step, since) < min(end, until)
    )


def start_of(session: Session) -> SessionStart:
    """The public part of a session."""
    return SessionStart(session.step, session.name, session.root.seal(), session.source)


def _root_of(start: SessionStart, kept: Secrets, seed: Seed | None) -> RandomKey | None:
    if start.source == "entropy":
        return next(
            (session.root for session in kept.ring.sessions if session.name == start.name), None
        )
    given = kept.seed if seed is None else seed
    if given is None:
        return None
    return key_of_seed(given, start.name if start.source == "seed" else "")
