"""Keys by counter instead of entropy: what the audits' tests find is the same on every run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from quietgrad.noise.mechanism import GaussianNoise
from quietgrad.randomness import RandomKey


@pytest.fixture(autouse=True)
def keys_by_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()

    def from_counter() -> RandomKey:
        root = hashlib.sha256(b"tests of the audit %d" % next(numbers)).digest()
        return RandomKey(root, reproducible=False)

    monkeypatch.setattr(RandomKey, "from_entropy", staticmethod(from_counter))


@pytest.fixture
def break_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts ``broken(release, clipped, ...)`` in the place of the mechanism's own last step, below
    all checks of plan and run.
    """
    update = GaussianNoise.update

    def put(broken: Callable[..., Any]) -> None:
        def instead(self: GaussianNoise, clipped: Any, keys: Any, history: Any, *_: Any) -> Any:
            def release(total: Any, step: int = history.step) -> Any:
                return update(self, total, keys, self.init(step))[0]

            return broken(release, clipped, history.step), self.init(history.step + 1)

        monkeypatch.setattr(GaussianNoise, "update", instead)

    return put
