"""What cells say that are written as numbers or dates are, in the ways of several countries."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

WITH_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?", re.ASCII)
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+", re.ASCII)  # 1,234 may be 1234 or 1.234
DATE = re.compile(r"(\d{4}([-./])\d{1,2}\2\d{1,2}|\d{1,2}([-./])\d{1,2}\3\d{2,4})\b.*", re.ASCII)


def number_of(cell: str) -> float | None:
    """A finite number as programs write it; None for any other cell."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Commas:
    """How numbers of a column are read that are written with a decimal comma.

    Attributes:
        grouped: points stand between thousands, as in 1.234,50; else no cell with a point is a
            number.
    """

    grouped: bool

    @classmethod
    def of(cls, cells: Sequence[str]) -> Commas | None:
        """Where every cell is a number in this way, and a comma that stands in one of them cannot
        be one between thousands. To decide how other cells are read, pass public cells alone.
        """
        if not all(map(WITH_COMMA.fullmatch, cells)):
            return None
        if not any("," in cell and not THOUSANDS.fullmatch(cell) for cell in cells):
            return None
        return cls(any("." in cell for cell in cells))

    def number_of(self, cell: str) -> float | None:
        """None for a cell that is no number in this way."""
        if not WITH_COMMA.fullmatch(cell) or ("." in cell and not self.grouped):
            return None
        return number_of(cell.replace(".", "").replace(",", "."))


def are_unclear_numbers(cells: Sequence[str]) -> bool:
    """Whether all cells look like numbers, and commas in them say no one thing."""
    return all(
        WITH_COMMA.fullmatch(cell) or THOUSANDS.fullmatch(cell) or number_of(cell) is not None
        for cell in cells
    )


def are_dates(cells: Sequence[str]) -> bool:
    """Whether all cells look like dates in figures, with a time or without."""
    return all(map(DATE.fullmatch, cells))
