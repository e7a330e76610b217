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
