"""Neighbouring relations: what two data sets differ by that an epsilon cannot tell apart."""

from __future__ import annotations

ADD_REMOVE, ZERO_OUT = "add-remove", "zero-out"
ADD_REMOVE_USER = "add-remove-user"
# In words. Parts that a record's index decides stay as they are only if its place stays, empty.
RELATIONS = {
    ADD_REMOVE: "add or remove one record",
    ZERO_OUT: "leave one record's place empty",
    ADD_REMOVE_USER: "add or remove one user, with all records",
}


def unit_of(relation: str) -> str:
    """What an epsilon under a neighbouring relation protects, in one word: "record" or "user"."""
    return "user" if relation == ADD_REMOVE_USER else "record"


def per_unit(relation: str) -> str:
    """What is put behind a number of epsilon in a short line: that it is a user's, where it is."""
    return " per user" if relation == ADD_REMOVE_USER else ""
