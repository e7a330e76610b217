"""Weights beside the private model that a loop of the Opacus kind reaches by a detour: what was
made of them before the batch came, or a view of what they were written into. They got gradients of
records without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.test_opacus import made
from quietgrad.integrations.opacus.following import tracing, weights
from quietgrad.integrations.opacus.following.nodes import Const, Node, Ref

Body = Callable[[Any, Tensor, nn.Parameter], Tensor]


def temperature(model: Any, x: Tensor, w: nn.Parameter) -> Tensor:
    return model(x) * w.exp()


def a_slice(model: Any, x: Tensor, w: nn.Parameter) -> Tensor:
    return model(x) + w[:]


def written_in_part(model: Any, x: Tensor, w: nn.Parameter) -> Tensor:
    out = model(x)
    out[:, 0] = out[:, 0] * w[0].exp()
    return out


def of_the_input(model: Any, x: Tensor, w: nn.Parameter) -> Tensor:
    return model(x * w.exp().sum())


def features_matched(model: Any, x: Tensor, w: nn.Parameter) -> Tensor:
    made_up = model(w.exp().sum() * torch.ones(2 * len(x), 5))[: len(x)]
    return made_up - model(x).detach()


def by_a_view(model: Any, x: Tensor, w: nn.Parameter) -> Tensor:
    """At a weight of zero, so that what is computed again for each record is as it was."""
    out = model(x) * 1
    view = out.t()
    out.add_(w)
    return view.t()


DERIVED = [temperature, a_slice, written_in_part, of_the_input, features_matched]


def gradient_of(body: Body) -> Tensor | None:
    """What the weight beside got of one batch, before the optimiser's step."""
    _, model, _, loader = made()
    w = nn.Parameter(torch.zeros(3))
    for x, y in loader:
        F.cross_entropy(body(model, x, w), y).backward()
        break
    return w.grad


@pytest.mark.parametrize("body", [*DERIVED, by_a_view], ids=lambda body: body.__name__)
def test_weights_that_are_reached_by_a_detour_learn_nothing_of_records(body: Body) -> None:
    with pytest.raises(ValueError, match="outside the private model's own call"):
        gradient_of(body)


@pytest.mark.parametrize("body", DERIVED, ids=lambda body: body.__name__)
def test_looking_at_weights_alone_does_not_see_what_was_made_of_them(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken mechanism: only a leaf that learns counts."""

    def leaves_alone(value: Any, kind: Any) -> Any:
        found = weights_leaves(value, kind)
        return [replace(c, learned_from=False) for c in found] if kind is Const else found

    weights_leaves = weights.leaves
    monkeypatch.setattr(weights, "leaves", leaves_alone)
    found = gradient_of(body)
    assert found is not None and float(found.norm()) > 0


def test_what_the_loss_was_made_of_does_not_show_what_its_views_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broken mechanism: what was written into counts only where the loss is made of it."""
    whole = weights.require_private_weights

    def of_the_loss(nodes: Sequence[Node], loss: Ref) -> None:
        whole([replace(node, in_place=False) for node in nodes], loss)

    monkeypatch.setattr(tracing, "require_private_weights", of_the_loss)
    found = gradient_of(by_a_view)
    assert found is not None and float(found.norm()) > 0


def test_a_generator_still_learns_of_the_private_model_alone() -> None:
    _, model, optimizer, loader = made()
    w = nn.Parameter(torch.zeros(3))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        F.cross_entropy(
            model(w.exp().sum() * torch.ones(4, 5)), torch.zeros(4, dtype=torch.long)
        ).backward()
    assert w.grad is not None and float(w.grad.norm()) > 0
