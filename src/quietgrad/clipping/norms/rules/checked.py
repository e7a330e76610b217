"""A user's layer rule, watched at every call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from quietgrad.clipping.norms.factors import (
    Contribution,
    DenseFactors,
    DirectGradients,
    SummedRows,
)
from quietgrad.clipping.norms.rules.registry import Rule, rule_for


@dataclass(frozen=True)
class CheckedRule:
    """A rule that somebody else wrote. What it gives has the shapes that norm and sum are formed
    of alike, a row for each example, and it writes into nothing that it was given: the gradient at
    a layer's output goes on to the layers below.

    What it reads of other examples the guard sees (``soundness/company``).
    """

    rule: Rule

    def __call__(
        self, module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
    ) -> dict[str, Contribution]:
        versions = x._version, grad._version
        found = self.rule(module, x, grad, wanted)
        kind = type(module).__name__
        if (x._version, grad._version) != versions:
            raise ValueError(
                f"the layer rule of {kind} writes into its input or into the gradient at its "
                "output, which other layers' gradients are made of; give new tensors instead"
            )
        if set(found) != set(wanted):
            raise ValueError(
                f"the layer rule of {kind} gives {sorted(found)} where {sorted(wanted)} is wanted; "
                "it has to give the parameters that are wanted, by their own names, and no others"
            )
        checked: dict[str, Contribution] = {}
        for name, given in found.items():
            if isinstance(given, SummedRows) or not has_a_row_each(given, len(x)):
                raise ValueError(
                    f"the layer rule of {kind} gives for {name!r} neither DirectGradients "
                    "[examples, entries] nor DenseFactors [examples, 1, positions, rows] and "
                    "[examples, 1, positions, columns], a row for each example; correct what it "
                    "returns"
                )
            checked[name] = given
        return checked


def has_a_row_each(given: object, examples: int) -> bool:
    """Whether this is one of the two kinds of contribution that a rule may give, itself and no
    subclass, of so many examples.
    """
    if type(given) is DirectGradients:
        spread = given.spread_b
        told = spread is None or spread.shape == (examples,)
        return told and given.values_bn.dim() == 2 and len(given.values_bn) == examples
    if type(given) is not DenseFactors:
        return False
    left, right = given.left_bgtp, given.right_bgtd
    return (
        left.dim() == right.dim() == 4
        and left.shape[:3] == right.shape[:3]
        and (len(left) == examples)
    )


def added_rules(model: nn.Module) -> list[Rule]:
    """The rules that a user added for layers of this model, as they were given."""
    of_kinds = {type(module): module for module in model.modules()}
    found = [rule_for(module) for module in of_kinds.values()]
    return [rule.rule for rule in found if isinstance(rule, CheckedRule)]
