"""Nested tensors: records of unlike lengths in one tensor that has no dimensions of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import Clipper, clipped_gradients
from quietgrad.clipping.planner import tracing
from quietgrad.clipping.planner.explain import explain
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients

# Of torch's own, of the strided layout alone.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}
Records = tuple[Tensor, Tensor, Tensor]


def records(n: int = 7) -> Records:
    torch.manual_seed(0)
    return torch.randn(n, 5, 6), torch.randint(0, 2, (n,)), torch.randint(1, 6, (n,))


class Nesting(nn.Module):
    """Layers over the positions that records have; then a mean of each record's."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.first, self.last, self.layout = nn.Linear(6, 8), nn.Linear(8, 2), layout

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        own = [row[: int(n)] for row, n in zip(x, lengths, strict=True)]
        h = self.last(
            torch.relu(self.first(torch.nested.as_nested_tensor(own, layout=self.layout)))
        )
        return torch.stack([one.mean(0) for one in h.unbind()])


class Attending(Nesting):
    """Attention within each record."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        own = [row[: int(n)] for row, n in zip(x, lengths, strict=True)]
        nested = self.first(torch.nested.as_nested_tensor(own, layout=torch.jagged))
        heads = nested.unflatten(-1, [2, 4]).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return torch.stack([one.mean(0) for one in self.last(seen).unbind()])


class NestingBetween(Nesting):
    """No layer meets one."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(x)
        own = [row[: int(n)] for row, n in zip(h, lengths, strict=True)]
        nested = torch.nested.as_nested_tensor(own, layout=self.layout)
        return self.last(torch.nested.to_padded_tensor(nested, 0.0).sum(1))


class Own(nn.Module):
    """A layer without a rule, whose nested input lies in another thing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2))

    def forward(self, given: Any) -> Tensor:
        (nested,) = given.values() if isinstance(given, dict) else given
        return torch.stack([(one @ self.weight).mean(0) for one in nested.unbind()])


class NestingInside(Nesting):
    """What a layer is called with holds one."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__(layout)
        self.first, self.last = Own(), Own()  # type: ignore[assignment]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        own = [row[: int(n)] for row, n in zip(x, lengths, strict=True)]
        nested = torch.nested.as_nested_tensor(own, layout=self.layout)
        return self.first([nested]) + self.last({"x": nested})


def loss(model: Any, batch: Records) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[2]), batch[1], reduction="none")


@pytest.mark.parametrize("kind", [Nesting, Attending, NestingBetween, NestingInside])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_nests_is_clipped_exactly(kind: Any, layout: str) -> None:
    """Before: an internal error of torch's counter of multiplications."""
    model, batch = kind(LAYOUTS[layout]), records()
    made = clipped_gradients(model, loss, batch, max_grad_norm=0.5)
    exact = oracle_clipped_sum(oracle_gradients(model, loss, batch), 0.5)
    for name, right in exact.items():
        torch.testing.assert_close(made.gradients[name], right)


def test_a_run_of_one_releases() -> None:
    x, y, lengths = records(30)
    model = Nesting(torch.jagged)
    with (
        PrivacyConfig(noise_multiplier=1.0, expected_batch_size=10, steps=3)
        .build(30)
        .start() as run
    ):
        for i in run.batches():
            run.backward(model, loss, (x[i], y[i], lengths[i]))
    assert run.released == 3
    told = explain(Clipper(1.0), model, loss, (x[:4], y[:4], lengths[:4]))
    assert "nested tensor" in told["why"]


@pytest.mark.parametrize("kind", [Nesting, NestingInside])
def test_sketches_of_one_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"layer .first.*nested tensor.*padded tensors and a mask"):
        clipped_gradients(kind(torch.jagged), loss, records(), 1.0, estimator="hutch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_is_nested_is_refused(layout: str) -> None:
    x, y, lengths = records()
    own = [row[: int(n)] for row, n in zip(x, lengths, strict=True)]
    nested = torch.nested.as_nested_tensor(own, layout=LAYOUTS[layout])
    with pytest.raises(ValueError, match=r"must be the example.*nested ones"):
        clipped_gradients(nn.Linear(6, 2), loss, (nested, y, lengths), max_grad_norm=1.0)


def test_a_model_that_the_counter_cannot_run_is_planned_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(tracing.FlopCounterMode):
        def __enter__(self) -> Any:
            raise RuntimeError("an operation that it does not know")

    monkeypatch.setattr(tracing, "FlopCounterMode", Broken)
    model, batch = NestingBetween(torch.jagged), records()
    made = clipped_gradients(model, loss, batch, max_grad_norm=0.5)
    exact = oracle_clipped_sum(oracle_gradients(model, loss, batch), 0.5)
    for name, right in exact.items():
        torch.testing.assert_close(made.gradients[name], right)
