"""Uniform bits from AES-256 in counter mode, at any place of a stream: block (level, index) is the
cipher's output for that counter.

The cipher is the package ``cryptography``'s, an extra of this one. Blocks differ from independent
uniform ones by their being distinct: among n blocks an advantage of at most n^2 / 2^129 (2^-79 for
the 2^25 blocks of a model of 67 million parameters).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BLOCK = 16  # bytes
MISSING = (
    "source='secure' needs the package 'cryptography', which is not installed; install the "
    "extra: pip install 'quietgrad[secure]' "
    "(or use source='keyed': docs/privacy/assumptions.md says what that assumes)"
)


def require_cipher() -> None:
    """Raises ValueError, with the extra's name, where the package is missing."""
    if importlib.util.find_spec("cryptography") is None:
        raise ValueError(MISSING)


@dataclass(frozen=True)
class Keystream:
    """One stream.

    Attributes:
        key: 32 bytes, secret.
    """

    key: bytes = field(repr=False)

    def words(self, level: int, start: int, count: int) -> Tensor:
        """[count, 2] int64: the blocks start .. start + count - 1 of a level, as two signed 64-bit
        words each.
        """
        ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers")
        counter = level.to_bytes(8, "big") + start.to_bytes(8, "big")
        cipher = ciphers.Cipher(
            ciphers.algorithms.AES(self.key), ciphers.modes.CTR(counter)
        ).encryptor()
        made = bytearray(BLOCK * count + BLOCK - 1)  # the size that update_into asks for
        cipher.update_into(bytes(BLOCK * count), made)
        words = torch.frombuffer(made, dtype=torch.int64, count=2 * count).view(count, 2)
        return words if sys.byteorder == "little" else torch.from_numpy(words.numpy().byteswap())

    def block(self, level: int, index: int) -> tuple[int, int]:
        """One block as two unsigned 64-bit words."""
        first, second = self.words(level, index, 1)[0].numpy().view(np.uint64)
        return int(first), int(second)
