"""A ledger that cannot be written, is lost, or whose process dies at any moment: no release is lost
or made twice.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attacks.ledgers import made, plan_of, release
from quietgrad.events import PoissonGaussian
from quietgrad.ledger import LedgerWriter, read_ledger
from quietgrad.ledger.chain import Count, CountWriter, count_path, create_count
from quietgrad.noise import GaussianNoise

# Starts and resumes


def test_a_resume_without_its_ledger_is_refused_and_creates_none(path: Path) -> None:
    # Before: an empty ledger was created, and epsilon 0 reported.
    with pytest.raises(ValueError, match=r"no ledger there to resume.*restore"):
        plan_of().start(path, resume=True)
    assert list(path.parent.iterdir()) == []
    made(path)
    path.unlink()
    for resume in (None, True, False):
        with pytest.raises(
            ValueError,
            match=r"is gone: its count file .* says that it had 7 lines, 5 of them releases",
        ):
            plan_of().start(path, resume=resume)
    assert not path.exists()


def test_a_start_that_must_be_fresh_does_not_go_on(path: Path) -> None:
    plan_of().start(path, resume=False).close()
    with pytest.raises(ValueError, match="holds a run already"):
        plan_of().start(path, resume=False)
    plan_of().start(path, resume=True).close()


@pytest.mark.parametrize("left", [0, 1, 20, 60, -1])
def test_a_first_line_that_was_cut_off_blocks_nothing(left: int, path: Path) -> None:
    # Before: the directory was blocked for ever. No release can have been made: each needs a
    # mechanism line that was complete.
    with LedgerWriter(path) as begun:
        begun.mechanism(PoissonGaussian(1.1, 0.1, 1))
    path.write_bytes(path.read_bytes()[:left])
    create_count(count_path(path))
    assert read_ledger(path).releases == 0
    made(path, 2)
    assert read_ledger(path).releases == 2


def test_some_other_file_is_not_taken_for_a_ledger_that_was_cut_off(path: Path) -> None:
    path.write_text("my only copy of something")
    with pytest.raises(ValueError, match="is no ledger of quietgrad"):
        plan_of().start(path)
    assert path.read_text() == "my only copy of something"


@pytest.mark.parametrize("which", ["ledger", "count"])
@pytest.mark.parametrize("how", ["unlinked", "replaced", "directory moved", "written by another"])
def test_a_ledger_that_is_not_there_any_more_stops_the_run(
    which: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before: the run went on in the dead file, and the ledger that was left said less.
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "ledger.jsonl"
    target = path if which == "ledger" else count_path(path)
    drawn: list[object] = []
    right = GaussianNoise.update
    monkeypatch.setattr(GaussianNoise, "update", lambda *a: (drawn.append(a), right(*a))[1])
    with plan_of().start(path) as run:
        release(run)
        if how == "unlinked":
            target.unlink()
        elif how == "replaced":
            copy = target.with_suffix(".copy")
            shutil.copy(target, copy)
            os.replace(copy, target)
        elif how == "directory moved":
            folder.rename(tmp_path / "elsewhere")
        elif which == "ledger":
            with open(target, "ab") as file:
                file.write(b"{}\n")
        else:
            return
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"while the run was going on|no release was made"
            ):
                release(run)
        assert run.released == 1 and len(drawn) == 1


def test_without_that_check_the_run_goes_on_in_the_dead_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LedgerWriter, "_require_open_file", lambda self, size: None)
    with plan_of().start(path) as run:
        release(run)
        path.unlink()
        release(run)
        assert run.released == 2 and not path.exists()


def test_a_relative_path_and_a_link_stay_the_same_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    with plan_of().start("link/ledger.jsonl") as run:
        release(run)
        monkeypatch.chdir(tmp_path / "two")
        release(run)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tmp_path / "two")
        with pytest.raises(RuntimeError, match="is gone while the run was going on"):
            release(run)
    assert read_ledger(tmp_path / "one").releases == 2


def failing(name: str, which: int, error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the ``which``-th call of an ``os`` function fail, after half of its work."""
    right, calls = getattr(os, name), []

    def broken(descriptor: int, *rest: bytes) -> object:
        calls.append(descriptor)
        if len(calls) != which:
            return right(descriptor, *rest)
        if rest:
            right(descriptor, rest[0][: len(rest[0]) // 2])
        raise error

    monkeypatch.setattr(os, name, broken)


@pytest.mark.parametrize(
    ("call", "which"), [("write", 1), ("fsync", 1), ("write", 2), ("fsync", 2)]
)
def test_a_full_disk_stops_the_release_before_its_noise(
    call: str, which: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plan_of().start(path)
    release(run)
    drawn: list[object] = []
    with monkeypatch.context() as patched:
        failing(call, which, OSError(errno.ENOSPC, "No space left on device"), patched)
        patched.setattr(GaussianNoise, "update", lambda *a: drawn.append(a))
        with pytest.raises(
            RuntimeError,
            match=r"could not be written .No space left on device., so the release was not made",
        ):
            release(run)
    with pytest.raises(
        RuntimeError, match=r"no release was made. Start again"
    ):  # what is on disk now is not known
        release(run)
    assert drawn == [] and run.released == 1
    run.close()
    with plan_of().start(path) as run:
        assert run.released == 2  # counted, and its number is not used again
        release(run)
    assert read_ledger(path).releases == 3


def test_an_interruption_between_line_and_count_stops_the_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: CountWriter, count: Count) -> None:
        raise KeyboardInterrupt

    run = plan_of().start(path)
    with monkeypatch.context() as patched:
        patched.setattr(CountWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release(run)
    with pytest.raises(RuntimeError, match=r"writing it was interrupted; no release was made"):
        release(run)
    assert run.released == 0
    run.close()
    assert read_ledger(path).releases == 1  # counted all the same


def test_an_interruption_at_any_line_of_the_writer_leaves_a_ledger_that_can_be_read(
    path: Path,
) -> None:
    # Before: one behind the count, and the next release had the number of this one.
    at = 0
    while True:
        folder = path.parent / str(at)
        run = plan_of().start(folder / path.name)
        release(run)
        stopped = _interrupted(functools.partial(release, run), LedgerWriter._append, at)
        if not stopped:
            break
        with contextlib.suppress(RuntimeError, ValueError):  # a loop that goes on all the same
            release(run)
        made = run.released
        run.close()
        assert read_ledger(folder / path.name).releases >= made
        with plan_of().start(folder / path.name, resume=True) as again:
            release(again)
        at += 1
    assert at > 10


def _interrupted(call: Callable[[], object], function: Callable[..., object], at: int) -> bool:
    """Whether ``call`` was stopped by a Ctrl-C before the line number ``at`` that ``function``
    runs."""
    left = [at]

    def within(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return within

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: within if frame.f_code is function.__code__ else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"ledger=.* cannot be written: (Not a directory|File exists)"
    ):
        plan_of().start(tmp_path / "file" / "ledger.jsonl")


def test_a_file_system_without_locks_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        ValueError, match=r"cannot be locked .No locks available., so two processes could write it"
    ):
        plan_of().start(path)


def test_a_fork_does_not_write_the_ledger(path: Path) -> None:
    with LedgerWriter(path) as ledger:
        ledger.mechanism(PoissonGaussian(1.1, 0.1, 1))
        child = os.fork()
        if not child:
            try:
                ledger.release(0)
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_ledger(path).releases == 0


# Kills

WRITES = """
import sys
from quietgrad.events import PoissonGaussian
from quietgrad.ledger import LedgerWriter
with LedgerWriter(sys.argv[1]) as ledger:
    if not ledger.contents.header:
        ledger.mechanism(PoissonGaussian(1.1, 0.1, 1))
    step = ledger.contents.releases
    while True:
        ledger.release(step)
        print(step, flush=True)  # where the noise would be drawn
        step += 1
"""


def killed_many_times(path: Path, kills: int) -> tuple[list[int], int]:
    """Steps whose noise was drawn in all sessions, each ended by SIGKILL at a moment that chance
    decides, and releases that the ledger counts.
    """
    moments, drawn = random.Random(1), []
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        wanted = moments.randrange(4)
        read = "".join(child.stdout.readline() for _ in range(wanted))
        if moments.random() < 0.5:
            for _ in range(moments.randrange(2000)):
                pass
        child.kill()
        read += child.stdout.read()
        child.stdout.close()
        child.wait(timeout=60)
        assert child.returncode == -9
        drawn += [int(line) for line in read.split("\n")[:-1]]
    return drawn, read_ledger(path).releases


def check_kills(path: Path, kills: int) -> None:
    drawn, counted = killed_many_times(path, kills)
    assert drawn == sorted(set(drawn))  # none twice, and none again after a resume
    assert (
        len(drawn) <= counted <= len(drawn) + kills
    )  # none lost; at most one a kill counted that was not drawn


def test_no_kill_loses_or_repeats_a_release(path: Path) -> None:
    check_kills(path, 12)


@pytest.mark.slow("421 processes; the test before has fewer of the same")
def test_421_kills_lose_and_repeat_no_release(path: Path) -> None:
    check_kills(path, 421)
