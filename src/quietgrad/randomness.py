"""Keyed random streams: every draw is named by (root key, purpose, step, parameter), so it depends on nothing else.

Sampling, projections and noise never share a stream; how micro-batches were cut and how many processes ran makes no difference. The root key comes
from the operating system's entropy unless a seed is given. Streams are Philox counters keyed by SHA-256 of the name: statistically sound and
unpredictable without the root key in practice, though Philox is not a cryptographic generator (docs/privacy.md, "Assumptions").
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from quietgrad.checks import require_at_least, require_int

Purpose = Literal["sampling", "projection", "noise", "initialisation"]


@dataclass(frozen=True)
class RandomKey:
    """The root of all streams of a run. Secret: who knows it can subtract the noise.

    Attributes:
        root: 32 bytes.
        reproducible: whether it was made from a user's seed.
    """

    root: bytes = field(repr=False)
    reproducible: bool

    @classmethod
    def from_entropy(cls) -> RandomKey:
        """A fresh key from the operating system."""
        return cls(secrets.token_bytes(32), reproducible=False)

    @classmethod
    def from_seed(cls, seed: int) -> RandomKey:
        """A reproducible key: the privacy guarantee then holds only if the seed stays secret and serves one run on the data.

        Raises:
            TypeError, ValueError: if the seed is not a whole number of at least 0.
        """
        require_int("seed", seed)
        require_at_least("seed", seed, 0, "use a whole number of at least 0")
        return cls(hashlib.sha256(b"quietgrad seed " + str(seed).encode()).digest(), reproducible=True)

    def words(self, purpose: Purpose, step: int, name: str = "") -> tuple[int, int]:
        """128 bits that name one stream, as two unsigned 64-bit words."""
        label = f"{purpose}\x00{step}\x00{name}".encode()
        digest = hashlib.sha256(self.root + label).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")

    def generator(self, purpose: Purpose, step: int, name: str = "") -> np.random.Generator:
        """A numpy generator at the start of one stream."""
        return np.random.Generator(np.random.Philox(key=np.array(self.words(purpose, step, name), dtype=np.uint64)))
