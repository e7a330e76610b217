"""Reading a ledger: every line is checked against its number and the chain, the whole against the
count file. What cannot be proved whole is refused, never counted low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quietgrad.events import PoissonGaussian, PrivacyEvent, event_from_json
from quietgrad.ledger.chain import START, Count, count_path, decoded, encoded, read_count
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
    record_from_json,
)
from quietgrad.schedules.course import Course, StepSettings

_OF_A_STEP = Release | SessionStart | NoiseBlock | ClippingNorm | Extension | EarlierRun
LEDGER_NAME = "ledger.jsonl"
REMEDY = (
    "restore the ledger and its count file from the same moment, or begin a new run "
    "directory: nothing can be claimed of this one, and going on could draw the same noise "
    "twice"
)


@dataclass(frozen=True)
class LedgerContents:
    """What a ledger says.

    Attributes:
        event: all releases so far as one privacy event; None if there was none.
        releases: number of noisy sums released, a torn last line counted as one.
        header: the mechanism line: facts such as dataset size and target delta; empty before it was
            written.
        noise_block: for correlated noise, the step at which the last block began and the digest of
            its mixing matrix.
        sessions: starts of the run in order.
        noise_drawn: how that block's noise is drawn: dtype, library and device; None before its
            first release.
        max_grad_norm: what the last releases were clipped to, or the next would be, where that
            follows what is released; None where it stayed as the mechanism line has it.
        course: the settings of every planned step with those of extensions, where they change or
            there are some; None for a plain ledger.
        extensions: what was planned on top, in order.
        not_private: why the run gave up privacy (``PrivateRun.give_up_privacy``): no epsilon covers
            it; None for any other.
        started_from: records of earlier runs whose weights it began with.
    """

    event: PrivacyEvent | None = None
    releases: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    noise_block: tuple[int, str] | None = None
    sessions: tuple[SessionStart, ...] = ()
    noise_drawn: str | None = None
    max_grad_norm: float | None = None
    course: Course | None = None
    extensions: tuple[Extension, ...] = ()
    not_private: str | None = None
    started_from: tuple[Mapping[str, Any], ...] = ()

    def next_release(self, step: int) -> Release:
        """The line of release ``step`` as the run writes it."""
        if self.course is None or not self.course.varies or step >= self.course.steps:
            return Release(step)
        return Release(step, settings=self.course.at(step))

    def makers(self, releases: int) -> tuple[str, ...]:
        """Names of the starts that made the first ``releases``. What is made of these, such as a
        checkpoint, says so: of another copy of the run they are others.
        """
        ends = [*(start.step for start in self.sessions[1:]), releases]
        pairs = zip(self.sessions, ends, strict=False)
        return tuple(start.name for start, end in pairs if start.step < min(end, releases))

    @property
    def seeded(self) -> bool:
        """Whether noise of this run follows from a seed."""
        return any(session.source != "entropy" for session in self.sessions)


def planned_course(contents: LedgerContents) -> tuple[Course, PoissonGaussian]:
    """The settings of every planned step, extensions among them, and the mechanism line's event.

    Raises:
        ValueError: if the ledger does not say how many steps were planned.
    """
    header = contents.header
    event = event_from_json(header["event"])
    assert isinstance(event, PoissonGaussian)  # the mechanism line was read
    if contents.course is not None:
        return contents.course, event
    steps, norm = header.get("planned_steps"), header.get("max_grad_norm")
    if not isinstance(steps, int) or steps < 1 or not isinstance(norm, int | float):
        raise ValueError("the ledger does not say how many steps were planned, or their clipping")
    plain = StepSettings(event.noise_multiplier, event.sample_rate, float(norm))
    return Course(((steps, plain),)), event


@dataclass(frozen=True)
class Scan:
    """A ledger that was read and found whole.

    Attributes:
        contents: what it says, a torn last line counted.
        complete: its lines, releases among them and the chain, without a torn last line.
        size: bytes of the complete lines.
        missing: the rest of a torn last line, where the count file proves what it was.
        torn: whether there is a torn last line.
    """

    contents: LedgerContents
    complete: Count
    size: int
    torn: bool = False
    missing: bytes | None = None


def ledger_path(path: str | Path) -> Path:
    """The ledger file of a run directory (or the file itself)."""
    given = Path(path)
    return given / LEDGER_NAME if given.is_dir() else given


def read_ledger(path: str | Path) -> LedgerContents:
    """Reads a ledger back. It may be growing meanwhile.

    Args:
        path: a run directory or a ledger file.

    Raises:
        ValueError: if there is none, it cannot be read, is damaged, or is not as long as its count
            file says.
    """
    try:
        file = ledger_path(path)
        if file.is_file():
            return scan(file).contents
    except OSError as error:
        raise ValueError(f"ledger={str(path)!r} cannot be read: {error.strerror}") from error
    where = f"pass a run directory that holds {LEDGER_NAME}, or that file"
    raise ValueError(f"ledger={str(path)!r}: no ledger there; {where}")


def holds_records(path: Path) -> bool:
    """Whether a release may have been made under this ledger: it has a complete line, or its count
    file says that it had.
    """
    count_file = count_path(path)
    if count_file.exists():
        count = read_count(count_file)
        if count is not None and count.lines:
            return True
    return path.is_file() and b"\n" in path.read_bytes()


def scan(file: Path) -> Scan:
    """Reads and checks a ledger file; see ``read_ledger``."""
    counts = count_path(file)
    # Twice, with the ledger in between: another process may be writing both.
    before = read_count(counts)
    whole = file.read_bytes()
    after = read_count(counts)
    *lines, tail = whole.split(b"\n")
    if (
        not lines
        and (before is None or not before.lines)
        and (before is not None or _is_start(tail))
    ):
        # No mechanism line was ever complete, so no release can have been made.
        return Scan(LedgerContents(), Count(), 0)
    if before is None or after is None:
        if not whole.startswith(b"{"):
            raise ValueError(
                f"ledger={str(file)!r} is no ledger of quietgrad; name a run's directory or its "
                "ledger.jsonl (for a new run, a place where nothing is yet)"
            )
        raise ValueError(
            f"ledger={str(file)!r} lacks its count file {counts.name!r}, so a shortened ledger "
            f"could not be told from a whole one; {REMEDY}"
        )
    growing = _Growing(file, {count.lines: count.chain for count in (before, after)})
    for number, line in enumerate(lines, start=1):
        growing.take(number, line)
    complete = growing.count
    missing = None
    if complete.lines < before.lines:
        missing = _rest_of_torn_line(growing.next_release, complete, before, tail)
        if missing is None:
            raise ValueError(
                f"ledger={str(file)!r} was shortened: it has {complete.lines} lines, and its count "
                f"file says that it had {before.lines}; {REMEDY}"
            )
    if complete.lines > after.lines + 1:
        raise ValueError(
            f"ledger={str(file)!r} has {complete.lines} lines, and its count file is that of "
            f"{after.lines}: they are not from the same moment; {REMEDY}"
        )
    torn = bool(tail)
    size = len(whole) - len(tail)
    return Scan(growing.contents(torn), complete, size, torn, missing)


def _is_start(tail: bytes) -> bool:
    """Whether a file without any line end can be a first line that was cut off, and not some other
    file.
    """
    first = b'{"line": 1, "type": "mechanism", '
    return tail.startswith(first) or first.startswith(tail)


def _rest_of_torn_line(
    next_release: Release, complete: Count, counted: Count, tail: bytes
) -> bytes | None:
    """What a torn last line lacks, if it was complete when it was counted: the line is made again,
    and the counted digest proves it.
    """
    if not tail or counted.lines != complete.lines + 1 or counted.releases != complete.releases + 1:
        return None
    line, digest = encoded(counted.lines, next_release, complete.chain)
    return line[len(tail) :] if digest == counted.chain and line.startswith(tail) else None


class _Growing:
    """What the lines so far say."""

    def __init__(self, file: Path, known: dict[int, str]) -> None:
        self._file = file
        self._known = known
        self._phase: PoissonGaussian | None = None
        self._said = LedgerContents()
        self._sessions: list[SessionStart] = []
        self._releases = 0
        self.count = Count()
        self._require_known(0, START)

    def take(self, number: int, line: bytes) -> None:
        try:
            fields, chain = decoded(line, number, self.count.chain)
            record = record_from_json(fields)
            self._add(record, fields)
        except ValueError as error:
            raise ValueError(
                f"ledger={str(self._file)!r} is damaged at line {number}: {error}; {REMEDY}"
            ) from error
        self._require_known(number, chain)
        self.count = Count(number, self._releases, chain)

    @property
    def next_release(self) -> Release:
        """The line that comes next, if it is a release."""
        return self._said.next_release(self._releases)

    def contents(self, torn: bool) -> LedgerContents:
        # A torn line may stand for a release whose noise exists: counted, whatever it was.
        releases = self._releases + (torn and self._phase is not None)
        event = None if self._phase is None or not releases else self._event(self._phase, releases)
        return replace(self._said, event=event, releases=releases, sessions=tuple(self._sessions))

    def _add(self, record: Record, fields: dict[str, object]) -> None:
        if isinstance(record, Mechanism):
            if self._phase is not None:
                raise ValueError("a second mechanism: a ledger holds the releases of one")
            self._phase = record.event
            header = {k: v for k, v in fields.items() if k != "line"}
            self._said = replace(self._said, header=header, course=record.course)
            return
        if self._phase is None:
            raise ValueError("it comes before the mechanism line")
        if isinstance(record, _OF_A_STEP) and record.step != self._releases:
            raise ValueError(
                f"it is of step {record.step}, and {self._releases} releases come before it"
            )
        if isinstance(record, Release):
            self._require_planned(record)
            self._releases += 1
        elif isinstance(record, Extension):
            self._extend(record)
        elif isinstance(record, SessionStart):
            self._sessions.append(record)
        elif isinstance(record, NoiseBlock):
            self._said = replace(
                self._said, noise_block=(record.step, record.mixing), noise_drawn=None
            )
        elif isinstance(record, NoiseDrawn):
            self._said = replace(self._said, noise_drawn=record.how)
        elif isinstance(record, ClippingNorm):
            self._said = replace(self._said, max_grad_norm=record.max_grad_norm)
        elif isinstance(record, EarlierRun):
            runs = (*self._said.started_from, record.record)
            self._said = replace(self._said, started_from=runs)
        elif isinstance(record, PrivacyGivenUp):
            self._said = replace(self._said, not_private=record.reason)

    def _event(self, phase: PoissonGaussian, releases: int) -> PrivacyEvent:
        course = self._said.course
        if course is None:
            return phase.after(releases)
        if releases > course.steps:  # of a torn line after the last: nobody knows, so the worst
            course = course.then(course.worst(releases - course.steps))
        return course.event(phase.clipping, phase.bands).after(releases)

    def _require_planned(self, record: Release) -> None:
        """A release has the noise and the rate that were planned for it; its clipping norm may
        follow what was released.
        """
        if record.torn or (record.settings is None and self._said.course is None):
            return
        course = self._said.course
        planned = None if course is None else course.at(record.step)
        made = record.settings
        one = self._phase
        if made is None and planned and one and "course" not in self._said.header:
            # without settings: those of the mechanism line
            made = StepSettings(one.noise_multiplier, one.sample_rate, planned.max_grad_norm)
        if (
            planned is None
            or made is None
            or replace(made, max_grad_norm=planned.max_grad_norm) != planned
        ):
            raise ValueError(f"release {record.step} has other settings than were planned for it")

    def _extend(self, record: Extension) -> None:
        course, event = planned_course(self._said)
        if event.beside:  # a course counts the gradients alone
            raise ValueError(
                "an extension, and numbers beside the gradients that it does not count"
            )
        extensions = (*self._said.extensions, record)
        course = course.then(record.course)
        self._said = replace(self._said, course=course, extensions=extensions)

    def _require_known(self, number: int, chain: str) -> None:
        if self._known.get(number, chain) != chain:
            raise ValueError(
                f"ledger={str(self._file)!r} is not the one that its count file is of: line "
                f"{number} has another digest; {REMEDY}"
            )
