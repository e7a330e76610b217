"""Removing a ledger under which nothing was released, while nobody else can begin to release."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from quietgrad.durable import lock
from quietgrad.ledger.chain import count_path
from quietgrad.ledger.reader import scan

# Whether the system takes an open file's name away. Windows does not, where nothing is locked.
WHILE_OPEN = os.name != "nt"


def remove_if_unreleased(path: Path, also: Callable[[], None] = lambda: None) -> bool:
    """Removes a ledger and its count file, unless it counts a release or says that privacy was
    given up. A ledger that somebody has opened stays: between a look and the removal a release
    could be made, and nobody would count it.

    Args:
        path: of the ledger file.
        also: removes what belongs to it, such as its secrets, under the same lock.

    Returns:
        Whether it was removed.
    """
    try:
        file = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    except OSError:
        return False
    try:
        # Whoever opens it from here on finds it locked, or that its name leads elsewhere.
        lock(file, str(path), "")
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            return False
        left = scan(path).contents
        if left.releases or left.not_private is not None:
            return False
        also()
        if WHILE_OPEN:
            _unlink(path)
    except (ValueError, FileNotFoundError):  # in use, or what it counts is not known
        return False
    finally:
        os.close(file)
    try:
        if not WHILE_OPEN:
            _unlink(path)
    except PermissionError:  # somebody else has it open
        return False
    return True


def _unlink(path: Path) -> None:
    path.unlink()
    count_path(path).unlink(missing_ok=True)
