"""Seeds: which are long enough to be secret, and that none starts two runs.

With a seed all coins and all noise follow from it, so who finds the seed can subtract the noise,
and two runs with one seed give away the difference of their data. A seed of few bits is found by
trying. So where data are private a seed has at least 128 bits, looks drawn rather than typed, and
starts one run; where they are declared public none of this matters.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

from quietgrad.checks import require_at_least, require_int
from quietgrad.randomness import RandomKey

BITS = 128
DIGITS = BITS // 4
# Of 32 hexadecimal digits drawn at random fewer are different with probability below 4e-8, and of
# their 31 steps, modulo 16, with probability below 8e-8.
LEAST_DIFFERENT = 8
REMEDY = (
    "leave the seed out (the noise then comes from the operating system), or give one of at least "
    "128 bits, drawn for this run alone and kept secret, such as what "
    "python -c 'import secrets; print(secrets.token_hex(16))' prints, as a string; for data that "
    "are public set data_are_public=True (data.public = true)"
)

Seed = int | str


def key_of_seed(seed: Seed, start: str = "") -> RandomKey:
    """The root of all streams that a seed stands for; a hexadecimal string stands for its number.
    ``start``: see ``RandomKey.from_seed``.

    Raises:
        TypeError, ValueError: for what is no seed.
    """
    return RandomKey.from_seed(_number(seed), start)


def root_key(seed: Seed | None) -> RandomKey:
    """The key of a seed, or a fresh one from the operating system."""
    return RandomKey.from_entropy() if seed is None else key_of_seed(seed)


def beginning_of(seed: Seed | None) -> int:
    """What torch's generator is seeded with before a model is made, for weights that begin at
    random; no secret, as it draws neither coins nor noise.
    """
    return root_key(seed).words("initialisation", 0)[0] & (2**63 - 1)


def require_secret_seed(seed: Seed) -> None:
    """Refuses a seed that could be found by trying. The rule: a string of at least 32 hexadecimal
    digits, leading zeros counted, or a whole number of at least 2^127; at least 8 different digits,
    and as many different steps from one to the next (not 0123...); not one half twice.

    Raises:
        TypeError, ValueError: with the remedy. The seed itself is in no message.
    """
    number = _number(seed)
    digits = seed if isinstance(seed, str) else f"{number:x}"
    long = len(digits) >= DIGITS if isinstance(seed, str) else number >= 2 ** (BITS - 1)
    if not long or _looks_typed([int(digit, 16) for digit in digits]):
        short = "has fewer than 128 bits" + (
            ""
            if isinstance(seed, str)
            else " (a whole number counts from 2^127 on; a string, by its digits)"
        )
        what = (
            short
            if not long
            else "looks typed rather than drawn (few different digits, or a pattern of them)"
        )
        raise ValueError(
            f"the seed {what}, so it could be guessed and the noise subtracted: {REMEDY}"
        )


def _looks_typed(digits: list[int]) -> bool:
    """Of at least 32 digits. Drawn ones do with probability below 1.2e-7."""
    steps = {(after - before) % 16 for before, after in itertools.pairwise(digits)}
    begins_again = any(
        digits[period:] == digits[:-period] for period in range(1, len(digits) // 2 + 1)
    )
    return min(len(set(digits)), len(steps)) < LEAST_DIFFERENT or begins_again


@dataclass
class SeedUse:
    """What this process made with a seed.

    Attributes:
        ledger: of the run; None without one.
        releases: that it made, earlier sessions with the same ledger counted.
    """

    ledger: Path | None
    releases: int


# Digest of a key -> its use. Of the process, not of a plan: two plans with one seed draw the same
# numbers.
_uses: dict[bytes, SeedUse] = {}


def claim_seed(key: RandomKey, ledger: str | Path | None, releases: int) -> SeedUse:
    """Notes that a run with a secret seed starts. Only the run's own ledger, with all its releases,
    goes on with it.

    Args:
        key: of the seed.
        ledger: of the run, if it keeps one.
        releases: what the ledger holds.

    Returns:
        The use, for the run to count its releases in.

    Raises:
        ValueError: if this process has started a run with that seed already.
    """
    name = hashlib.sha256(b"quietgrad seed in use\0" + key.root).digest()
    place = None if ledger is None else Path(ledger).resolve()
    use = _uses.get(name)
    if use is None:
        return _uses.setdefault(name, SeedUse(place, releases))
    if place is None or use.ledger != place:
        raise ValueError(
            "this seed has started a run already, and the same seed draws the same noise: the "
            "difference of two releases would be the data. Give every run a seed of its own, or go "
            "on "
            "with the first run by its ledger; for data that are public set data_are_public=True "
            "(data.public = true)"
        )
    if releases < use.releases:
        raise ValueError(
            f"ledger={str(ledger)!r} holds fewer releases than were made with this seed, so their "
            "noise would be drawn again; restore the ledger, or begin a run with another seed"
        )
    return use


def _number(seed: object) -> int:
    if isinstance(seed, str):
        if not seed or not all(digit in "0123456789abcdefABCDEF" for digit in seed):
            raise ValueError(
                "seed is a string that is not made of hexadecimal digits alone; see "
                "secrets.token_hex(16)"
            )
        return int(seed, 16)
    require_int("seed", seed)
    assert isinstance(seed, int) or hasattr(seed, "__index__")
    number = int(seed)
    require_at_least("seed", number, 0, "use a whole number of at least 0")
    return number
