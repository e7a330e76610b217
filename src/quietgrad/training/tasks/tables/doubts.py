"""What the public rows of a table say of columns that may be read otherwise than meant."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from quietgrad.checks import SettingsWarning
from quietgrad.training.sources.numerals import are_dates, are_unclear_numbers

FEW = 20  # public cells of which nothing is said


def tell_doubts(
    commas: Sequence[str], categories: Mapping[str, Sequence[str]], source: str
) -> None:
    """Warns of columns; one warning for all with the same doubt.

    Args:
        commas: columns read as numbers with a decimal comma.
        categories: column read as categories -> its public cells that are not empty.
        source: where they came from.
    """
    unclear = _where(categories, are_unclear_numbers)
    once = [name for name in _where(categories, _mostly_once) if name not in unclear]
    dates = [name for name in once if are_dates(categories[name])]
    others = [name for name in once if name not in dates]
    _tell(commas, source, "numbers with a decimal comma; 3,14 is read as 3.14", "hold")
    _tell(
        unclear,
        source,
        "numbers with commas, of which one way of reading is not sure, and read as categories; "
        "write 1234.5 in place of 1,234.5 or 1234,5 to learn from numbers",
        "hold",
    )
    says = "read as categories, most of which are in one public row alone and say little of others"
    _tell(dates, source, f"dates, {says}; write what shall count as a number, such as days", "hold")
    _tell(others, source, f"{says}; leave out what names a row, or write numbers or classes", "are")


def _mostly_once(cells: Sequence[str]) -> bool:
    return len(cells) > FEW and 2 * len(set(cells)) > len(cells)


def _where(
    columns: Mapping[str, Sequence[str]], asked: Callable[[Sequence[str]], bool]
) -> list[str]:
    return [name for name, cells in columns.items() if asked(cells)]


def _tell(names: Sequence[str], source: str, what: str, verb: str) -> None:
    if not names:
        return
    of = f"column {names[0]!r} of {source!r} {({'hold': 'holds', 'are': 'is'})[verb]}"
    if len(names) > 1:
        of = f"{len(names)} columns of {source!r}, such as {names[0]!r}, {verb}"
    warnings.warn(f"{of} {what}", SettingsWarning, stacklevel=4)
