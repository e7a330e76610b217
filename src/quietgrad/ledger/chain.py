"""How a line is written, and what a second file beside the ledger keeps: how many lines there are,
and the digest of all of them.

A line carries its number and the SHA-256 of the chain up to it: of the digest before and its own
bytes. So a lost, moved, repeated or changed line is noticed. Lines cut off at the end are noticed
by the count file. Neither defends against somebody who rewrites both files: digests are no secret.

The count file holds two slots of fixed length, written in turn, each with a digest of its own: a
write that is cut off damages one slot and leaves the other, the count before.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from quietgrad.durable import sync_folder, write_whole
from quietgrad.ledger.records import Record

START = hashlib.sha256(b"quietgrad ledger, format 2").hexdigest()
SLOT = 256  # bytes, well above what two numbers and two digests take
_SEPARATOR = b', "chain": "'
_TAIL = len(_SEPARATOR) + 64 + len(b'"}')


def encoded(number: int, record: Record, before: str) -> tuple[bytes, str]:
    """One line with its end, and the chain's digest after it."""
    body = json.dumps({"line": number, **record.to_json()}).encode()
    digest = _digest(before, body)
    return body[:-1] + _SEPARATOR + digest.encode() + b'"}\n', digest


def decoded(line: bytes, number: int, before: str) -> tuple[dict[str, object], str]:
    """A line's record and the chain's digest after it.

    Raises:
        ValueError: if the line has another number, or is not the one that was written after those
            before it.
    """
    if line[-_TAIL : -_TAIL + len(_SEPARATOR)] != _SEPARATOR:
        raise ValueError("it is not a line of a ledger of this version, or it was changed")
    body, digest = line[:-_TAIL] + b"}", line[-66:-2].decode("ascii", "replace")
    record = json.loads(body)
    if record.get("line") != number:
        raise ValueError(
            f"it says that it is line {record.get('line')!r}: lines are missing, repeated or moved"
        )
    if _digest(before, body) != digest:
        raise ValueError(
            "its digest is not that of the lines up to here: it, or one before it, was changed"
        )
    return record, digest


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + b"\n" + body).hexdigest()


@dataclass(frozen=True)
class Count:
    """What was on disk when the count was written: number of lines, releases among them, and the
    chain's digest.
    """

    lines: int = 0
    releases: int = 0
    chain: str = START


def count_path(ledger: Path) -> Path:
    """The count file of a ledger."""
    return ledger.with_name(ledger.name + ".count")


def read_count(path: Path) -> Count | None:
    """The newest count of a count file; None where there is no file.

    Raises:
        ValueError: if both slots are damaged.
    """
    try:
        contents = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(
            f"count={str(path)!r} cannot be read ({error.strerror or error}); put the count file "
            "of this ledger in its place, or begin a new run directory"
        ) from error
    counts = [
        c
        for c in (_from_slot(contents[i * SLOT : (i + 1) * SLOT]) for i in (0, 1))
        if c is not None
    ]
    if not counts:
        raise ValueError(
            f"count={str(path)!r} is damaged: it does not say how long the ledger was, so a "
            "shortened ledger could not be told from a whole one; restore both files from the "
            "same moment, or begin a new run directory: nothing can be claimed of this one"
        )
    return max(counts, key=lambda count: count.lines)


def create_count(path: Path) -> None:
    """A count of nothing, on disk with its name before the call returns."""
    write_whole(path, _slot(Count()) + _slot(Count()))


class CountWriter:
    """Keeps the count file of a ledger open. One write and one sync a count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        sync_folder(path.parent)

    def write(self, count: Count) -> None:
        """Overwrites the older slot; on disk before the call returns."""
        os.lseek(self.descriptor, (count.lines % 2) * SLOT, os.SEEK_SET)
        write_all(self.descriptor, _slot(count))
        os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def write_all(descriptor: int, contents: bytes) -> None:
    """``os.write`` until everything is written; it may stop short where the disk is nearly full."""
    rest = memoryview(contents)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _slot(count: Count) -> bytes:
    body = json.dumps({"lines": count.lines, "releases": count.releases, "chain": count.chain})
    text = f"{body} {hashlib.sha256(body.encode()).hexdigest()}"
    return text.encode().ljust(SLOT - 1) + b"\n"


def _from_slot(slot: bytes) -> Count | None:
    body, _, digest = slot.rstrip(b" \n").rpartition(b" ")
    if not body or hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    record = json.loads(body)
    return Count(int(record["lines"]), int(record["releases"]), str(record["chain"]))
