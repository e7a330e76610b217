"""A part of a parameter, as a process holds it that does not hold the whole."""

from __future__ import annotations

from typing import NamedTuple


class Stretch(NamedTuple):
    """A part of a parameter, in the order of its memory.

    Attributes:
        start: which entry is its first.
        whole: entries of the parameter.
    """

    start: int
    whole: int


class Columns(NamedTuple):
    """Some columns of a matrix, or of some of its rows, as a process holds them that does not hold
    the whole.

    Attributes:
        start, stop: which columns.
        width: how many there are.
        whole: entries of the parameter.
        first: which row is the first.
    """

    start: int
    stop: int
    width: int
    whole: int
    first: int = 0
