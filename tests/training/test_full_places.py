"""Files that do not fit where they shall go: none is left that looks whole, and the same command
writes it once there is room.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import train

Run = Callable[..., tuple[int, str, str]]


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file grows beyond some hundred bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "command",
    [
        ("predict", "table.csv", "--output", "found.csv"),
        ("export", "-o", "model.pt2"),
        ("report", "--card", "card.md"),
        ("report", "--html", "page.html"),
    ],
    ids=lambda command: command[-1],
)
def test_what_does_not_fit_leaves_nothing(
    command: tuple[str, ...],
    quietgrad: Run,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: a part of the predictions, of the model or of the card, under its name."""
    table = {
        "model.name": "table:linear",
        "model.tune": "full",
        "data.source": str(tmp_path / "table.csv"),
        "training.expected_batch_size": 10,
        "training.steps": 2,
    }
    for of_texts in ("model.lora_rank", "model.max_length", "data.text"):
        settings.pop(of_texts, None)
    rows = "".join(f"{i},{'rgb'[i % 3]},{'xy'[i % 2]}\n" for i in range(120))
    (tmp_path / "table.csv").write_text("size,colour,label\n" + rows)
    run_dir = train(settings | table)[2].path
    monkeypatch.chdir(tmp_path)
    name, *arguments = command
    before = set(tmp_path.iterdir())
    with no_room():
        code, _, err = quietgrad(name, run_dir, *arguments)
    assert code == 1 and err.count("\n") == 1 and err.startswith("error: ")
    assert set(tmp_path.iterdir()) == before
    assert quietgrad(name, run_dir, *arguments)[0] == 0
    assert (tmp_path / command[-1]).stat().st_size > 200
