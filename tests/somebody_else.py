"""Files that this process may not read, whoever runs the tests: root becomes somebody else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users and modes")


@contextlib.contextmanager
def kept_from(path: Path) -> Iterator[None]:
    """Within it a file or folder may not be read, and what is beside it may. What is imported in it
    has to be imported already.
    """
    mode = path.stat().st_mode
    path.chmod(0o700 if os.geteuid() == 0 else 0)
    try:
        if os.geteuid():
            yield
        else:
            with _as_nobody(path):
                yield
    finally:
        path.chmod(stat.S_IMODE(mode))


@contextlib.contextmanager
def _as_nobody(path: Path) -> Iterator[None]:
    for folder in path.parents:  # pytest's are for their owner alone
        here = folder.stat()
        wanted = stat.S_IXOTH | stat.S_IROTH | stat.S_IXGRP | stat.S_IRGRP  # the group stays
        if here.st_uid == 0 and here.st_mode & wanted != wanted and "pytest" in str(folder):
            folder.chmod(stat.S_IMODE(here.st_mode) | wanted)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
