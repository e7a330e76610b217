"""What a guarantee means, in sentences for people who do not know what epsilon is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quietgrad.accounting import advantage
from quietgrad.events import PrivacyEvent, unit_of


def right_guesses(event: PrivacyEvent) -> float:
    """Upper bound of how often an attacker is right who says whether a fair coin put one record (or
    user) into the data: (1 + delta(0)) / 2, by the trade-off between the two errors.
    """
    return min(1.0, (1.0 + advantage(event)) / 2.0)


def in_words(event: PrivacyEvent, neighbouring: str) -> str:
    """One sentence on what an attacker can do, in whole percent, rounded up."""
    unit = unit_of(neighbouring)
    percent = math.ceil(100.0 * right_guesses(event) - 1e-9)
    return (
        f"who knows all other {unit}s, sees every step and the model, and is asked whether one "
        f"{unit} was there (a coin decided), is right at most {percent} times in 100; guessing "
        "is right 50 times"
    )


def what_stands_for_a_user(facts: Mapping[str, Any]) -> str:
    """What of a user's records is used and clipped, after "one user of the training data"; "" where
    records are protected.

    Args:
        facts: the ledger's first line, a result, or what saved weights say of their training; those
            written before there was more name ``neighbouring`` alone.
    """
    if unit_of(facts["neighbouring"]) != "user":
        return ""
    said = ", with all records of that user"
    if most := facts.get("records_per_user"):
        how = {"fixed": ", always the same ones", "fresh": ", drawn anew in every step"}
        which = how.get(facts.get("choice", ""), "")
        said += f": at most {most} of them are used in a step{which}"
        if combined := facts.get("combined"):
            said += f", and the {combined} of their gradients is clipped"
    return said
