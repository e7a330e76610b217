"""Files that have to outlast a kill or a power cut: written whole, on disk before the call returns,
and locked against a second process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

IN_USE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def replacing(path: Path, secret: bool = False, previous: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write; when the block ends its contents take the place of ``path``, synced to disk
    with their name.

    Args:
        path: what to replace; the temporary file beside it is ``<name>.tmp``.
        secret: readable by its owner alone, from the first byte on.
        previous: where what was at ``path`` goes, instead of being lost.

    Raises:
        OSError: if the disk is full or cannot be written; ``path`` is as it was, or, where its name
            was all that could not be changed, what it held is at ``previous``.
    """
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o666
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, contents: bytes, secret: bool = False) -> None:
    """Replaces a file; see ``replacing``."""
    with replacing(path, secret) as file:
        file.write(contents)


def temporary_of(path: Path) -> Path:
    """Where a file is put together before it takes its place; a kill leaves it behind."""
    return path.with_name(path.name + ".tmp")


def is_intact_archive(path: Path) -> bool:
    """Whether a zip archive, such as ``torch.save`` writes, is there with the checksums of all its
    parts. torch itself does not look at them when it loads.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        return False


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing, each on disk with its name."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def require_open_folder(option: str, path: Path) -> None:
    """Before any work: that a file can be made where it shall go.

    Raises:
        ValueError: where its folder, which is there, cannot be written to.
    """
    if not os.access(path.absolute().parent, os.W_OK):
        raise ValueError(
            f"{option}={str(path)!r}: its folder cannot be written to; name a file in another"
        )


def sync_folder(folder: Path) -> None:
    """Puts a folder's names on disk: a new or renamed file has to outlast a power cut under its
    name, too.
    """
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(descriptor: int, name: str, remedy: str) -> None:
    """Takes the lock of an open file for this process, until the file is closed. Where Python has
    no ``fcntl`` (Windows) nothing is locked.

    Args:
        descriptor: of the open file.
        name: what the message calls it, such as ``ledger='run/ledger.jsonl'``.
        remedy: what to do where another process holds it.

    Raises:
        ValueError: if another process holds it, or the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in IN_USE:
            raise ValueError(
                f"{name} is in use by another process, or by an open run of this one; {remedy}"
            ) from error
        raise ValueError(
            f"{name} cannot be locked ({error.strerror}), so two processes could write it; use a "
            "file system with locks, such as a local disk"
        ) from error


def close_locked(descriptor: int, process: int) -> None:
    """Closes a file and gives up its lock, which closing alone would leave with forks of this
    process, such as workers that read records, for as long as they live.

    Args:
        descriptor: of the open file.
        process: the one that locked it; a fork of it leaves the lock alone.
    """
    if os.getpid() == process:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, none without the file. A kill may have cut a line off:
    what is no object is left out.
    """
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found += [record] if isinstance(record, dict) else []
    return found
