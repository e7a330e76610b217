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
    _require_same_factors(alone.factors, company.factors, row, tolerance)
    for key, one in alone.own.items():
        other = company.own.get(key)
        if other and not one.is_row_of(other, row, tolerance.factor, tolerance.again):
            if one.kind == REPEATED:
                raise does_not_run_again(key[0])
            raise Mixes(RULE.format(key[2], key[0]))


def _require_same_factors(
    alone: dict[tuple[str, int], Factors],
    company: dict[tuple[str, int], Factors],
    row: int,
    tolerance: Tolerance,
) -> None:
    # Each layer by its own size: with groups, a layer of small gradients is clipped on its own and
    # counts as much as any. Rounding is all there is of gradients that vanish (keys under a softmax
    # over one position), and it is of the size of what they are a difference of.
    norms = (float(factors.gradient_norms[0]) for factors in alone.values())
    floor = tolerance.vanishing * max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    for key, one in alone.items():
        if key in company and not one.is_row_of(company[key], row, tolerance.factor, floor):
            raise Mixes(MIXES.format(f"what its gradient at layer {key[0]!r} is made of"))


def close(a: Tensor, b: Tensor, relative: float, absolute: float) -> bool:
    """Whether numbers agree; two that are no number do."""
    return torch.allclose(a.double(), b.double(), rtol=relative, atol=absolute, equal_nan=True)


def are_same_gradients(one: Tensor, other: Tensor, relative: float) -> bool:
    """Whether ``Subject.plain_prints`` are of one gradient: each parameter's by its own norm."""
    if not bool((one.isfinite() == other.isfinite()).all()):
        return False
    room = relative * torch.nan_to_num(one[:, :1]) + 1e-20
    return bool(((one - other).nan_to_num().abs() <= room).all())
