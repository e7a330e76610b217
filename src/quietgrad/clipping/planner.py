"""Which norm estimator each matrix parameter gets: the cheapest exact one, or a sketch where the user asked for it.

Modelled costs per example (docs/methods, section 1): materialized t p d multiplications, ghost t^2 (p + d), hutch t k (p + d). Both exact
ones are evaluated in blocks, so memory does not decide between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Estimator = Literal["auto", "exact", "materialized", "ghost", "hutch", "hutch++"]
ESTIMATORS: tuple[Estimator, ...] = ("auto", "exact", "materialized", "ghost", "hutch", "hutch++")
SKETCHES: tuple[Estimator, ...] = ("hutch", "hutch++")
DEFAULT_SKETCH_DIM = 32


@dataclass(frozen=True)
class Choice:
    """An estimator for one parameter, with the multiplications per example that it costs."""

    estimator: Estimator
    multiplications: int


def choose_estimator(estimator: Estimator, t: int, p: int, d: int, sketch_dim: int, one_hot: bool) -> Choice:
    """The estimator for a matrix parameter of shape p x d with t positions, in all its uses together.

    "auto" and "exact" take the cheaper exact one; the other words are taken literally. Sketches are never chosen unasked, because they change
    the noise multiplier.
    """
    ghost = t * t * (d if one_hot else p + d)
    materialized = (p * d if one_hot else 0) + t * (d if one_hot else p * d)
    exact = Choice("ghost", ghost) if ghost <= materialized or t == 1 else Choice("materialized", materialized)
    if estimator in ("auto", "exact"):
        return exact
    if estimator == "materialized":
        return Choice("materialized", materialized)
    if estimator == "ghost":
        return Choice("ghost", ghost)
    cost = t * sketch_dim * (p + d) * (3 if estimator == "hutch++" else 1)
    return Choice(estimator, cost)


def require_estimator(name: str) -> Estimator:
    """Checks a user's word.

    Raises:
        ValueError: naming the valid ones.
    """
    for known in ESTIMATORS:
        if known == name:
            return known
    raise ValueError(f"estimator={name!r} is unknown; use one of {', '.join(ESTIMATORS)}")
