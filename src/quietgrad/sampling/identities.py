"""What the owner of a record is known by, whatever wrote the owners down."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

# How tools write a gap as text (pandas, R, spreadsheets, data bases): the records of everybody
# without a name would be one user's.
_OF_PANDAS = ("nan", "NaN", "NAN", "-nan", "-NaN", "None", "null", "NULL", "<NA>", "NaT")
GAPS = frozenset((*_OF_PANDAS, "NA", "N/A", "n/a", "#N/A", "#NA", r"\N"))
# Whole numbers up to which each has a float of its own; above, two users would be one.
EXACT_FLOATS = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
# A number that a spreadsheet or a float has rounded: all users whose numbers begin alike are one.
_ROUNDED = re.compile(r"-?[0-9](\.[0-9]+)?[eE]\+[0-9]+")
_NUMBERS = re.compile(r"(u?int|b?float)[0-9]+")


def identities_of(owners: Iterable[Any], name: str = "record_owner") -> list[bytes]:
    """[records] what each record's owner is known by: a name without white space around it, in
    one Unicode form (NFC); a whole number without a point, also where it is text.

    Raises:
        ValueError, TypeError: as ``UserRecords.of``.
    """
    if isinstance(owners, str | bytes):
        raise TypeError(f"{name} is a single text; give one owner for every record, as a list")
    values: Sequence[Any] = owners.tolist() if hasattr(owners, "tolist") else list(owners)
    limit = _exact_in(owners)
    limits = [min(limit or 2**53, _exact_in(value) or 2**53) for value in values]
    known = limit is not None
    told = [known or _exact_in(value) is not None for value in values]
    values = [value.item() if _is_tensor_of_one(value) else value for value in values]
    if any(is_missing(value) for value in values):
        raise ValueError(
            f"{name} has no owner for some record (None, NaN or an empty text, or such a word as "
            "'nan' that a tool wrote for one), and a record of "
            "nobody's is protected by nobody's bound; fill in the owners, or leave such records "
            "out of the data set"
        )
    kinds = {_kind(value, most) for value, most in zip(values, limits, strict=True)}
    if None in kinds or _were_float32(
        value for value, is_told in zip(values, told, strict=True) if not is_told
    ):
        raise TypeError(
            f"{name} holds values that are neither text nor whole numbers (or floats so large that "
            "two numbers may be one, also as text: 1.2e+18, or of float32 above 16777216); give "
            "one owner for every record, such as a user's name, or number as an integer with all "
            "its digits"
        )
    if len(kinds) > 1:
        raise TypeError(
            f"{name} mixes text and numbers, so that one user may count as two (1 and '1'); give "
            "all owners as text"
        )
    return [_identity(value) for value in values]


def _exact_in(values: Any) -> int | None:
    """Up to which whole number each has a float of its own, in the type of an array, a column or a
    number; None where no type is told.
    """
    told = getattr(values, "dtype", None)
    if told is None:
        return None
    name = str(told).rpartition(".")[2].lower()
    return EXACT_FLOATS.get(name, 2**53) if _NUMBERS.fullmatch(name) else None


def _is_tensor_of_one(value: Any) -> bool:
    """Whether it is a number as torch gives it."""
    return (
        hasattr(value, "item")
        and getattr(value, "shape", None) == ()
        and not (isinstance(value, Real | np.generic))
    )


def _were_float32(values: Iterable[Any]) -> bool:
    """Whether floats (or whole numbers with a point, as text) that say nothing of their type have
    all been rounded to float32: of numbers above 2^24 that were not, some have not.
    """
    large = [
        number
        for value in values
        if (number := _with_a_point(value)) is not None and abs(number) >= EXACT_FLOATS["float32"]
    ]
    return bool(large) and all(float(np.float32(number)) == number for number in large)


def _with_a_point(value: Any) -> float | None:
    if isinstance(value, float):
        return value
    text = (_text_of(value) or "").strip()
    return float(text) if _WHOLE.fullmatch(text) else None


def is_missing(value: Any) -> bool:
    """Whether a cell names no owner: it is empty, or a word that a tool wrote for an empty one."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return True
    text = _text_of(value)
    if text is not None:
        return not text.strip() or text.strip() in GAPS
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _kind(value: Any, limit: int) -> str | None:
    if isinstance(value, str | bytes):
        rounded = _is_rounded((_text_of(value) or "").strip())
        return None if rounded else "text" if isinstance(value, str) else "bytes"
    if isinstance(value, bool | np.bool_):
        return None
    whole = isinstance(value, Integral) or (
        isinstance(value, Real) and abs(float(value)) < limit and float(value).is_integer()
    )
    return "number" if whole else None


def _is_rounded(text: str) -> bool:
    number = _WHOLE.fullmatch(text)
    digits = "" if number is None else number[1].lstrip("-0")
    # Python reads no number of thousands of digits, and says how many there are.
    many = len(digits) > len(str(2**53)) or int(digits or "0") >= 2**53
    return bool(_ROUNDED.fullmatch(text)) or many


def _text_of(value: Any) -> str | None:
    """Of text, and of bytes where they read as some: HDF5 and numpy's "S" give text so."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value if isinstance(value, str) else None


def _identity(value: Any) -> bytes:
    if isinstance(value, str):
        value = unicodedata.normalize("NFC", value).strip()
        number = _WHOLE.fullmatch(value)  # 7.0 of a file that was saved with gaps is 7
        value = (number[1] if number else value).encode("utf-8", "surrogatepass")
    elif not isinstance(value, bytes):  # 7.0 of a table with gaps is 7
        value = str(int(value)).encode()
    return hashlib.sha256(value).digest()
