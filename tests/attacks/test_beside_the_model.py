"""Gradients before their noise, where a script could meet them: in ``.grad`` of what the loss
trains beside the model, and in hooks on parameters.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attacks.guarded import RECORDS, good, plan_of, records, rows, small
from quietgrad.clipping import Clipper
from quietgrad.clipping.capture import backward
from quietgrad.clipping.soundness import refusals


class Checkpointed(nn.Module):
    """A part of it is computed again in the backward pass, by a call of ``backward()`` within."""

    def __init__(self, beside: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.part = [nn.Linear(8, 8), beside or nn.Tanh()]  # not trained, and no part of the model

    def forward(self, x: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            return self.part[1](self.part[0](h))

        found: Tensor = self.head(checkpoint(part, torch.tanh(self.first(x)), use_reentrant=True))
        return found


def heated(temperature: nn.Parameter) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"]) * temperature.exp()
        return F.cross_entropy(logits, batch["y"], reduction="none")

    return loss


def beside(engine: str, size: int = RECORDS, held: Tensor | None = None) -> list[Tensor | None]:
    """What a step leaves in ``.grad`` of a temperature, and of a layer in what is computed again.

    Args:
        engine: of the clipper.
        size: how many records.
        held: what the temperature's ``.grad`` holds before.
    """
    model, temperature = Checkpointed(), nn.Parameter(torch.tensor(0.0))
    temperature.grad = held
    bound = Clipper(1.0, engine=engine).bind(model, heated(temperature))  # type: ignore[arg-type]
    bound.clip(rows(records(), *range(size)))
    inner = model.part[0].weight
    assert isinstance(inner, Tensor)
    return [temperature.grad, inner.grad]


@pytest.mark.parametrize("engine", ["auto", "one-example"])
@pytest.mark.parametrize("size", [1, RECORDS])
def test_reentrant_checkpointing_leaves_no_gradient_beside_the_model(
    engine: str, size: int
) -> None:
    assert beside(engine, size) == [None, None]


def test_what_a_gradient_beside_the_model_holds_stays() -> None:
    """Also as the same tensor: autograd adds in place."""
    held = torch.tensor(3.0)
    left, _ = beside("auto", held=held)
    assert left is held
    assert float(held) == 3.0


def test_what_is_clipped_is_the_same_without_checkpointing() -> None:
    model = Checkpointed()
    plain = nn.Sequential(model.first, nn.Tanh(), *model.part, model.head)
    for part in model.part:
        part.requires_grad_(False)
    sums = [
        list(Clipper(0.1).bind(one, good).clip(records()).gradients.values())
        for one in (model, plain)
    ]
    for one, other in zip(*sums, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_backward_is_torch_s_own_afterwards() -> None:
    before = torch.autograd.backward
    beside("auto")
    assert torch.autograd.backward is before


def test_left_to_autograd_they_hold_gradients_without_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backward, "others_left_alone", lambda own: contextlib.nullcontext())
    for gradient in beside("auto"):
        assert gradient is not None
        assert not bool((gradient == 0).all())


KINDS = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_with_a_hook_on_its_gradient_is_refused_by_name(kind: str) -> None:
    """Loggers hang there (``wandb.watch``), and optimizers that step in the backward pass."""
    model, seen = small(), list[Any]()
    getattr(model[0].weight, kind)(seen.append)  # type: ignore[index]
    with plan_of().start() as run:
        for indices in run.batches(1):
            with pytest.raises(ValueError, match=r"'0\.weight' has a hook on its gradient"):
                run.backward(model, good, rows(records(), *indices))
            break
    assert seen == []


def test_a_frozen_parameter_may_have_one_and_so_may_any_after_its_removal() -> None:
    model = small()
    frozen, trained = model[0].weight, model[3].weight  # type: ignore[index]
    frozen.register_hook(print)
    trained.register_hook(print).remove()
    frozen.requires_grad_(False)
    Clipper(1.0).clip(model, good, records())


def test_without_the_refusal_a_hook_sees_gradients_of_single_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "refuse_hooked_parameters", lambda model: None)
    model, seen = small(), list[Tensor]()
    model[0].weight.register_hook(seen.append)  # type: ignore[index]
    Clipper(1e-3, engine="one-example").bind(model, good).clip(records())
    assert len(seen) > RECORDS
    assert all(float(gradient.norm()) > 1e-2 for gradient in seen[-RECORDS:])  # nor clipped
