"""What tests of noise share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quietgrad.noise.correlation import mixing, solver

TICK = 0.005  # seconds between two looks at the clock, as long as many an evaluation takes


@pytest.fixture(autouse=True)
def a_clock_that_counts_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for a mixing matrix end after so many evaluations, not seconds: a busy machine would
    find worse ones.
    """
    looks = [0]

    def monotonic() -> float:
        looks[0] += 1
        return looks[0] * TICK

    for module in (mixing, solver):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
