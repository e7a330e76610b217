"""What a user's layer rules make of each example: compared alone and in company, as losses and
factors are.

A rule of the library's own reads one example at a time and is tested for it. One that somebody else
wrote may read others where nobody looked when it was added: in training mode, in float32, among
more examples, of a record that it kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.norms.factors import Contribution, DenseFactors, DirectGradients
from quietgrad.clipping.norms.rules.checked import CheckedRule
from quietgrad.clipping.soundness.fingerprints import numbers, print_of, wide
from quietgrad.tensors import full_precision

Key = tuple[str, int, str]  # layer, number of its call, the layer's name of the parameter


@dataclass(frozen=True)
class RuleGradients:
    """What a rule gives of one parameter in one call, in a few numbers an example. Private.

    Attributes:
        kind: as what, which decides how norms are taken.
        parts: each [examples, n]: the gradients, or products of factored ones with known
            numbers.
        room: [examples] what rounding of the layer's input and output gradient, which are as large
            as this together, may come to where positions cancel.
    """

    kind: str
    parts: tuple[Tensor, ...]
    room: Tensor

    def is_row_of(self, other: RuleGradients, row: int, tolerance: float, share: float) -> bool:
        """Whether the first example is example ``row`` of another pass.

        Args:
            other: of the other pass.
            row: place there.
            tolerance: relative to the size of each part.
            share: of ``room`` by which it may differ besides.
        """
        if self.kind != other.kind:
            return False
        least = share * float(torch.minimum(self.room[0], other.room[row]).nan_to_num())
        for one, others in zip(self.parts, other.parts, strict=True):
            mine, its = one[0], others[row]
            if mine.shape != its.shape or not torch.equal(mine.isfinite(), its.isfinite()):
                return False
            size, moved = mine.nan_to_num().norm(), (mine - its).nan_to_num().norm()
            if float(moved) > tolerance * float(size) + least:
                return False
        return True

    def vanishes(self, row: int, share: float) -> bool:
        """Whether one example's is nothing, but for rounding; False where it is no number."""
        least = share * float(self.room[row].nan_to_num())
        return all(float(part[row].norm()) <= least for part in self.parts)

    def of_example(self, row: int) -> RuleGradients:
        """One example's alone."""
        parts = tuple(part[row : row + 1] for part in self.parts)
        return RuleGradients(self.kind, parts, self.room[row : row + 1])

    def print_of(self, row: int) -> Tensor:
        """[parts, 2] as ``Subject.plain_prints`` are."""
        prints = [print_of(part[row].flatten()) for part in self.parts]
        return torch.stack(prints).cpu().double()


def own_rules(layout: Layout) -> list[CheckedRule]:
    """The rules of a model's layers that a user added."""
    found = [site.rule for site in layout.sites if isinstance(site.rule, CheckedRule)]
    return list({id(rule.rule): rule for rule in found}.values())


def rule_gradients(use: Use) -> Iterator[tuple[str, RuleGradients]]:
    """The layer's name of each parameter, and what its rule gives, where a user added the rule."""
    rule = use.site.rule
    if not isinstance(rule, CheckedRule) or 0 not in use.output_gradients:
        return
    x, grad = use.input, use.output_gradients[0]
    found = rule(use.site.module, x, grad, use.site.parameters)
    with torch.no_grad(), full_precision():
        room = _norms(grad) * (_norms(x) if x.is_floating_point() else 1.0)
        for name, given in found.items():
            yield name, RuleGradients(_kind(given), _parts(given), room)


def _kind(given: Contribution) -> str:
    if isinstance(given, DenseFactors):
        return f"factors {given.sizes.g}"
    told = isinstance(given, DirectGradients) and given.spread_b is not None
    return f"{type(given).__name__} {told}"


def _parts(given: Contribution) -> tuple[Tensor, ...]:
    if isinstance(given, DirectGradients):
        values, spread = wide(given.values_bn), given.spread_b
        return (values,) if spread is None else (values, wide(spread.unsqueeze(1)))
    assert isinstance(given, DenseFactors)
    # left^T right times known numbers, from both sides: a product with each factor, and no
    # gradient formed
    left, right = wide(given.left_bgtp), wide(given.right_bgtd)
    rows = left.mT @ (right @ _known(right)).unsqueeze(-1)
    columns = right.mT @ (left @ _known(left)).unsqueeze(-1)
    return rows.flatten(1), columns.flatten(1)


def _known(x: Tensor) -> Tensor:
    return numbers(x.shape[-1], x.device, x.dtype)


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(wide(x).flatten(1), dim=1)
