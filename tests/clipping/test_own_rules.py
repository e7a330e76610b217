"""A rule of one's own is taken only where it is autograd's gradient, of each example alone and
among others; and what it measures then is what the oracle does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import DenseFactors, DirectGradients, add_layer_rule, sum_over_positions
from quietgrad.clipping.norms.rules import registry
from quietgrad.clipping.verify import verify_clipping


class Gate(nn.Module):
    """W x + s x at every position."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width))
        self.s = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T + self.s * x


def right(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "w" in wanted:
        found["w"] = DenseFactors(grad.unsqueeze(1), x.unsqueeze(1))
    if "s" in wanted:
        found["s"] = DirectGradients(sum_over_positions(x * grad))
    return found


def halved(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return right(module, x, grad / 2, wanted)


def mixing(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    """Right for an example alone."""
    return right(module, x, grad + grad.mean(0) - grad / len(grad), wanted)


def all_of_them(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return right(module, x, grad, ("w", "s"))


def one_of_them(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return right(module, x, grad, ("w",))


def undefined(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return right(module, x, grad * float("nan"), wanted)


@pytest.fixture(autouse=True)
def table_is_put_back() -> Iterator[None]:
    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


def inputs() -> Tensor:
    return torch.randn(4, 3, 5)


def test_a_right_rule_is_used_and_measures_right() -> None:
    gate = Gate()
    assert registry.rule_for(gate) is None
    calls: list[int] = []

    def counted(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        calls.append(len(x))
        return right(module, x, grad, wanted)

    before = {name: p.clone() for name, p in gate.named_parameters()}
    add_layer_rule(counted, gate, inputs())
    assert all(torch.equal(p, before[name]) for name, p in gate.named_parameters())
    tried = len(calls)
    model = nn.Sequential(Gate(), nn.Tanh(), Gate(), nn.Linear(5, 2))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).mean(1), batch[1], reduction="none")

    assert verify_clipping(model, loss, (torch.randn(6, 3, 5), torch.arange(6) % 2)) < 1e-5
    assert len(calls) > tried
    model[0].w.requires_grad_(False)
    assert verify_clipping(model, loss, (torch.randn(6, 3, 5), torch.arange(6) % 2)) < 1e-5


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (halved, "example 0 alone: relative difference 0.5"),
        (mixing, "example 0 among the others"),
        (all_of_them, r"gives \['s', 'w'\] where \['w'\] is wanted"),
        (one_of_them, r"gives \['w'\] where \['s', 'w'\] is wanted"),
        (undefined, "relative difference nan"),
    ],
)
def test_a_wrong_rule_is_refused(rule: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        add_layer_rule(rule, Gate(), inputs())
    assert registry.rule_for(Gate()) is None


def test_what_a_rule_has_to_give_is_said() -> None:
    def bare(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        return right(module, x, grad, wanted) | {"s": (x * grad).sum(1)}

    def every_position(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        return right(module, x, grad, wanted) | {"s": DirectGradients(x * grad)}

    def without_groups(module: Gate, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        return right(module, x, grad, wanted) | {"w": DenseFactors(grad, x)}

    with pytest.raises(TypeError, match="gives a Tensor for 's'; wrap it: DirectGradients"):
        add_layer_rule(bare, Gate(), inputs())
    for rule, name in ((every_position, "DirectGradients"), (without_groups, "DenseFactors")):
        with pytest.raises(ValueError, match=f"gives {name} of shape .*it takes Direct"):
            add_layer_rule(rule, Gate(), inputs())
    assert registry.rule_for(Gate()) is None


def test_what_no_rule_can_be_added_for() -> None:
    with pytest.raises(ValueError, match="Linear has a rule already"):
        add_layer_rule(right, nn.Linear(5, 5), inputs())
    with pytest.raises(TypeError, match="must be a module with parameters of its own"):
        add_layer_rule(right, nn.Tanh(), inputs())
    with pytest.raises(TypeError, match="must be a module with parameters of its own"):
        add_layer_rule(right, Gate, inputs())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two examples or more"):
        add_layer_rule(right, Gate(), inputs()[:1])

    class Total(Gate):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    with pytest.raises(ValueError, match="gives no tensor with the 4 examples first"):
        add_layer_rule(right, Total(), inputs())
