"""Files that do not fit where they shall go: none is left that looks whole, and the same command
writes it once there is room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import train

from quietgrad.ledger import read_ledger
from quietgrad.training.files.run_dir import RunDir

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
        ("init", "-o", "new.toml"),
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
    """Before: a part of the predictions, of the model or of the card, under its name; of ``init``
    an empty file, which is the configuration of the demo.
    """
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
    of = tmp_path / "table.csv" if name == "init" else run_dir
    before = set(tmp_path.iterdir())
    with no_room():
        code, _, err = quietgrad(name, of, *arguments)
    assert code == 1 and err.count("\n") == 1 and err.startswith("error: ")
    assert set(tmp_path.iterdir()) == before
    assert quietgrad(name, of, *arguments)[0] == 0
    assert (tmp_path / command[-1]).stat().st_size > 200


@pytest.mark.parametrize(
    "command",
    [
        ("audit", "people.toml", "--figure", "shut/audit.png"),
        ("predict", "runs/first", "people.csv", "--output", "shut/found.csv"),
        ("export", "runs/first", "--output", "shut/model.pt2"),
    ],
    ids=lambda command: command[0],
)
def test_a_folder_that_is_shut_is_told_before_any_work(
    command: tuple[str, ...], quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: an audit trained first."""
    monkeypatch.chdir(tmp_path)
    Path("shut").mkdir()
    Path("people.toml").write_text("[training]\nsteps = 2\n")
    asked, shut = os.access, tmp_path / "shut"  # root may write where others may not
    monkeypatch.setattr(os, "access", lambda path, *how: path != shut and asked(path, *how))
    code, _, err = quietgrad(*command)
    assert code == 2 and err.count("\n") == 1
    assert f"{command[-2]}={command[-1]!r}: its folder cannot be written to" in err


def test_a_model_that_does_not_fit_ends_in_how_to_go_on(
    quietgrad: Run,
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: "OSError: No space left on device", after the last step, and no word of the run."""

    def full(self: RunDir) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = write_config(settings | {"training.steps": 2})
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "new_model", full)
        code, _, err = quietgrad("train", config)
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("error: OSError: [Errno 28] No space left on device; ")
    assert "Go on with: quietgrad train --resume" in last
    assert quietgrad("train", config, "--resume")[0] == 0
    assert read_ledger(settings["training.run_dir"]).releases == 2


def test_ctrl_c_while_commands_are_loaded_is_one_line(tmp_path: Path) -> None:
    """Before: a traceback, of whatever was being imported."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-c", "from quietgrad.cli import main; main()"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _paths(tmp_path)}
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def _paths(first: Path) -> str:
    return os.pathsep.join([str(first), *sys.path])
