"""Losses that call the model inside a transform of torch.func, or differentiate on their own: one
example at a time, exactly. A layer sees fewer dimensions there than its tensors have, so that
positions may stand where examples are looked for: batches have as many of these as positions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.planner.tracing import ASSUMED_BYTES
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms

Records = dict[str, Tensor]
SIZE = 4  # examples, positions and columns


def losses(outputs: Tensor, batch: Records) -> Tensor:
    return F.cross_entropy(outputs.mean(1), batch["y"], reduction="none")


def each(model: nn.Module, batch: Records) -> Tensor:
    return losses(vmap(model)(batch["x"]), batch)


def each_position(model: nn.Module, batch: Records) -> Tensor:
    return losses(vmap(model, in_dims=1, out_dims=1)(batch["x"]), batch)


def with_slopes(model: nn.Module, batch: Records) -> Tensor:
    slopes = vmap(grad(lambda x: model(x).sum()))(batch["x"])
    return losses(model(batch["x"]), batch) + slopes.square().sum((1, 2))


def with_jacobians(model: nn.Module, batch: Records) -> Tensor:
    return vmap(jacrev(lambda x: model(x).mean(0)))(batch["x"]).square().sum((1, 2, 3))


def along(model: nn.Module, batch: Records) -> Tensor:
    outputs, slopes, *_ = jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return losses(outputs, batch) + slopes.square().sum((1, 2))


def forwards(model: nn.Module, batch: Records) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch["x"], torch.ones_like(batch["x"]))
        outputs, slopes = forward_ad.unpack_dual(model(dual))
        return losses(outputs, batch) + slopes.square().sum((1, 2))


def records() -> Records:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, SIZE, SIZE, generator=generator)
    return {"x": x, "y": torch.arange(SIZE) % 2}


def model_of(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(SIZE, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 2)
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of jvp
@pytest.mark.parametrize(
    "loss", [each, each_position, with_slopes, with_jacobians, along, forwards]
)
def test_a_loss_that_transforms_the_model(loss: Callable[[nn.Module, Records], Tensor]) -> None:
    model, batch = model_of(), records()
    gradients = oracle_gradients(model, loss, batch)
    clip = float(oracle_norms(gradients).median())
    bound = Clipper(clip).bind(model, loss)
    actual = bound.clip(batch).gradients
    for name, expected in oracle_clipped_sum(gradients, clip).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-4, atol=1e-6)
    assert bound.execution_choice(batch).engine == "one-example"
    with pytest.raises(NotCaptured, match="called inside a transform"):
        Clipper(clip, engine="bookkeeping").clip(model, loss, batch)


def test_a_transform_beside_the_model_leaves_it_captured() -> None:
    """Nothing tells what autograd keeps then: an example is taken for large."""

    def weighted(model: nn.Module, batch: Records) -> Tensor:
        weights = vmap(grad(lambda x: x.square().sum()))(batch["x"]).abs().mean((1, 2))
        return losses(model(batch["x"]), batch) * weights

    model, batch = model_of(), records()
    gradients = oracle_gradients(model, weighted, batch)
    clip = float(oracle_norms(gradients).median())
    bound = Clipper(clip, memory_budget=2.5 * ASSUMED_BYTES).bind(model, weighted)
    actual = bound.clip(batch).gradients
    for name, expected in oracle_clipped_sum(gradients, clip).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-4, atol=1e-6)
    choice = bound.execution_choice(batch)
    assert (choice.engine, choice.physical_batch_size) == ("bookkeeping", 2)
