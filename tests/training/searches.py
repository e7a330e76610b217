"""Bounds of settings and studies, for the tests of searches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from quietgrad.comparing.search import RATE, Range, SearchTable, Settings, propose

ROOT = Path(__file__).resolve().parents[2]
LEARNING_RATE = Range(RATE, 1e-4, 1.0, log=True)
NORM = Range("privacy.max_grad_norm", 0.1, 10.0, log=True)
BANDS = Range("noise.bands", 1, 20, variants=("banded",))
METHOD = Range("denoising.method", choices=("none", "persistent", "published"))
EVERYTHING = (LEARNING_RATE, NORM, METHOD, BANDS)


def table(*ranges: Range, **settings: int) -> SearchTable:
    return SearchTable(**({"trials": 25} | settings), ranges=ranges)


def study(searched: SearchTable, variant: str, value: Callable[[dict], float], count: int) -> list:
    """``count`` trials, one after another."""
    trials: list[tuple[Settings, float]] = []
    for _ in range(count):
        proposed = propose(searched, variant, trials)
        trials.append((proposed, value(dict(proposed))))
    return trials


def peak(found: dict) -> float:
    """Best at a learning rate of 0.03."""
    return -(math.log(found[RATE] / 0.03) ** 2)


RATES = '[search.ranges."optimizer.learning_rate"]\nlow = 0.01\nhigh = 1.0\nlog = true'
NORMS = '[search.ranges."privacy.max_grad_norm"]\nlow = 0.1\nhigh = 10.0\nlog = true'
ONE_METHOD = '[search.ranges."denoising.kappa"]\nlow = 1.0\nhigh = 3.0\nvariants = ["denoised"]'
