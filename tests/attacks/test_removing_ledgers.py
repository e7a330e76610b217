"""A ledger under which nothing was released goes, and no other: between the look and the removal
somebody else may open it and release.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.distributed.together import Together
from quietgrad.ledger import removing
from quietgrad.ledger.reader import scan
from quietgrad.training.files.noise_state import remove_unreleased, start_private
from quietgrad.training.files.run_dir import RunDir

PLAN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=5, steps=3).build(20)


def loss(model: Any, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch[:, :1], reduction="none").sum(dim=1)


def releases(run: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(20, 3)
    run.backward(model, loss, x[next(iter(run.batches()))])


def begun(folder: Path) -> RunDir:
    """A run that ended before its first release."""
    files = RunDir(folder)
    PLAN.start(files.ledger, files.secrets).close()
    return files


def test_a_run_without_a_release_leaves_nothing(tmp_path: Path) -> None:
    files = begun(tmp_path)
    remove_unreleased(files)
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_with_a_release_stays(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    with PLAN.start(files.ledger) as run:
        releases(run)
    remove_unreleased(files)
    assert scan(files.ledger).contents.releases == 1


def test_a_ledger_that_says_that_privacy_was_given_up_stays(tmp_path: Path) -> None:
    # No release is counted, and sums without noise may have been looked at.
    files = RunDir(tmp_path)
    with PLAN.start(files.ledger) as run:
        run.give_up_privacy("made-up numbers")
    remove_unreleased(files)
    assert scan(files.ledger).contents.not_private == "made-up numbers"


def test_a_ledger_that_another_run_has_opened_stays(tmp_path: Path) -> None:
    # Before: it was removed under the run that went on with it; where that had looked at its path
    # already, what it released next was counted in a file that nobody would find again.
    files = begun(tmp_path)
    with PLAN.start(files.ledger, files.secrets) as run:
        remove_unreleased(files)
        assert files.ledger.exists()
        releases(run)
    assert scan(files.ledger).contents.releases == 1


def test_nobody_opens_a_ledger_between_the_look_and_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path)

    def looking(path: Path) -> Any:
        found = scan(path)
        with pytest.raises(ValueError, match="is in use"):
            PLAN.start(files.ledger, files.secrets)
        return found

    monkeypatch.setattr(removing, "scan", looking)
    remove_unreleased(files)
    assert not files.ledger.exists()
    with PLAN.start(files.ledger) as run:  # a new one
        releases(run)


def test_a_start_that_opened_it_before_finds_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no lock, so it has the file open and looks at its name under the lock."""
    files = begun(tmp_path)
    real = removing.lock

    def lock_after_removal(*given: Any) -> None:
        remove_unreleased(files)
        real(*given)

    monkeypatch.setattr("quietgrad.ledger.writer.lock", lock_after_removal)
    with pytest.raises((ValueError, RuntimeError), match="is gone"):
        PLAN.start(files.ledger)


def test_a_ledger_that_took_its_place_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path)

    def lock_after_exchange(*_: Any) -> None:
        moved = files.ledger.rename(tmp_path / "moved")
        files.ledger.write_bytes(moved.read_bytes())

    monkeypatch.setattr(removing, "lock", lock_after_exchange)
    remove_unreleased(files)
    assert files.ledger.exists()


def test_without_its_lock_a_release_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path)
    monkeypatch.setattr(removing, "lock", lambda *_: None)
    run = PLAN.start(files.ledger)
    remove_unreleased(files)
    assert not files.ledger.exists()  # under the run that has it open
    run.close()


def test_a_start_that_cannot_say_what_it_begins_with_leaves_nothing_open(tmp_path: Path) -> None:
    files, unsaid = RunDir(tmp_path), {"private": True, "odd": object()}
    with pytest.raises(TypeError):
        start_private(PLAN, files, False, Together(), [unsaid])
    remove_unreleased(files)
    assert not files.ledger.exists()


@contextlib.contextmanager
def forked(work: Callable[[], None]) -> Iterator[None]:
    """A worker, with all that this process has open, lives inside; it has done its work."""
    context = multiprocessing.get_context("fork")
    done, ended = context.Event(), context.Event()

    def live() -> None:
        work()
        done.set()
        ended.wait(60)

    worker = context.Process(target=live)
    worker.start()
    try:
        assert done.wait(60)
        yield
    finally:
        ended.set()
        worker.join()


def test_workers_that_live_on_keep_no_lock(tmp_path: Path) -> None:
    # Before: a fit that failed in its first batch left a ledger, and a folder "in use", as long as
    # its workers lived, which is as long as a notebook shows the error.
    files = RunDir(tmp_path)
    with contextlib.ExitStack() as held:
        with files.locked(), PLAN.start(files.ledger, files.secrets):
            held.enter_context(forked(lambda: None))
        with files.locked():
            remove_unreleased(files)
        assert not files.ledger.exists()


def test_a_fork_that_closes_its_copies_gives_up_no_lock(tmp_path: Path) -> None:
    files, inside = RunDir(tmp_path), contextlib.ExitStack()
    with inside:
        inside.enter_context(files.locked())
        run = inside.enter_context(PLAN.start(files.ledger))
        assert run._writer is not None

        def close() -> None:
            run._writer.close()
            inside.close()

        with forked(close):
            with pytest.raises(ValueError, match="in use"), files.locked():
                pass
            remove_unreleased(files)
            assert files.ledger.exists()


@pytest.mark.parametrize("in_use", [False, True])
def test_where_open_files_keep_their_names(
    in_use: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows a file goes once it is closed, and not while anybody has it open."""
    files = begun(tmp_path)
    unlink = Path.unlink

    def not_in_use(path: Path, missing_ok: bool = False) -> None:
        if in_use and path == files.ledger:
            raise PermissionError(13, "in use", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(removing, "WHILE_OPEN", False)
    monkeypatch.setattr(Path, "unlink", not_in_use)
    remove_unreleased(files)
    assert files.ledger.exists() is in_use
    if in_use:
        assert scan(files.ledger).contents.releases == 0  # whole, with its count
