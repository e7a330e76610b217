"""bfloat16 weights, and float32 weights under autocast, against the slow oracle run on the same
model.

The tolerance is 2e-2, relative in norm, for each example's norm and for the clipped sum as a whole.
bfloat16 keeps 8 bits, so every stored activation and gradient is off by up to 2^-9 = 0.2 %. Both
sides make such errors, but not the same ones: the oracle rounds each parameter's gradient (and,
with bfloat16 weights, its running sum) to bfloat16, the fast path takes products of rounded factors
and adds in float32, and matrix products over other batch sizes add up in another order. On these
models that comes to at most 0.5 % of the sum and 0.05 % of a norm; the rest of the tolerance is for
other processors' orders of addition. Single parameters are not
compared: one whose true gradient is zero (a key's bias under softmax) holds nothing but rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn

from quietgrad.clipping import Clipper, per_example_norms
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms

pytestmark = pytest.mark.usefixtures("examined_once")

TOLERANCE = 2e-2
CHOSEN = [c for c in CASES if c.name in ("mlp", "cnn-groupnorm", "bert", "roberta", "llama")]


def whole(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def assert_close_to_oracle(
    model: nn.Module, loss: Any, batch: Any, physical_batch_size: int | None, estimator: str
) -> None:
    gradients = oracle_gradients(model, loss, batch)
    norms = oracle_norms(gradients)
    clip = float(norms.median())
    expected = whole(oracle_clipped_sum(gradients, clip))
    bound = Clipper(clip, estimator, physical_batch_size=physical_batch_size).bind(model, loss)
    actual, fast_norms = bound.clip(batch, step=0).gradients, bound.norms(batch, step=0)
    torch.testing.assert_close(fast_norms.double(), norms.double(), rtol=TOLERANCE, atol=0)
    assert {g.dtype for g in actual.values()} == {
        torch.float32
    }  # sums are accumulated in float32 at least
    assert float((whole(actual) - expected).norm()) < TOLERANCE * float(expected.norm())


def in_bfloat16(batch: Any) -> Any:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in batch.items()}


@pytest.mark.grid(5, "models times estimators")
@pytest.mark.parametrize("physical_batch_size", [None, 3])
@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost"])
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_bfloat16_weights(case: Case, estimator: str, physical_batch_size: int | None) -> None:
    model, loss, batch = case.build()
    assert_close_to_oracle(
        model.to(torch.bfloat16), loss, in_bfloat16(batch), physical_batch_size, estimator
    )


@pytest.mark.grid(5, "models times estimators")
@pytest.mark.parametrize("physical_batch_size", [None, 3])
@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost"])
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_float32_weights_under_autocast(
    case: Case, estimator: str, physical_batch_size: int | None
) -> None:
    model, loss, batch = case.build()

    def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    assert_close_to_oracle(model, autocast_loss, batch, physical_batch_size, estimator)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_half_precision_is_near_full_precision(case: Case) -> None:
    """The oracle in half precision is itself near the float32 one; otherwise the comparisons above
    would compare noise.
    """
    model, loss, batch = case.build()
    full = oracle_norms(oracle_gradients(model, loss, batch))
    half = per_example_norms(model.to(torch.bfloat16), loss, in_bfloat16(batch))
    torch.testing.assert_close(half.double(), full.double(), rtol=5e-2, atol=0)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.attention(h, h, h)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cells = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(self.first(x))[0]


@pytest.mark.parametrize("kind", [Attentive, Recurrent])
def test_a_repeated_forward_pass_has_the_autocast_of_the_call(kind: type[nn.Module]) -> None:
    """Autocast inside the loss has ended when the backward pass repeats a module of the fallback.
    Before: "mat1 and mat2 must have the same dtype".
    """

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch["x"]).float().tanh().flatten(1).sum(1)

    torch.manual_seed(0)
    model, batch = kind(), {"x": torch.randn(5, 4, 8)}
    assert_close_to_oracle(model, loss, batch, None, "exact")


@pytest.mark.parametrize("one", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))])
def test_a_layer_that_accelerate_prepared(one: nn.Module) -> None:
    """Its autocast is inside the call, so a model of one layer shows float32 alone. Before: refused
    as used outside its module's call.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # another test's, of this process
    torch.manual_seed(0)
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(one)
    batch = {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    assert_close_to_oracle(model, loss, batch, None, "exact")
