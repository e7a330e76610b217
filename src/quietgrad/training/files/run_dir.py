"""The run directory: configuration, environment, ledger, metrics, checkpoints, weights, figure.
Nothing private is written to it, but for the secret files of an unfinished run (``secrets.json``
and its rows): do not pass the directory on before the run has ended. No other file holds anything
that noise, sampling, projections or dropout could be drawn again from.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from quietgrad.checks import require_no_home
from quietgrad.durable import close_locked, lock, make_folder, sync_folder, write_whole
from quietgrad.ledger import LEDGER_NAME, holds_records

LOCK = ".lock"
PACKAGES = ("quietgrad", "torch", "transformers", "peft", "numpy", "scipy", "dp-accounting")


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run directory."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER_NAME

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def previous_checkpoint(self) -> Path:
        """The checkpoint before the newest."""
        return self.path / "checkpoint.previous.pt"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def figure(self) -> Path:
        return self.path / "accuracy.png"

    @property
    def mixing(self) -> Path:
        """The mixing matrix of correlated noise; public."""
        return self.path / "mixing.npz"

    @property
    def bands_figure(self) -> Path:
        return self.path / "bands.png"

    @property
    def secrets(self) -> Path:
        """Secret while it exists: the seed, and the roots that correlated noise goes on from after
        a stop. Removed when the run ends.
        """
        return self.path / "secrets.json"

    @property
    def trials(self) -> Path:
        """Secret: the runs of a choice (``quietgrad compare --accounted``) that is not finished."""
        return self.path / "trials.pt"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def forecast(self) -> Path:
        """Engine per layer, time and memory as they were expected, from public records alone."""
        return self.path / "forecast.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing to the directory.

        Raises:
            ValueError: if one does already; nothing was changed then.
        """
        name = f"training.run_dir={str(self.path)!r}"
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        process = os.getpid()
        try:
            lock(descriptor, name, "wait for it, or use another run directory")
            yield
        finally:
            # The file stays: removing it would leave two processes with a lock each.
            close_locked(descriptor, process)

    def forget_beginning(self) -> None:
        """Gives the lock the present time, for who holds it. That at which it was made, which
        copies keep, would say beside the other files' how long everything took.
        """
        os.utime(self.path / LOCK)

    def require_state(self, resume: bool) -> None:
        """Checks that there is a run to go on with, or none to overwrite. A start that was killed
        before it could release anything counts as none.

        Raises:
            ValueError: saying which, and what to do.
        """
        begun = (
            holds_records(self.ledger)
            or self.checkpoint.exists()
            or self.previous_checkpoint.exists()
        )
        if resume and begun and not self.config.is_file():
            raise ValueError(
                f"training.run_dir={str(self.path)!r} holds a run that `quietgrad train` did not "
                "begin (no config.toml), and its ledger counts on; go on with it by the script "
                "that began it, or choose another directory (the epsilons of two runs on the same "
                "records add)"
            )
        if not begun and self.trials.exists():
            raise ValueError(
                f"training.run_dir={str(self.path)!r} holds a choice among runs that is not "
                "finished; go on with it by `quietgrad compare --accounted`, or choose another "
                "directory"
            )
        if resume and not begun:
            raise ValueError(
                f"training.run_dir={str(self.path)!r} holds no run to resume: nothing was released "
                "or saved there; start it without --resume"
            )
        if not resume and (begun or self.result.exists()):
            raise ValueError(
                f"training.run_dir={str(self.path)!r} already holds a run; add --resume to go on "
                "with it, or choose another directory"
            )

    def forget_end(self) -> None:
        """Removes the result of an earlier end, on disk before the next release: its epsilon is
        too small for what follows. The model that was saved then says its own, and stays.
        """
        if self.result.exists():
            self.result.unlink()
            sync_folder(self.path)

    @contextlib.contextmanager
    def new_model(self) -> Iterator[Path]:
        """A folder that takes the place of ``model`` once it is whole: weights of the end never lie
        beside what an earlier end said of its own.
        """
        fresh = self.path / "model.writing"
        shutil.rmtree(fresh, ignore_errors=True)
        yield fresh
        shutil.rmtree(self.model, ignore_errors=True)
        fresh.replace(self.model)

    def write_json(self, path: Path, record: dict[str, Any]) -> None:
        """Writes a file whole or not at all, on disk before the call returns."""
        write_whole(path, (json.dumps(record, indent=2) + "\n").encode())

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Adds a line. A line before it that was cut off by a kill keeps to itself."""
        with open(self.metrics, "ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":
                file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines that are whole: a kill may have cut one off."""
        if not self.metrics.is_file():
            return []
        found = []
        for line in self.metrics.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                found += [record] if isinstance(record, dict) else []
        return found


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"training.run_dir={str(path)!r} cannot be written: {error.strerror or error}; choose "
        "another directory"
    )


def unused_folder() -> Path:
    """For a run that was given none: the time, and a count where others began in that second."""
    first = Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    later = (first.with_name(f"{first.name}-{count}") for count in itertools.count(2))
    return next(path for path in itertools.chain([first], later) if not path.exists())


def _own_folder() -> Path:
    """Made here, so that of two runs that found the same name free only one has it."""
    path = unused_folder()
    try:
        make_folder(path.parent)
        while True:
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                sync_folder(path.parent)
                return path
            path = unused_folder()
    except OSError as error:
        raise _unwritable(path, error) from error


def open_run_dir(wanted: str, resume: bool) -> RunDir:
    """Makes (or, to resume, finds) the run directory and proves that it can be written to. Nothing
    in it is changed; ``RunDir.locked`` comes before the first write.

    Raises:
        ValueError: unwritable, already holding a run that is not being resumed, or nothing to
            resume.
    """
    if resume and not wanted:
        raise ValueError(
            "--resume needs the run directory to go on with: --set training.run_dir=PATH"
        )
    if wanted:
        require_no_home("training.run_dir", wanted)
    path = Path(wanted) if wanted else _own_folder()
    run = RunDir(path)
    run.require_state(resume)
    try:
        make_folder(path)
        probe = path / f".write-probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return run


@contextlib.contextmanager
def removed_if_refused(wanted: str, resume: bool) -> Iterator[RunDir]:
    """``open_run_dir``; if what is inside is refused, a directory that was made for it and is still
    empty goes again.
    """
    was_there = bool(wanted) and Path(wanted).exists()
    run = open_run_dir(wanted, resume)
    try:
        yield run
    except BaseException:
        with contextlib.suppress(OSError):  # it holds something
            if not was_there:
                run.path.rmdir()
            if not wanted:
                run.path.parent.rmdir()
        raise


def environment() -> dict[str, Any]:
    """Versions and machine, for reproduction."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "device": device,
        "packages": versions,
    }
