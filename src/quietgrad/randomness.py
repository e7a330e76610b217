"""Keyed random streams: every draw is named by (root key, purpose, step, parameter), so it depends
on nothing else.

Sampling, projections and noise never share a stream; how micro-batches were cut and how many
processes ran makes no difference. The root key comes from the operating system's entropy unless a
seed is given. Streams are Philox counters keyed by SHA-256 of the name: statistically sound and
unpredictable without the root key in practice, though Philox is not a cryptographic generator
(docs/privacy/assumptions.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import numpy as np

from quietgrad.checks import require_at_least, require_int

Purpose = Literal["sampling", "projection", "noise", "initialisation", "model", "seal", "user"]


@dataclass(frozen=True)
class RandomKey:
    """The root of all streams of a run. Secret: who knows it can subtract the noise.

    Attributes:
        root: 32 bytes.
        reproducible: whether it was made from a user's seed.
    """

    root: bytes = field(repr=False)
    reproducible: bool

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RandomKey is secret, and what draws with a copy of it draws the same noise: it is "
            "neither copied nor pickled; pass the object itself"
        )

    @classmethod
    def from_entropy(cls) -> RandomKey:
        """A fresh key from the operating system."""
        return cls(secrets.token_bytes(32), reproducible=False)

    @classmethod
    def from_seed(cls, seed: int, start: str = "") -> RandomKey:
        """A reproducible key: the privacy guarantee then holds only if the seed stays secret.

        Args:
            seed: secret where the data are private.
            start: public name of the start of a run that draws with this key. With a name that is
                random, no two starts draw the same numbers, whatever their seeds.

        Raises:
            TypeError, ValueError: if the seed is not a whole number of at least 0.
        """
        require_int("seed", seed)
        require_at_least("seed", seed, 0, "use a whole number of at least 0")
        text = f"quietgrad seed {seed}" + (f" start {start}" if start else "")
        return cls(hashlib.sha256(text.encode()).digest(), reproducible=True)

    def seal(self) -> str:
        """128 bits that tell this root from any other, and say nothing of it to who cannot guess
        it: 32 hexadecimal digits.
        """
        return "".join(f"{word:016x}" for word in self.words("seal", 0))

    def words(self, purpose: Purpose, step: int, name: str = "") -> tuple[int, int]:
        """128 bits that name one stream, as two unsigned 64-bit words."""
        label = f"{purpose}\x00{step}\x00{name}".encode()
        digest = hashlib.sha256(self.root + label).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")

    def stream_key(self, purpose: Purpose, step: int, name: str = "") -> bytes:
        """32 bytes that name one stream of a cryptographic cipher: HMAC-SHA256 of the name under
        the whole root, apart from ``words`` by its prefix.
        """
        label = f"stream key\x00{purpose}\x00{step}\x00{name}".encode()
        return hmac.digest(self.root, label, "sha256")

    def generator(self, purpose: Purpose, step: int, name: str = "") -> np.random.Generator:
        """A numpy generator at the start of one stream."""
        return np.random.Generator(
            np.random.Philox(key=np.array(self.words(purpose, step, name), dtype=np.uint64))
        )
