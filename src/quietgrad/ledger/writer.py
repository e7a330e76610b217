"""Writing a ledger: a line, and then the count of it, are on disk before the call returns, and only
then is the noise drawn.

What a kill or a power cut can leave, and what it means:

- a torn last line: its release was not made, and is counted all the same;
- a complete line that the count file does not know yet: the same;
- a ledger without a complete line: nothing was released, whatever the file holds.

Any other state did not come from a stop, and is refused (``reader``).
"""

from __future__ import annotations

import gc
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from quietgrad.durable import close_locked, lock, make_folder
from quietgrad.events import PoissonGaussian
from quietgrad.ledger.chain import (
    Count,
    CountWriter,
    count_path,
    create_count,
    encoded,
    read_count,
    write_all,
)
from quietgrad.ledger.reader import REMEDY, LedgerContents, scan
from quietgrad.ledger.records import (
    ClippingNorm,
    EarlierRun,
    Extension,
    Mechanism,
    NoiseBlock,
    NoiseDrawn,
    PrivacyGivenUp,
    Record,
    Release,
    SessionStart,
)
from quietgrad.schedules.course import Course, StepSettings

_CLOSE_IT = (
    "close that run first (run.close(); `with plan.start(...) as run:` closes it where a cell ends "
    "with an error, too), or wait for the process; another ledger would be another run, whose "
    "epsilon adds"
)
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)


class LedgerWriter:
    """Appends to a ledger. Use as a context manager, or call ``close``. One process at a time may
    hold a ledger.

    Attributes:
        contents: what the ledger said when it was opened, after the lock was taken: nobody else can
            add to it.
    """

    def __init__(self, path: str | Path, resume: bool | None = None) -> None:
        """Opens a ledger.

        Args:
            path: the ledger file.
            resume: True never creates one; False never goes on with one; None does what fits: a new
                ledger only where there is none, and no trace of one.

        Raises:
            ValueError: if it is in use, damaged, cannot be written, is not there and must be, or is
                there and must not be.
        """
        self._path = Path(os.path.abspath(path))  # the same file, wherever the process goes
        self._name = f"ledger={str(path)!r}"
        self._process = os.getpid()
        self._broken: str | None = None
        self._count_writer: CountWriter | None = None
        self._earlier: list[Mapping[str, Any]] = []  # runs that weights are from, as was said
        self._norm: float | None = None  # what gradients are clipped to, as it was said last
        try:
            self._require_no_lost_ledger(resume)
            make_folder(self._path.parent)
            self._file = os.open(self._path, _FLAGS if resume else _FLAGS | os.O_CREAT, 0o666)
        except OSError as error:
            raise ValueError(
                f"{self._name} cannot be written: {error.strerror or error}; use a directory that "
                "can be written"
            ) from error
        try:
            self._begin(resume)
        except OSError as error:
            self.close()
            raise ValueError(
                f"{self._name} cannot be written: {error.strerror or error}; nothing was released "
                "by this start"
            ) from error
        except BaseException:
            self.close()
            raise

    def mechanism(self, event: PoissonGaussian, course: Course | None = None, **facts: Any) -> None:
        """States the mechanism of the releases that follow, and the ``course`` of its settings
        where they change; ``facts`` are public facts worth keeping beside it.

        Raises:
            ValueError: if the ledger has one already.
        """
        if self._count.lines:
            raise ValueError(
                f"{self._name} states its mechanism already, and a ledger holds the releases of "
                "one; begin another ledger (the epsilons add)"
            )
        self._append(Mechanism(event, facts, course))
        self._norm = facts.get("max_grad_norm")

    def extension(self, course: Course, target_epsilon: float | None = None) -> None:
        """Says that the steps of ``course`` are planned on top, before any of them is made."""
        self._append(Extension(self._count.releases, course, target_epsilon))

    def session(self, start: SessionStart) -> None:
        """Says that the draws from here on have a root of their own."""
        self._append(start)

    def noise_block(self, step: int, mixing: str) -> None:
        """Says that noise correlated by the matrix of digest ``mixing`` refers to no release before
        ``step``.
        """
        self._append(NoiseBlock(step, mixing))

    def noise_drawn(self, how: str) -> None:
        """Says how the block's noise is drawn."""
        self._append(NoiseDrawn(how))

    def clipping_norm(self, max_grad_norm: float) -> None:
        """Says what the releases from here on are clipped to, unless it was said. A stop before it
        is written costs no privacy: a resume goes on with the norm before, which was released too.
        """
        if max_grad_norm != self._norm:
            self._append(ClippingNorm(self._count.releases, max_grad_norm))
            self._norm = max_grad_norm

    def release(self, step: int, settings: StepSettings | None = None) -> None:
        """Says that release number ``step`` is about to be made, with ``settings`` of its own where
        those of the run change.

        Raises:
            ValueError: if that is not the release that comes next.
            RuntimeError: if the ledger cannot be written, or its files are no longer those that
                were opened: the release must not be made.
        """
        if step != self._count.releases:
            raise ValueError(
                f"step={step}: release {self._count.releases} comes next; no release is skipped, "
                "and none made twice; a run that was interrupted within a release starts again "
                "from its ledger"
            )
        self._append(Release(step, settings=settings))

    def started_from(self, record: Mapping[str, Any]) -> None:
        """Says that the weights are from an earlier run, too, unless it was said."""
        record = json.loads(json.dumps(record))  # as it will be read
        if record not in self._earlier:
            self._append(EarlierRun(self._count.releases, record))
            self._earlier.append(record)

    def not_private(self, reason: str) -> None:
        """Says that values which no noise covers are looked at from here on: the run has no
        epsilon.
        """
        self._append(PrivacyGivenUp(reason))

    def close(self) -> None:
        """Closes both files and gives up the lock."""
        self._broken = self._broken or "it was closed"
        if self._file >= 0:
            close_locked(self._file, self._process)
            self._file = -1
        if self._count_writer is not None:
            self._count_writer.close()
            self._count_writer = None

    def __del__(self) -> None:
        """Of a run that nobody can release with any more: its lock would keep the next start out
        as long as the process lasts.
        """
        if hasattr(self, "_file") and os.getpid() == self._process:
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LedgerWriter holds open files and their lock: it is neither copied nor pickled; "
            "pass the object itself"
        )

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_no_lost_ledger(self, resume: bool | None) -> None:
        if self._path.exists():
            return
        counts = count_path(self._path)
        counted = read_count(counts)
        if counted is not None and counted.lines:
            raise ValueError(
                f"{self._name} is gone: its count file {counts.name!r} says that it had "
                f"{counted.lines} lines, {counted.releases} of them releases; {REMEDY}"
            )
        if resume:
            raise ValueError(
                f"{self._name}: no ledger there to resume, so nothing is known of what was "
                f"released; {REMEDY}"
            )

    def _begin(self, resume: bool | None) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):  # a device may have no end
            raise ValueError(f"{self._name} is no file; name the place of one")
        self._lock()
        self._require_open_file(None)
        found = scan(self._path)
        counts = count_path(self._path)
        if resume is False and found.complete.lines:
            raise ValueError(
                f"{self._name} holds a run already; resume it, or use another run directory"
            )
        if not found.complete.lines:
            # Nothing was released under it: a first line that was cut off, if any, goes.
            if resume and not counts.exists():
                raise ValueError(
                    f"{self._name} is empty and has no count file, so nothing is known of what was "
                    f"released; {REMEDY}"
                )
            os.ftruncate(self._file, 0)
            create_count(counts)
        self._count_writer = CountWriter(counts)
        self._count = found.complete
        self._size = found.size
        self.contents: LedgerContents = found.contents
        header = found.contents.header
        self._earlier = list(found.contents.started_from)
        self._norm = found.contents.max_grad_norm or header.get("max_grad_norm")
        if found.missing is not None:
            self._complete_line(found.missing)
        elif found.torn and found.complete.lines:
            os.ftruncate(self._file, found.size)  # not counted yet, so its noise was never drawn
            self._append(Release(self._count.releases, torn=True))
        elif found.complete != read_count(counts):
            self._count_writer.write(self._count)  # a stop came between line and count

    def _lock(self) -> None:
        try:
            lock(self._file, self._name, _CLOSE_IT)
        except ValueError:
            # A run that nobody holds any more, as after `del run`, lies in a cycle until then.
            gc.collect()
            lock(self._file, self._name, _CLOSE_IT)

    def _complete_line(self, rest: bytes) -> None:
        """Writes what a torn line lacks. It was counted, and its noise may exist."""
        assert self._count_writer is not None
        write_all(self._file, rest)
        os.fsync(self._file)
        release = self.contents.next_release(self._count.releases)
        line, chain = encoded(self._count.lines + 1, release, self._count.chain)
        self._size += len(line)
        self._count = Count(self._count.lines + 1, self._count.releases + 1, chain)

    def _append(self, record: Record) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self._name} was opened by another process, of which this is a copy: a release "
                "here would repeat its noise; start the run in the process that makes the releases"
            )
        if self._broken is not None:
            raise RuntimeError(
                f"{self._name}: {self._broken}; no release was made. Start again from the ledger"
            )
        self._require_open_file(self._size)
        assert self._count_writer is not None
        line, chain = encoded(self._count.lines + 1, record, self._count.chain)
        count = Count(
            self._count.lines + 1, self._count.releases + isinstance(record, Release), chain
        )
        # Until all of it is done, here too: who goes on after a Ctrl-C between line and count, or
        # between their sizes below, would number the next line like this one.
        self._broken = "writing it was interrupted"
        try:
            write_all(self._file, line)
            os.fsync(self._file)
            self._count_writer.write(count)
        except OSError as error:
            # What is on disk now is not known; the next start reads it, and counts what may be
            # there.
            self._broken = f"it could not be written ({error.strerror or error})"
            raise RuntimeError(
                f"{self._name} could not be written ({error.strerror or error}), so the release "
                "was not made; make room on the disk or use another, then resume"
            ) from error
        self._size += len(line)
        self._count = count
        self._broken = None

    def _require_open_file(self, size: int | None) -> None:
        """Before each line: the paths still lead to the open files, and nobody else wrote to them.
        Otherwise the line would go into a dead file.
        """
        files = [(self._file, self._path, size)]
        if self._count_writer is not None:
            files.append((self._count_writer.descriptor, self._count_writer.path, None))
        for descriptor, path, expected in files:
            opened = os.fstat(descriptor)
            try:
                there = os.stat(path)
            except OSError as error:
                raise self._replaced(path, "is gone") from error
            if (opened.st_dev, opened.st_ino) != (there.st_dev, there.st_ino):
                raise self._replaced(path, "was replaced by another file")
            if expected is not None and opened.st_size != expected:
                raise self._replaced(path, "was written by something else")

    def _replaced(self, path: Path, what: str) -> RuntimeError:
        self._broken = f"{path.name} {what} while the run was going on"
        return RuntimeError(
            f"{self._name}: {path.name} {what} while the run was going on, so no further release "
            "is made; restore ledger and count file as this run left them and resume, or begin a "
            "new run directory"
        )
