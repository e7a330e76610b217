"""Secret files that cannot be written or read, or that would be written over the ledger: a start
says so, and costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from somebody_else import kept_from, needs_users
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.durable import temporary_of
from quietgrad.keyring import forget_secrets, places_path, read_secrets, rows_path
from quietgrad.ledger import read_ledger
from quietgrad.ledger.chain import count_path
from quietgrad.noise import BandedNoise, IndependentNoise

CONFIG = PrivacyConfig(
    noise_multiplier=1.0, expected_batch_size=8, steps=4, noise=BandedNoise(bands=2)
)
RECORDS = [(torch.ones(2) * i, i % 2) for i in range(32)]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def released(ledger: Path, keys: Path) -> int:
    with CONFIG.build(len(RECORDS)).start(ledger, keys) as run:
        model = nn.Linear(2, 2)
        for batch in run.loader(RECORDS, steps=2):
            run.backward(model, loss, batch)
        return run.released


def test_the_folder_of_the_keys_is_made(tmp_path: Path) -> None:
    # Before: FileNotFoundError, after the ledger was begun.
    keys = tmp_path / "secret" / "of this run" / "keys.json"
    assert released(tmp_path / "ledger.jsonl", keys) == 2
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600


def test_keys_that_cannot_be_written_are_named_and_nothing_is_counted(tmp_path: Path) -> None:
    # Before: NotADirectoryError, with the name of a temporary file and no remedy.
    ledger, file = tmp_path / "ledger.jsonl", tmp_path / "file"
    file.write_text("of somebody else")
    with pytest.raises(ValueError, match=r"keys=.*cannot be written.*nothing was released"):
        released(ledger, file / "keys.json")
    assert read_ledger(ledger).releases == 0
    assert released(ledger, tmp_path / "keys.json") == 2


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    ledger, keys = tmp_path / "ledger.jsonl", tmp_path / "keys.json"
    in_the_way = places_path(keys)
    (in_the_way / "of somebody else").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"keys\.json\.places.*cannot be written.*start again"):
        released(ledger, keys)
    (in_the_way / "of somebody else").rmdir()
    in_the_way.rmdir()
    assert released(ledger, keys) == 2


def test_they_stay_together_where_a_script_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: what tells whether records lie where they lay was written elsewhere, and a resume
    with shuffled records was taken.
    """
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path)
    with CONFIG.build(len(RECORDS)).start("ledger.jsonl", "keys.json") as run:
        monkeypatch.chdir(tmp_path / "outputs")
        for batch in run.loader(RECORDS, steps=2):
            run.backward(nn.Linear(2, 2), loss, batch)
        run.keep_noise()
    assert not list((tmp_path / "outputs").iterdir())
    keys = tmp_path / "keys.json"
    assert rows_path(keys).exists() and places_path(keys).exists()


def test_rows_that_cannot_be_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: on a full disk an error of torch's, of places in an archive."""

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1216")

    ledger, keys = tmp_path / "ledger.jsonl", tmp_path / "keys.json"
    with CONFIG.build(len(RECORDS)).start(ledger, keys) as run:
        for i, batch in enumerate(run.loader(RECORDS, steps=2)):
            run.backward(nn.Linear(2, 2), loss, batch)
            with monkeypatch.context() as patched, contextlib.ExitStack() as stack:
                if not i:
                    patched.setattr(torch, "save", full)
                    told = r"keys\.json\.rows'.*disk may be full.*may go on without"
                    stack.enter_context(pytest.raises(RuntimeError, match=told))
                run.keep_noise()
    assert read_ledger(ledger).releases == 2 and rows_path(keys).exists()


@pytest.mark.parametrize("name", ["ledger", "keys"])
def test_places_that_lead_elsewhere_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a folder of the name ~ below the current one; an error of pathlib."""
    monkeypatch.chdir(tmp_path)
    plan = CONFIG.build(len(RECORDS))
    home = os.path.expanduser("~/run/file")
    for place, said in {
        "~/run/file": f"begins with ~.*{home}",
        "": "no file",
        ".": "no file",
    }.items():
        with pytest.raises(ValueError, match=f"{name}='{place}'.*{said}"):
            plan.start(**{"ledger": "ledger.jsonl", name: place})
    assert not list(tmp_path.iterdir())
    plan.start(tmp_path / "~" / "ledger", tmp_path / "~keys").close()  # a folder of that name


@pytest.mark.parametrize("of", ["ledger", "count", "next count", "link", "hard link", "rows"])
@pytest.mark.parametrize("banded", [True, False], ids=["banded", "independent"])
def test_secrets_are_not_written_over_the_ledger(of: str, banded: bool, tmp_path: Path) -> None:
    # Before: at each start the secrets took the ledger's place, or its count's, for good.
    ledger = tmp_path / "ledger.jsonl"
    seed = None if banded else secrets.token_hex(16)
    noise = BandedNoise(bands=2) if banded else IndependentNoise()
    plan = replace(CONFIG, noise=noise, seed=seed).build(len(RECORDS))
    places = {"ledger": ledger, "count": count_path(ledger), "rows": tmp_path / "ledger"}
    places["next count"] = temporary_of(count_path(ledger))
    keys = places.get(of, tmp_path / "keys.json")
    if of == "rows":  # of correlated noise: "ledger.rows" beside keys="ledger"
        ledger = rows_path(keys)
    with plan.start(ledger, tmp_path / "first.json") as run:
        for batch in run.loader(RECORDS, steps=2):
            run.backward(nn.Linear(2, 2), loss, batch)
    if of == "link":
        keys.symlink_to(ledger)
    elif of == "hard link":
        keys.hardlink_to(ledger)
    held = ledger.read_bytes(), count_path(ledger).read_bytes()
    with pytest.raises(ValueError, match=r"keys=.* and ledger=.*written over the ledger"):
        plan.start(ledger, keys)
    assert (ledger.read_bytes(), count_path(ledger).read_bytes()) == held
    assert read_ledger(ledger).releases == 2


@needs_users
def test_keys_of_somebody_else_are_named(tmp_path: Path) -> None:
    # Before: PermissionError, after the ledger's lock was taken, without a remedy.
    ledger, keys = tmp_path / "ledger.jsonl", tmp_path / "keys.json"
    assert released(ledger, keys) == 2
    with kept_from(keys), pytest.raises(ValueError, match=r"keys=.*cannot be read"):
        read_secrets(keys)
    assert released(ledger, keys) == 4


@needs_users
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_ledger_without_an_end_is_refused(kind: str, tmp_path: Path) -> None:
    # Before: /dev/full was read for ever, and so was a pipe.
    ledger = tmp_path / "pipe" if kind == "pipe" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(ledger)
    with pytest.raises(ValueError, match=r"ledger=.* is no file"):
        CONFIG.build(len(RECORDS)).start(ledger)


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602], ids=oct)
def test_keys_that_others_may_read_or_write_are_refused(mode: int, tmp_path: Path) -> None:
    """Who reads them can take the noise off, and who writes them chooses what is drawn."""
    ledger, keys = tmp_path / "ledger.jsonl", tmp_path / "keys.json"
    assert released(ledger, keys) == 2
    before = keys.read_bytes(), ledger.read_bytes()
    keys.chmod(mode)
    with pytest.raises(ValueError, match=r"read or written by others.*chmod 600"):
        released(ledger, keys)
    assert (keys.read_bytes(), ledger.read_bytes()) == before
    keys.chmod(0o600)
    assert released(ledger, keys) == 4


def test_what_a_kill_left_of_secrets_is_removed_with_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    for path in (keys, rows_path(keys), places_path(keys)):
        for left in (path, temporary_of(path)):
            left.write_text("secret")
    (tmp_path / "ledger.jsonl").write_text("{}")
    forget_secrets(keys)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]
