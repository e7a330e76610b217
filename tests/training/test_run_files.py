"""The files of a run directory under attack: no secret outside the secret file, locks before
writes, and whatever a kill or a full disk leaves behind, one line says what to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import config_of, crash_at, interrupt_at, train, weights

from quietgrad.ledger import read_ledger
from quietgrad.plan import PrivateRun, seeds
from quietgrad.training import runner
from quietgrad.training.files import run_dir as run_files
from quietgrad.training.files.noise_state import SPARING, NoiseKeeper, with_kept_seed, without_seed
from quietgrad.training.files.run_dir import RunDir, open_run_dir
from quietgrad.training.prepare import prepare

SEED = "4b7e91d2036fa85cc1d90e6f7a823b54"


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def run_dir(settings: dict[str, Any]) -> RunDir:
    return RunDir(Path(settings["training.run_dir"]))


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own for every test, as far as seeds are concerned."""
    monkeypatch.setattr(seeds, "_uses", {})


# Secrets


def test_the_directory_of_a_seeded_run_does_not_give_its_noise_away(
    settings, run_dir: RunDir
) -> None:
    # Before: config.toml held the seed, checkpoint.pt torch's generator state, and with Adam's
    # moments the noise-free mean came out to 1e-7.
    values = settings | {
        "data.public": False,
        "training.seed": SEED,
        "training.checkpoint_every": 1,
        "model.dropout": 0.1,
    }
    train(values, report=interrupt_at(3))
    number = int(SEED, 16)
    key = seeds.key_of_seed(SEED, read_ledger(run_dir.path).sessions[0].name)
    secret = [
        SEED.encode(),
        str(number).encode(),
        number.to_bytes(16, "big"),
        number.to_bytes(16, "little"),
        key.root,
    ]
    secret += [seeds.key_of_seed(SEED).root, key.root.hex().encode()]
    files = files_of(run_dir.path)
    assert SEED.encode() in files.pop("secrets.json")
    assert stat.S_IMODE(run_dir.secrets.stat().st_mode) == 0o600
    assert not [(name, s) for name, contents in files.items() for s in secret if s in contents]
    assert {
        "config.toml",
        "checkpoint.pt",
        "checkpoint.previous.pt",
        "ledger.jsonl",
        "ledger.jsonl.count",
    } <= files.keys()
    for path in (run_dir.checkpoint, run_dir.previous_checkpoint):
        assert torch.get_rng_state().numel() > 5000 and not list(
            byte_tensors(torch.load(path, weights_only=True))
        )


def byte_tensors(value: object) -> Any:
    """Where a generator's state could be."""
    if isinstance(value, torch.Tensor):
        yield from [value] if value.dtype == torch.uint8 else []
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from byte_tensors(part)


def test_a_seeded_run_on_private_data_resumes_with_the_seed_of_its_secret_file(
    settings, run_dir: RunDir
) -> None:
    values = settings | {"data.public": False, "training.seed": SEED}
    train(values, report=interrupt_at(2))
    settings = settings | {"data.public": False}
    resumed, outcome, _ = train(settings, resume=True)  # the user does not give it again
    assert resumed.config.training.seed == SEED and outcome.result["steps"] == 6
    assert [s.source for s in read_ledger(run_dir.path).sessions] == ["seed", "seed"]
    assert (
        len({s.name for s in read_ledger(run_dir.path).sessions}) == 2
    )  # and draws nothing of before again
    assert not run_dir.secrets.exists()
    # A finished run needs no seed any more.
    assert train(settings, resume=True)[1].result["epsilon"] == outcome.result["epsilon"]


def test_another_seed_is_refused_on_a_resume_without_saying_either(
    settings, run_dir: RunDir
) -> None:
    train(settings | {"data.public": False, "training.seed": SEED}, report=interrupt_at(2))
    other = SEED[::-1]
    with pytest.raises(
        ValueError, match=r"training\.seed is not the one that the run began with"
    ) as refused:
        train(settings | {"data.public": False, "training.seed": other}, resume=True)
    assert SEED not in str(refused.value) and other not in str(refused.value)
    config = config_of(settings | {"data.public": False, "training.seed": str(SEED).upper()})
    assert with_kept_seed(config, run_dir).training.seed == SEED  # the same number


def test_a_seed_stays_in_the_configuration_where_it_is_no_secret(settings) -> None:
    for changes in ({"data.public": True}, {"privacy.enabled": False}):
        config = config_of(settings | {"training.seed": 3} | changes)
        assert without_seed(config) == config
    assert (
        without_seed(
            config_of(settings | {"data.public": False, "training.seed": SEED})
        ).training.seed
        is None
    )


def test_dropout_is_keyed_by_step(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a resume needs no generator's state. Not keyed, an interrupted run differs from a
    # whole one.
    values = settings | {
        "training.seed": 3,
        "data.public": True,
        "model.dropout": 0.3,
        "model.tune": "full",
    }

    def gap(name: str) -> float:
        whole, _, _ = train(
            values | {"training.run_dir": f"{settings['training.run_dir']}-{name}-whole"}
        )
        stopped = values | {"training.run_dir": f"{settings['training.run_dir']}-{name}"}
        train(stopped, report=interrupt_at(3))
        torch.randn(7)  # whatever else the process draws
        resumed, _, _ = train(stopped, resume=True)
        expected = weights(whole)
        return max(float((p - expected[name]).abs().max()) for name, p in weights(resumed).items())

    assert gap("keyed") == 0.0
    monkeypatch.setattr(PrivateRun, "_drawing", lambda self: contextlib.nullcontext())
    assert gap("unkeyed") > 0.0


def test_rows_are_kept_at_checkpoints_sparingly_and_at_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Private:
        kept = 0

        def keep_noise(self) -> None:
            self.kept += 1
            clock[0] += 2.0  # seconds

    clock = [100.0]
    monkeypatch.setattr("quietgrad.training.files.noise_state.time.monotonic", lambda: clock[0])
    private = Private()
    keeper = NoiseKeeper(private)  # type: ignore[arg-type]
    keeper.keep(stopping=False)
    keeper.keep(stopping=False)
    assert private.kept == 1
    keeper.keep(stopping=True)
    assert private.kept == 2
    clock[0] += 2 * SPARING
    keeper.keep(stopping=False)
    assert private.kept == 3
    NoiseKeeper(None).keep(stopping=True)


# Starts


def test_two_fresh_starts_in_one_directory(settings, run_dir: RunDir) -> None:
    # Before: they overwrote each other's weights and configuration.
    seen: dict[str, bytes] = {}

    def second(progress: runner.Progress) -> None:
        if progress.step == 2:
            seen.update(files_of(run_dir.path))
            with pytest.raises(ValueError, match="already holds a run"):
                train(settings | {"optimizer.learning_rate": 0.5})
            assert files_of(run_dir.path) == seen

    train(settings, report=second)
    assert "learning_rate = 0.01" in run_dir.config.read_text()


def test_a_start_that_waited_for_another_changes_nothing(settings, run_dir: RunDir) -> None:
    # Both looked at the empty directory before either locked it.
    config = config_of(settings | {"optimizer.learning_rate": 0.5})
    late = open_run_dir(settings["training.run_dir"], False)
    prepared = prepare(config)
    with run_dir.locked():
        with pytest.raises(
            ValueError, match=r"is in use by another process, or by an .*; wait for"
        ):
            runner.train(prepared, late, False, lambda progress: None)
        assert set(files_of(run_dir.path)) == {".lock"}
    train(settings, report=interrupt_at(2))
    before = files_of(run_dir.path)
    with pytest.raises(ValueError, match="already holds a run"):
        runner.train(prepared, late, False, lambda progress: None)
    assert files_of(run_dir.path) == before


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    names = [open_run_dir("", False).path.name for _ in range(3)]
    assert names == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]


def test_a_run_whose_name_was_taken_meanwhile_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    found = run_files.unused_folder

    def found_by_two() -> Path:
        path = found()
        if not path.name.endswith("-2"):
            path.mkdir(parents=True)  # by the other
        return path

    monkeypatch.setattr(run_files, "unused_folder", found_by_two)
    assert open_run_dir("", False).path.name == "20260101-000000-2"


def test_a_name_for_runs_that_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="cannot be written"):
        open_run_dir("", False)


def test_two_resumes_at_once(settings, run_dir: RunDir) -> None:
    train(settings, report=interrupt_at(2))
    refused = []

    def second(progress: runner.Progress) -> None:
        with pytest.raises(ValueError, match="in use by another process"):
            train(settings, resume=True)
        refused.append(progress.step)

    train(settings, resume=True, report=second)
    assert refused == [3, 4, 5, 6] and read_ledger(run_dir.path).releases == 6


@pytest.mark.parametrize("left", ["nothing", "configuration", "empty ledger", "torn first line"])
def test_a_start_that_was_killed_early_blocks_nothing(left: str, settings, run_dir: RunDir) -> None:
    run_dir.path.mkdir()
    if left != "nothing":
        run_dir.config.write_text("[training]\nsteps = 3\n")
    if left == "empty ledger":
        run_dir.ledger.write_bytes(b"")
    if left == "torn first line":
        run_dir.ledger.write_bytes(b'{"line": 1, "type": "mechanism", "for')
    with pytest.raises(
        ValueError,
        match="holds no run to resume: nothing was released or saved there; start it without "
        "--resume",
    ):
        train(settings, resume=True)
    _, outcome, _ = train(settings)
    assert outcome.result["steps"] == 6 and read_ledger(run_dir.path).releases == 6


def test_a_run_whose_ledger_is_gone_is_refused_and_gets_no_other(settings, run_dir: RunDir) -> None:
    # Before: an empty one was created, and epsilon 0 reported.
    train(settings, report=interrupt_at(3))
    for names, message in (
        (["ledger.jsonl"], "is gone: its count file"),
        (["ledger.jsonl.count"], "no ledger there to resume"),
    ):
        for name in names:
            (run_dir.path / name).unlink()
        before = files_of(run_dir.path)
        with pytest.raises(ValueError, match=message):
            train(settings, resume=True)
        with pytest.raises(ValueError, match="already holds a run"):
            train(settings)
        assert files_of(run_dir.path) == before


# What a kill leaves


def damaged(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "changed":
        with zipfile.ZipFile(path) as archive:  # in the numbers of a tensor
            tensor = max(archive.infolist(), key=lambda part: part.file_size)
            middle = whole.index(archive.read(tensor)) + tensor.file_size // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    else:
        path.write_bytes(
            {"empty": b"", "cut off": whole[: len(whole) // 2], "zeros": b"\0" * len(whole)}[how]
        )


@pytest.mark.grid(2, "ways to be damaged, all seen by one digest")
@pytest.mark.parametrize("how", ["empty", "cut off", "zeros", "missing", "changed"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    how: str, settings, run_dir: RunDir
) -> None:
    # Before: a zero-length one ended in "Aborted.", and there was no other.
    values = settings | {"training.checkpoint_every": 2}
    with pytest.raises(OSError, match="went away"):
        train(values, report=crash_at(5))
    damaged(run_dir.checkpoint, how)
    said: list[str] = []
    config = with_kept_seed(config_of(values), run_dir)
    outcome = runner.train(prepare(config), run_dir, True, lambda progress: None, said.append)
    assert said == [
        "checkpoint.pt is damaged or gone; going on from checkpoint.previous.pt, step 2",
        "the checkpoint is of step 2: the updates of 3 releases after it are lost, and stay spent",
    ]
    assert (
        outcome.result["steps"] == 6 and read_ledger(run_dir.path).releases == 6
    )  # five were spent


def test_without_any_checkpoint_that_can_be_read_one_line_says_so(
    settings, run_dir: RunDir, quietgrad, write_config
) -> None:
    values = settings | {"training.checkpoint_every": 2}
    with pytest.raises(OSError, match="went away"):
        train(values, report=crash_at(5))
    for path in (run_dir.checkpoint, run_dir.previous_checkpoint):
        path.write_bytes(b"")
    code, _, err = quietgrad("train", write_config(values), "--resume", "--json")
    last = err.splitlines()[-1]
    assert (
        code == 2
        and last.startswith("error: no checkpoint in")
        and "Aborted" not in err
        and "Traceback" not in err
    )
    assert "remove them" in last or "remove both" in last
    for path in (run_dir.checkpoint, run_dir.previous_checkpoint):
        path.unlink()
    assert train(values, resume=True)[1].result["steps"] == 6  # as the message says


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="names of open files are read from /proc"
)
def test_a_checkpoint_and_its_name_are_synced_before_it_counts(
    settings, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    right_sync, right_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        right_sync(descriptor)

    def move(source: Any, target: Any) -> None:
        synced.append(f"{Path(source).name} -> {Path(target).name}")
        right_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", move)
    train(settings | {"training.checkpoint_every": 3}, report=interrupt_at(6))
    first = synced.index("checkpoint.pt.tmp")
    assert synced[first : first + 3] == [
        "checkpoint.pt.tmp",
        "checkpoint.pt.tmp -> checkpoint.pt",
        "run",
    ]
    second = synced.index("checkpoint.pt.tmp", first + 1)
    moves = ["checkpoint.pt -> checkpoint.previous.pt", "checkpoint.pt.tmp -> checkpoint.pt"]
    assert synced[second : second + 4] == ["checkpoint.pt.tmp", *moves, "run"]


def test_a_metrics_line_that_was_cut_off_spoils_nothing(settings, run_dir: RunDir) -> None:
    # Before: every later run failed.
    train(settings, report=interrupt_at(3))
    with open(run_dir.metrics, "ab") as file:
        file.write(b'{"step": 4, "valid')
    train(settings, resume=True)
    assert [m["step"] for m in run_dir.read_metrics()] == [3, 6]


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    settings, run_dir: RunDir, quietgrad, write_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    right, written = os.write, []

    def full(descriptor: int, contents: bytes) -> int:
        written.append(descriptor)
        if len(written) == 12:
            right(descriptor, bytes(contents)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(descriptor, contents)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        code, _, err = quietgrad("train", write_config(settings), "--json")
    assert (
        code == 1
        and err.splitlines()[-1].startswith("error: ledger=")
        and "No space left" in err.splitlines()[-1]
    )
    code, out, err = quietgrad("train", write_config(settings), "--resume", "--json")
    assert code == 0 and json.loads(out)["steps"] == 6, err
    assert read_ledger(run_dir.path).releases == 6


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), EOFError(), OSError(5, "Input/output error")], ids=repr
)
def test_whatever_ends_a_run_is_one_line(
    error: BaseException, settings, quietgrad, write_config, monkeypatch
) -> None:
    def ends(*_: object) -> None:
        raise error

    monkeypatch.setattr(runner, "train", ends)
    code, _, err = quietgrad("train", write_config(settings), "--json")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert (
        err.splitlines()[-1].startswith("error: ")
        and "Aborted" not in err
        and "Traceback" not in err
    )


# Rolled back as a whole


def test_a_directory_that_was_rolled_back_is_told_by_a_number_kept_elsewhere(
    settings, run_dir: RunDir, quietgrad: Callable[..., tuple[int, str, str]], write_config
) -> None:
    train(settings, report=interrupt_at(2))
    older = {
        name: (run_dir.path / name).read_bytes() for name in ("ledger.jsonl", "ledger.jsonl.count")
    }
    code, out, err = quietgrad("train", write_config(settings), "--resume")
    assert code == 0 and "--expect-releases 6" in " ".join(out.replace("│", " ").split()), out + err
    assert quietgrad("epsilon", "--ledger", run_dir.path, "--expect-releases", 6, "--json")[0] == 0
    for name, contents in older.items():
        (run_dir.path / name).write_bytes(contents)
    assert (
        quietgrad("epsilon", "--ledger", run_dir.path, "--json")[0] == 0
    )  # cannot be seen from within
    code, out, err = quietgrad(
        "epsilon", "--ledger", run_dir.path, "--expect-releases", 6, "--json"
    )
    assert code == 2 and out == "" and "holds 2 releases, and --expect-releases says 6" in err
    code, out, err = quietgrad(
        "epsilon", "--noise-multiplier", 1, "--delta", 1e-5, "--expect-releases", 6
    )
    assert code == 2 and "--expect-releases belongs to a ledger" in err
    code, out, err = quietgrad("epsilon", "--ledger", run_dir.path, "--expect-releases", -1)
    assert code == 2 and out == "" and "--expect-releases=-1 is below 0" in err


def test_epsilon_of_a_damaged_ledger_is_refused(settings, run_dir: RunDir, quietgrad) -> None:
    train(settings, report=interrupt_at(3))
    lines = run_dir.ledger.read_bytes().splitlines(keepends=True)
    run_dir.ledger.write_bytes(b"".join(lines[:-1]))
    code, out, err = quietgrad("epsilon", "--ledger", run_dir.path, "--json")
    assert code == 2 and out == "" and "was shortened" in err and err.count("\n") == 1
