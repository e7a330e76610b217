"""Which cases of a test with many ``make test`` runs; ``make test-all`` runs them all."""

from __future__ import annotations


def kept(cases: int, keep: int) -> set[int]:
    """Of cases 0 .. cases - 1: the first, the last and those evenly between, ``keep`` in all; of a
    single one the middle.
    """
    last = cases - 1
    return {round(i * last / (keep - 1)) for i in range(keep)} if keep > 1 else {last // 2}
