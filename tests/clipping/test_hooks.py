"""Users' hooks that change what layers are given and what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import cross_entropy
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients

LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.LayerNorm(6),
    "embedding": lambda: nn.Embedding(9, 6),
    "recurrent": lambda: nn.GRU(6, 6, batch_first=True),  # without a rule: it is run again
}


class Net(nn.Module):
    def __init__(self, hooked: nn.Module) -> None:
        super().__init__()
        self.first, self.hooked, self.last = nn.Linear(5, 6), hooked, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        given = x.detach().argmax(2) if isinstance(self.hooked, nn.Embedding) else x
        found = self.hooked(given)
        found = found[0] if isinstance(found, tuple) else found
        return self.last(found + x).mean(1)


def raised(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x = args[0]
    return ((x + 1) % 9 if isinstance(module, nn.Embedding) else x * 3, *args[1:])


def squared(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.square() + output
    return (output[0].square() + output[0], *output[1:])


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hooked", LAYERS)
def test_hooks_that_change_inputs_and_outputs(hooked: str, when: str, engine: Engine) -> None:
    """Before: refused, as gradients were captured behind the hook."""
    torch.manual_seed(0)
    model = Net(LAYERS[hooked]())
    batch = {"x": torch.randn(4, 2, 5), "y": torch.randint(0, 3, (4,))}
    bound = Clipper(0.3, engine=engine).bind(model, cross_entropy)
    if when == "after":
        bound.clip(batch)
    model.hooked.register_forward_pre_hook(raised)
    model.hooked.register_forward_hook(squared)
    found = bound.clip(batch).gradients
    expected = oracle_clipped_sum(oracle_gradients(model, cross_entropy, batch), 0.3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
