"""A path for a ledger, and a process that used no seed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quietgrad.plan import seeds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets which seeds this process used, as another process, which never knew, would."""

    def forget() -> None:
        monkeypatch.setattr(seeds, "_uses", {})

    forget()
    return forget
