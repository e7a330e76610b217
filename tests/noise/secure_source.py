"""A secure source of a fixed key, and noise as it releases it.

Statistical tests of the secure source reject at FALSE_ALARM each; there are fewer than thirty of
them, so a right implementation fails one with probability below 3e-7. Seeds are fixed: it fails
always or never.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("cryptography")

from quietgrad.noise import SecureSource
from quietgrad.noise.sources.keystream import Keystream
from quietgrad.randomness import RandomKey

FALSE_ALARM = 1e-8
KEY = RandomKey.from_seed(11)
SOURCE = SecureSource()
STREAM = Keystream(bytes(range(32)))
SIGMA, CLIP = 1.7, 0.3


def correlated(one: np.ndarray, other: np.ndarray, comparisons: int) -> bool:
    cosine = float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
    return abs(cosine) * math.sqrt(len(one)) > stats.norm.isf(FALSE_ALARM / (2 * comparisons))
