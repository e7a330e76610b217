"""Attacks on the ledger, the seeds and the files of a run (findings 9, 11, 12 and 14): each is
tried, and where it makes sense its protection is switched off to see that the test would notice.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans import changed

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.events import PoissonGaussian
from quietgrad.keyring import Session, forget_secrets, read_secrets, rows_path
from quietgrad.ledger import LedgerWriter, read_ledger, reader
from quietgrad.ledger.chain import START, Count, CountWriter, count_path, create_count, encoded
from quietgrad.ledger.records import Mechanism, Release
from quietgrad.noise import BandedNoise, GaussianNoise
from quietgrad.plan import PrivateRun, plan, seeds
from quietgrad.randomness import RandomKey

RECORDS = 80
SEED = "9c41d07be25f83a6b8e4f10c27d95a36"
CONFIG = PrivacyConfig(noise_multiplier=1.1, expected_batch_size=8, steps=12)
BANDED = replace(CONFIG, noise=BandedNoise(3))
LARGE = replace(CONFIG, expected_batch_size=40)  # no batch is empty


def plan_of(config: PrivacyConfig = CONFIG, **changes: object) -> PrivacyPlan:
    return changed(config, **changes).build(RECORDS)


def release(run: PrivateRun, value: float = 0.0, width: int = 3) -> torch.Tensor:
    """The next release, of a sum that is ``value`` in its first entry."""
    examples = len(next(run.batches()))
    rows = torch.zeros(examples, width)
    if examples:
        rows[0, 0] = value
    return run.release(run.contribution({"w": rows}, examples)).gradients["w"]


def made(
    path: Path, count: int = 5, config: PrivacyConfig = CONFIG, **changes: object
) -> list[torch.Tensor]:
    with plan_of(config, **changes).start(path) as run:
        return [release(run) for _ in range(count)]


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


# The ledger's lines


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a gap": (lambda x: [*x[:3], *x[4:]], "damaged at line 4: it says that it is line 5"),
    "a repeat": (lambda x: [*x[:4], x[3], *x[4:]], "damaged at line 5: it says that it is line 4"),
    "another order": (lambda x: [*x[:3], x[4], x[3], *x[5:]], "damaged at line 4"),
    "another sigma": (
        lambda x: [x[0].replace(b"1.1", b"9.9"), *x[1:]],
        "damaged at line 1: its digest",
    ),
    "another step": (
        lambda x: [*x[:3], x[3].replace(b'"step": 1', b'"step": 0'), *x[4:]],
        "damaged at line 4",
    ),
    "an empty line": (lambda x: [*x[:3], b"\n", *x[3:]], "damaged at line 4"),
    "another run's line": (
        lambda x: [*x[:3], encoded(4, Release(1), START)[0], *x[4:]],
        "damaged at line 4",
    ),
    "shortened by a line": (
        lambda x: x[:-1],
        "was shortened: it has 6 lines, and its count file says that it had 7",
    ),
    "shortened by many": (lambda x: x[:2], "was shortened"),
    "emptied": (lambda x: [], "was shortened"),
    "cut within a line": (lambda x: [*x[:-2], x[-2][:9]], "was shortened"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_ledger_is_refused_with_what_to_do(name: str, path: Path) -> None:
    # Before: lines lost in the middle or at the end undercounted, and a seeded resume drew their
    # noise again.
    change, message = DAMAGE[name]
    made(path)
    path.write_bytes(b"".join(change(lines_of(path))))
    before = path.read_bytes(), count_path(path).read_bytes()
    for attempt in (
        lambda: read_ledger(path),
        lambda: plan_of().start(path),
        lambda: plan_of().start(path, resume=True),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            attempt()
        assert "restore" in str(refused.value) and "\n" not in str(refused.value)
    assert (path.read_bytes(), count_path(path).read_bytes()) == before


def trusting(line: bytes, number: int, before: str) -> tuple[dict[str, object], str]:
    """Reads a line without a look at its number and digest."""
    fields = json.loads(line)
    return fields, fields["chain"]


def test_without_the_chain_an_edit_goes_unnoticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path)
    path.write_bytes(
        path.read_bytes().replace(b'"noise_multiplier": 1.1', b'"noise_multiplier": 9.9')
    )
    with pytest.raises(ValueError, match="its digest"):
        read_ledger(path)
    monkeypatch.setattr(reader, "decoded", trusting)
    assert read_ledger(path).header["event"]["noise_multiplier"] == 9.9


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_without_the_count_a_shortened_ledger_goes_unnoticed(
    lost: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path)
    kept = lines_of(path)[:-lost]
    path.write_bytes(b"".join(kept))
    with pytest.raises(ValueError, match="was shortened"):
        read_ledger(path)
    monkeypatch.setattr(
        reader,
        "read_count",
        lambda where: Count(len(kept), 5 - lost, json.loads(kept[-1])["chain"]),
    )
    assert read_ledger(path).releases == 5 - lost


def test_a_ledger_without_its_count_file_is_refused(path: Path) -> None:
    made(path)
    count_path(path).unlink()
    for attempt in (lambda: read_ledger(path), lambda: plan_of().start(path)):
        with pytest.raises(ValueError, match=r"lacks its count file 'ledger.jsonl.count'.*restore"):
            attempt()


@pytest.mark.parametrize("contents", [b"", b"no count", b" " * 512])
def test_a_damaged_count_file_is_refused(contents: bytes, path: Path) -> None:
    made(path)
    count_path(path).write_bytes(contents)
    with pytest.raises(ValueError, match=r"count=.* is damaged"):
        read_ledger(path)


def test_a_count_of_another_run_or_moment_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    made(other, 5)
    made(path, 5)
    older = count_path(path).read_bytes()
    shutil.copy(count_path(other), count_path(path))
    with pytest.raises(ValueError, match="is not the one that its count file is of"):
        read_ledger(path)
    count_path(path).write_bytes(older)
    made(path, 3)
    count_path(path).write_bytes(older)
    with pytest.raises(ValueError, match="not from the same moment"):
        read_ledger(path)


def test_a_ledger_that_grows_while_it_is_read_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, looks = reader.read_count, []
    with plan_of().start(path) as run:
        release(run)

        def slow(where: Path) -> Count | None:
            found = right(where)
            looks.append(found)
            if len(looks) == 1:  # between the first look at the count and the ledger
                release(run)
                release(run)
            return found

        monkeypatch.setattr(reader, "read_count", slow)
        assert read_ledger(path).releases == 3


def test_who_rewrites_both_files_is_not_noticed(path: Path) -> None:
    # Digests are no secret: the model is an accident, not malice (docs/privacy.md, section 7).
    made(path)
    event = PoissonGaussian(9.9, 0.1, 1)
    digest, whole, lines = START, b"", 0
    for record in [Mechanism(event, {"delta": 1e-5}), Release(0)]:
        lines += 1
        line, digest = encoded(lines, record, digest)
        whole += line
    path.write_bytes(whole)
    create_count(count_path(path))
    counting = CountWriter(count_path(path))
    counting.write(Count(lines, 1, digest))
    counting.close()
    assert read_ledger(path).releases == 1


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
    with pytest.raises(ValueError, match="lacks its count file"):
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


@pytest.mark.slow
def test_421_kills_lose_and_repeat_no_release(path: Path) -> None:
    check_kills(path, 421)


# Seeds


def rolled_back(path: Path, tmp_path: Path) -> Path:
    """A copy of the ledger and its count as they are now."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in (path, count_path(path)):
        shutil.copy(file, folder / file.name)
    return folder / path.name


def differences(
    path: Path, tmp_path: Path, forget: Callable[[], None], seed: str | None
) -> tuple[float, float]:
    """What two releases of one step from one state of the ledger say of the data: their difference
    in an entry that differs by 0.5, and in one that does not.
    """
    made(path, 3, LARGE, seed=seed)
    copy = rolled_back(path, tmp_path)
    found = []
    for where, value in ((path, 0.5), (copy, 0.0)):
        forget()
        with plan_of(LARGE, seed=seed).start(where) as run:
            found.append(release(run, value))
    gap = found[0] - found[1]
    return float(gap[0]), float(gap[1])


@pytest.mark.parametrize("seed", [None, SEED], ids=["no seed", "seed"])
def test_no_resume_draws_the_noise_of_another(
    seed: str | None, path: Path, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    # Before: with a seed, a run that was rolled back, copied or resumed twice drew the same noise
    # on other data, and the difference of its releases was the data.
    with_data, without = differences(path, tmp_path, another_process, seed)
    assert without != 0.0 and abs(with_data - 0.5) > 1e-5


def test_with_one_root_for_all_sessions_the_difference_is_the_data(
    path: Path, tmp_path: Path, another_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(step: int, seed: str, public: bool) -> Session:
        return Session(step, "same", seeds.key_of_seed(seed), "seed")

    monkeypatch.setattr(plan, "new_session", same)
    with_data, without = differences(path, tmp_path, another_process, SEED)
    assert without == 0.0 and with_data == pytest.approx(0.5, abs=1e-6)


def test_two_starts_with_one_seed_draw_different_noise(
    tmp_path: Path, another_process: Callable[[], None]
) -> None:
    # In one process the second is refused. What cannot be seen, another process or another machine,
    # is harmless: the root follows from the seed and the start's random name.
    found = []
    for name in ("one", "two"):
        another_process()
        found.append(torch.cat(made(tmp_path / name / "ledger.jsonl", seed=SEED)))
    assert not (found[0] == found[1]).any()
    with pytest.raises(ValueError, match="this seed has started a run already"):
        made(tmp_path / "three" / "ledger.jsonl", seed=SEED)
    another_process()
    with plan_of(seed=SEED).start() as run:  # nor without a ledger
        assert not (release(run) == found[0][:3]).any()


def test_public_data_and_a_seed_reproduce(tmp_path: Path) -> None:
    found = [made(tmp_path / f"{i}.jsonl", seed=3, data_are_public=True) for i in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_seed_and_ledger_make_all_draws_again(path: Path) -> None:
    # What a seed on private data is for: an auditor who has both can check the noise.
    noisy = made(path, 2, seed=SEED)
    (start,) = read_ledger(path).sessions
    assert (
        start.source == "seed" and read_ledger(path).seeded and read_ledger(path).header["seeded"]
    )
    key = seeds.key_of_seed(SEED, start.name)
    assert key.seal() == start.seal
    for step, released in enumerate(noisy):
        again = key.generator("noise", step, "w").standard_normal(3, dtype="float32") * 1.1
        torch.testing.assert_close(released, torch.as_tensor(again).float(), rtol=0, atol=1e-6)


def test_a_seal_says_nothing_of_its_root_but_which_it_is() -> None:
    key, other = RandomKey.from_entropy(), RandomKey.from_entropy()
    assert key.seal() == RandomKey(key.root, False).seal() != other.seal()
    assert key.root.hex() not in key.seal() and len(key.seal()) == 32


def test_a_seed_is_in_the_secret_file_alone(tmp_path: Path) -> None:
    path, keys = tmp_path / "ledger.jsonl", tmp_path / "secrets.json"
    with plan_of(seed=SEED).start(path, keys) as run:
        release(run)
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600 and read_secrets(keys).seed == SEED
    for file in (path, count_path(path)):
        text = file.read_text()
        assert SEED not in text and str(int(SEED, 16)) not in text
    assert SEED not in repr(read_secrets(keys))


def test_another_seed_or_older_keys_are_noticed(
    path: Path, another_process: Callable[[], None]
) -> None:
    # Before: with another seed the noise was "correlated" with draws that were never made, and
    # mixing_row did not say so.
    with plan_of(BANDED, seed=SEED).start(path) as run:
        release(run)
        release(run)
    another_process()
    with plan_of(BANDED, seed=SEED[::-1]).start(path) as run:
        release(run)
    assert read_ledger(path).noise_block == (2, plan_of(BANDED).noise.digest)


# The last rows of correlated noise


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Steps of which rows are made."""
    found: list[int] = []
    right = GaussianNoise._next_row

    def noting(self: GaussianNoise, like: object, key: RandomKey, history: object) -> object:
        found.append(history.step)  # type: ignore[attr-defined]
        return right(self, like, key, history)  # type: ignore[arg-type]

    monkeypatch.setattr(GaussianNoise, "_next_row", noting)
    yield found


def stopped(
    folder: Path, at: int = 5, after: int = 2, config: PrivacyConfig = BANDED
) -> tuple[Path, Path]:
    """A banded run whose rows were kept at a step, and that released more before it was killed."""
    path, keys = folder / "ledger.jsonl", folder / "secrets.json"
    with plan_of(config).start(path, keys) as run:
        for _ in range(at):
            release(run)
        run.keep_noise()
        for _ in range(after):
            release(run)
    return path, keys


@pytest.mark.parametrize("source", ["keyed", "secure"])
def test_a_resume_draws_only_the_steps_after_the_kept_rows(
    source: str, tmp_path: Path, draws: list[int]
) -> None:
    config = changed(BANDED, source=source)
    path, keys = stopped(tmp_path, config=config)
    assert stat.S_IMODE(rows_path(keys).stat().st_mode) == 0o600
    rows = []
    for kept in (True, False):
        folder = tmp_path / str(kept)
        shutil.copytree(
            tmp_path,
            folder,
            ignore=lambda where, names: [n for n in names if n in ("True", "False")],
        )
        if not kept:
            rows_path(folder / keys.name).unlink()
        draws.clear()
        with plan_of(config).start(folder / path.name, folder / keys.name) as run:
            release(run)
            assert draws == ([5, 6, 7] if kept else [0, 1, 2, 3, 4, 5, 6, 7])
            rows.append(
                run._session._history.rows[1]
            )  # of the step before: drawn by the session that was killed
    assert torch.equal(rows[0]["w"], rows[1]["w"])
    forget_secrets(keys)
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "ledger.jsonl",
        "ledger.jsonl.count",
    }


@pytest.mark.parametrize(
    "wrong",
    ["damaged", "empty", "another run's", "another matrix", "another shape", "beyond the ledger"],
)
def test_rows_that_are_not_of_this_ledger_are_not_used(
    wrong: str, tmp_path: Path, draws: list[int]
) -> None:
    path, keys = stopped(tmp_path)
    rows = rows_path(keys)
    record = torch.load(rows, weights_only=True)
    if wrong == "damaged":
        rows.write_bytes(rows.read_bytes()[:-100])
    elif wrong == "empty":
        rows.write_bytes(b"")
    elif wrong == "another run's":
        (tmp_path / "other").mkdir()
        shutil.copy(rows_path(stopped(tmp_path / "other")[1]), rows)
    else:
        change: dict[str, object] = {
            "another matrix": {"mixing": "x"},
            "another shape": {"rows": [{"w": torch.zeros(4)}] * 2},
            "beyond the ledger": {"step": 11},
        }[wrong]
        torch.save(record | change, rows)
    draws.clear()
    with plan_of(BANDED).start(path, keys) as run:
        release(run)
    assert draws == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_copy_that_went_on_by_itself_does_not_lend_its_rows(
    tmp_path: Path, draws: list[int]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    stopped(one)
    shutil.copytree(one, two)
    for folder in (one, two):
        with plan_of(BANDED).start(folder / "ledger.jsonl", folder / "secrets.json") as run:
            release(run)
            release(run)
            run.keep_noise()
    shutil.copy(rows_path(two / "secrets.json"), rows_path(one / "secrets.json"))
    draws.clear()
    with plan_of(BANDED).start(one / "ledger.jsonl", one / "secrets.json") as run:
        release(run)
    assert draws == list(range(10))


def test_nothing_is_kept_where_nothing_is_needed(tmp_path: Path) -> None:
    for name, config, keys in (
        ("independent", CONFIG, tmp_path / "keys"),
        ("regenerated", changed(BANDED, memory="regenerate"), tmp_path / "keys"),
        ("no keys", BANDED, None),
    ):
        with plan_of(config).start(tmp_path / f"{name}.jsonl", keys) as run:
            release(run)
            run.keep_noise()
        assert not list(tmp_path.glob("*.rows"))
        forget_secrets(tmp_path / "keys")


def test_a_run_that_is_over_writes_no_secret(tmp_path: Path) -> None:
    path, keys = tmp_path / "ledger.jsonl", tmp_path / "keys"
    with plan_of(BANDED).start(path, keys) as run:
        for _ in range(12):
            release(run)
    forget_secrets(keys)
    before = path.read_bytes()
    with plan_of(BANDED).start(path, keys) as run:
        assert list(run.batches()) == []
    assert path.read_bytes() == before and not keys.exists()


def test_what_the_model_draws_is_keyed_by_session_and_step(path: Path) -> None:
    # Before: checkpoints held torch's generator state, which gives away dropout masks and how many
    # records were in the batches.
    found = []
    for _ in range(2):
        with plan_of().start(path) as run:
            for _ in range(3):
                found.append(run.model_seed())
                assert run.model_seed() == found[-1] and 0 <= found[-1] < 2**63
                release(run)
    assert len(set(found)) == 6
