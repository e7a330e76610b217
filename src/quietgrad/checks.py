"""Checks of user input: each names the argument, its value and the remedy, and raises before any
work starts.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar

Word = TypeVar("Word", bound=str)


class SettingsWarning(UserWarning):
    """Settings that run as asked, and serve less well than others would."""


class RoundingWarning(SettingsWarning):
    """Half precision on private records: no bound covers what it may do to crowds of them."""


def warn_of_half_precision(setting: str, remedy: str) -> None:
    """In half precision a record's gradient follows in its last digits from what stands beside it,
    far more than in float32 (docs/privacy/clipping.md).

    Args:
        setting: name and value.
        remedy: what to set instead.
    """
    warnings.warn(
        f"{setting} rounds coarsely: what that does to crowds of records that are alike, "
        "epsilon does not cover (docs/privacy/clipping.md, what remains); "
        f"{remedy} has a bound",
        RoundingWarning,
        stacklevel=3,
    )


def shown(value: object) -> str:
    """A value in a message. What is given in the place of a number or a word by mistake, such as a
    data set, holds records: of it the kind alone is told.
    """
    if value is None or isinstance(value, Real) or (isinstance(value, str) and len(value) < 200):
        return repr(value)
    return f"<{type(value).__qualname__}>"


def require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={shown(value)} must be a whole number")


def require_finite(name: str, value: object) -> None:
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not math.isfinite(as_float(name, value)):  # type: ignore[arg-type]
        raise ValueError(f"{name}={shown(value)} must be a finite number")


def as_float(name: str, value: Real) -> float:
    """``value`` as a float; ValueError for a whole number that has none."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} is a whole number beyond 1e308 in size; use a smaller one"
        ) from None


def as_plain(value: float) -> float:
    """A number as Python's own. numpy's short floats round all that is computed with them, and its
    short whole numbers start again at 0.
    """
    return int(value) if isinstance(value, Integral) else float(value)


def make_plain(record: object, *names: str) -> None:
    """Fields of a frozen record ``as_plain``."""
    for name in names:
        object.__setattr__(record, name, as_plain(getattr(record, name)))


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)} must be True or False")


def require_positive(name: str, value: object, remedy: str = "pass a number above 0") -> None:
    require_finite(name, value)
    if float(value) <= 0:  # type: ignore[arg-type]
        raise ValueError(f"{name}={value!r} must be positive; {remedy}")


def require_at_least(name: str, value: float, smallest: float, remedy: str) -> None:
    if value < smallest:
        raise ValueError(f"{name}={value!r} is below {smallest}: {remedy}")


def require_rate(name: str, value: object) -> None:
    require_finite(name, value)
    if not 0 < float(value) <= 1:  # type: ignore[arg-type]
        raise ValueError(
            f"{name}={value!r} must be in (0, 1]: it is expected batch size over number of records"
        )


def require_delta(name: str, value: object) -> None:
    require_finite(name, value)
    if not 0 < float(value) < 1:  # type: ignore[arg-type]
        raise ValueError(
            f"{name}={value!r} must be in (0, 1); a usual choice is below 1 over the number of "
            "records"
        )


# Of a delta for any number of records: with probability delta a mechanism may publish everything.
LARGEST_DELTA = 0.1


def require_delta_for(name: str, value: object, dataset_size: int) -> None:
    """That a delta is of use for so many records.

    Raises:
        ValueError: for delta of at least 1/N, which a mechanism meets that publishes one record
            outright (at "epsilon 0"), or of at least 0.1.
    """
    require_delta(name, value)
    limit = min(1 / dataset_size, LARGEST_DELTA)
    if float(value) >= limit:  # type: ignore[arg-type]
        bound = f"1/{dataset_size}" if limit < LARGEST_DELTA else f"{LARGEST_DELTA}"
        why = (
            f"1/{dataset_size}, one over the number of records: a mechanism that publishes one "
            "record outright would meet it"
            if limit < LARGEST_DELTA
            else f"{LARGEST_DELTA}: with that probability a mechanism may publish everything"
        )
        raise ValueError(
            f"{name}={value!r} is not below {why}; use less than {bound} (the default is "
            f"{default_delta(dataset_size):.2g})"
        )


def default_delta(dataset_size: int) -> float:
    """1 / N^1.1, and at most 0.01 where there are few records."""
    return min(dataset_size**-1.1, LARGEST_DELTA / 10)


def require_word(name: str, value: object, valid: tuple[Word, ...]) -> Word:
    """``value`` as one of the valid words."""
    for word in valid:
        if word == value:
            return word
    raise ValueError(f"{name}={shown(value)} is unknown; use one of {', '.join(valid)}")


def require_at_most_one(given: Mapping[str, object], where: str = "") -> None:
    """That of settings of which each decides what the other does, no two are given."""
    both = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if len(both) > 1:
        raise ValueError(
            f"{' and '.join(both)} are both given{where}, and each decides what the other does; "
            "take one out"
        )


def how_many(number: int, word: str) -> str:
    """ "1 record", "2 records": a number before a word whose plural ends in s."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(words: Iterable[str], last: str = "or") -> str:
    """'a', 'b or c' ... in one line."""
    *before, final = list(words)
    return f"{', '.join(before)} {last} {final}" if before else final


# What other libraries call a setting, where no likeness of letters leads from there to its name.
ELSEWHERE = {
    "batch_size": "expected_batch_size",
    "delta": "target_delta",
    "eps": "target_epsilon",
    "epsilon": "target_epsilon",
    "lr": "learning_rate",
    "sigma": "noise_multiplier",
    "wd": "weight_decay",
}


def nearest(word: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the closest valid word, or the list of valid ones."""
    options = list(valid)
    if ELSEWHERE.get(word) in options:
        return f"; did you mean {ELSEWHERE[word]!r}?"
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(options)}"


def require_no_home(name: str, place: str | Path) -> None:
    """Refuses a place of a run's files that leads elsewhere than it reads.

    Raises:
        ValueError: with the remedy.
    """
    if str(place).startswith("~"):
        raise ValueError(
            f"{name}={str(place)!r} begins with ~, which a shell alone takes for a home: here it "
            "is a folder below the current one, and from another the run would begin anew; give "
            f"{os.path.expanduser(place)!r}, or {os.path.abspath(place)!r} for a folder of that "
            "name"
        )
