"""When two passes give an example something else, and what is said of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quietgrad.clipping.capture.escapes import does_not_run_again
from quietgrad.clipping.soundness.company.repeated import KIND as REPEATED
from quietgrad.clipping.soundness.fingerprints import Factors
from quietgrad.clipping.soundness.subject import Look, Tolerance

MIXES = (
    "the loss of one example depends on other examples of the batch, on their number or on their "
    "order (seen in {}), so no per-example gradient "
    "exists; contrastive losses and batch statistics cannot be trained privately per example: use "
    "a loss of each example alone, or make the "
    "group of examples that belong together one record"
)
RULE = (
    "the layer rule that was added for a layer of this model gives a gradient of {!r} (layer {!r}) "
    "that depends on other examples of the batch, so that one record would change what others add; "
    "make row i of example i alone (add_layer_rule)"
)


class Mixes(ValueError):
    """The loss of one example depends on others."""


def require_same(alone: Look, company: Look, row: int, tolerance: Tolerance) -> None:
    """What the gradient of the first example of one pass is made of, against one of another."""
    _require_same_factors(alone, company, row, tolerance)
    for key, one in alone.own.items():
        other = company.own.get(key)
        if other and not one.is_row_of(other, row, tolerance.factor, tolerance.again):
            if one.kind == REPEATED:
                raise does_not_run_again(key[0])
            raise Mixes(RULE.format(key[2], key[0]))
    # Of calls in one of them alone: factors say nothing of modules with several outputs.
    for mine, its, place in ((alone, company, 0), (company, alone, row)):
        for key, given in mine.own.items():
            if key[:2] not in its.reached and not given.vanishes(place, tolerance.again):
                raise _at(key[:2])


def _require_same_factors(alone: Look, company: Look, row: int, tolerance: Tolerance) -> None:
    # Each layer by its own size: with groups, a layer of small gradients is clipped on its own and
    # counts as much as any. Rounding is all there is of gradients that vanish (keys under a softmax
    # over one position), and it is of the size of what they are a difference of.
    norms = (float(factors.gradient_norms[0]) for factors in alone.factors.values())
    floor = tolerance.vanishing * max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    for key, one in alone.factors.items():
        if key not in company.factors:
            same = key in company.reached or _vanishes(one, 0, floor)
        else:
            same = one.is_row_of(company.factors[key], row, tolerance.factor, floor)
        if not same:
            raise _at(key)
    # A call that is made in company alone may leave every loss as it was, and no gradient.
    for key in company.factors.keys() - alone.reached:
        if not _vanishes(company.factors[key], row, floor):
            raise _at(key)


def _at(key: tuple[str, int]) -> Mixes:
    return Mixes(MIXES.format(f"what its gradient at layer {key[0]!r} is made of"))


def _vanishes(factors: Factors, row: int, floor: float) -> bool:
    """False too where it is no number."""
    return float(factors.gradient_norms[row]) <= floor


def close(a: Tensor, b: Tensor, relative: float, absolute: float) -> bool:
    """Whether numbers agree; two that are no number do."""
    return torch.allclose(a.double(), b.double(), rtol=relative, atol=absolute, equal_nan=True)


def are_same_gradients(one: Tensor, other: Tensor, relative: float) -> bool:
    """Whether ``Subject.plain_prints`` are of one gradient: each parameter's by its own norm."""
    if not bool((one.isfinite() == other.isfinite()).all()):
        return False
    room = relative * torch.nan_to_num(one[:, :1]) + 1e-20
    return bool(((one - other).nan_to_num().abs() <= room).all())
