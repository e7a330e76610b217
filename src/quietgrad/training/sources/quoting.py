"""Quotation marks of tables, as Python's ``csv`` reads them: a mark that one row leaves open takes
rows of others for its own.
"""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Iterator


def is_told_apart(lines: list[str], separator: str = ",") -> bool:
    """Whether the lines of one row hold no other's: its quotation marks close, and where it is of
    several lines they close where cells end. One that closes within a cell is that cell's own.
    """
    if not any('"' in line for line in lines):
        return True
    # With an open one, a line more would belong to the same row.
    closed = len(list(csv.reader([*lines, "."], delimiter=separator))) > 1
    with contextlib.suppress(csv.Error):
        return closed and bool(list(csv.reader(lines, delimiter=separator, strict=len(lines) > 1)))
    return False


@contextlib.contextmanager
def any_length() -> Iterator[None]:
    """A cell may be as long as it is; Python's reader stops at 131072 letters by itself."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)
