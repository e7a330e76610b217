"""The operating system's entropy, replaced for one test by a stream of the test's own name.

A test whose run draws its batches, keys or canaries from entropy would find something else every
time, and fail once in a few hundred runs for a reason that nobody can repeat. The stream is not a
constant: two draws differ, as two keys must. A campaign (``make test-random``) and a test marked
``entropy`` read the real source.
"""

from __future__ import annotations

import os
import random
import secrets

REAL = (secrets.token_bytes, secrets.randbits, secrets.randbelow, random.SystemRandom)
NAMES: list[str | None] = [None]  # of the stream that is read; None: the operating system
OF_CHILD: list[str | None] = [None]  # the stream of the process that is about to be forked


def from_name(name: str) -> None:
    """From now on everything that asks for entropy is answered from the stream of this name."""
    stream = random.Random(name)

    def token_bytes(nbytes: int | None = None) -> bytes:
        return stream.randbytes(secrets.DEFAULT_ENTROPY if nbytes is None else nbytes)

    NAMES[0] = name
    secrets.token_bytes = token_bytes  # token_hex and token_urlsafe ask for it by name
    secrets.randbits = stream.getrandbits
    secrets.randbelow = stream.randrange
    setattr(random, "SystemRandom", lambda: random.Random(stream.getrandbits(256)))  # noqa: B010


def from_system() -> None:
    NAMES[0] = None
    secrets.token_bytes, secrets.randbits, secrets.randbelow = REAL[:3]
    setattr(random, "SystemRandom", REAL[3])  # noqa: B010


def _before_a_fork() -> None:
    """Forked processes that went on with one stream would draw the same: each has one of its own,
    and the second fork of a test another than the first.
    """
    OF_CHILD[0] = None if NAMES[0] is None else secrets.token_hex(16)


def _in_a_fork() -> None:
    if OF_CHILD[0] is not None:
        from_name(OF_CHILD[0])


os.register_at_fork(before=_before_a_fork, after_in_child=_in_a_fork)
