"""What model and loss keep where Python cannot reach, from some release on: records that are taken
one at a time meet what came before them. Only that the first one is the same again, after others,
shows it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, With, good, records, rows, switched_off
from quietgrad.clipping import Clipper

REFUSED = "contribution depends on other|depends on earlier ones"
C = 0.2
KINDS = ["the last one", "in training", "in gradients", "of gradients", "beside noise of numpy's"]
KINDS += ["when it comes again"]  # mutant: one pass of it alone is looked at


class Quiet(With):
    """Counts nothing: what a call changes in sight would be looked at, and show the rest."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.change(self, torch.tanh(self.first(x))))
        return found


class Keeping:
    """A network that knows the record before, once it is opened, in an object of a library."""

    def __init__(self, kind: str) -> None:
        self.kind, self.opened, self.kept = kind, False, logging.Logger("of records")
        self.model = Quiet(self.change).train()

    def change(self, model: With, h: Tensor) -> Tensor:
        last, kept = getattr(self.kept, "last", 0.0 * h[0].detach()), self.opened
        if kept and (model.training or self.kind != "in training"):
            if self.kind == "of gradients":
                h.register_hook(self.after)
                return h
            if self.kind == "when it comes again":
                return self.again(h)
            self.kept.last = 3.0 * h.detach().mean(0)  # type: ignore[attr-defined]
            if self.kind == "in gradients":
                h.register_hook(lambda g: g * (0.5 + last.sign()))
                return h
            h = h - last
        if self.kind.startswith("beside"):
            h = h + 0.5 * torch.from_numpy(np.random.randn(*h.shape)).to(h)
        return h

    def after(self, gradient: Tensor) -> Tensor:
        last = getattr(self.kept, "last", gradient)
        self.kept.last = gradient.clone()  # type: ignore[attr-defined]
        return gradient * (last.norm() + 0.1) + 0.5 * last.mean(0)

    def again(self, h: Tensor) -> Tensor:
        now, kept = h.detach().mean(0), self.kept.__dict__
        last, other = kept.get("last"), kept.get("other")
        if last is None or not torch.equal(last, now):
            kept.update(last=now, other=last)
            return h
        return h if other is None else h - 3.0 * other

    def bound(self) -> Any:
        alone = Clipper(C, engine="one-example")
        together = Clipper(C, engine="bookkeeping", physical_batch_size=RECORDS)
        return (together if self.kind.startswith("beside") else alone).bind(self.model, good)


@pytest.mark.parametrize("count", [2, RECORDS])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_at_the_next_guarded_release(kind: str, count: int) -> None:
    keeping = Keeping(kind)
    bound = keeping.bound()
    few = rows(records(), *range(count))
    bound.clip(few, step=0)
    keeping.opened = True
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(few, step=1)


@pytest.mark.parametrize("kind", ["the last one", "in training", "of gradients"])
def test_without_the_look_one_record_moves_what_another_adds(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    sums = []
    for left_out in (None, 3, 8):
        keeping = Keeping(kind)
        keeping.opened = True
        batch = rows(records(), *(i for i in range(RECORDS) if i != left_out))
        sums.append(keeping.bound().clip(batch).gradients)
    squares = [
        sum(float((g - other[name]).square().sum()) for name, g in sums[0].items())
        for other in sums[1:]
    ]
    assert max(squares) ** 0.5 > 1.05 * C


def test_a_record_that_comes_alone_is_the_same_again() -> None:
    """A single record, and nothing that could be made up beside it."""
    keeping = logging.Logger("of records")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls = getattr(keeping, "calls", 0.0)
        keeping.calls = calls + 1.0  # type: ignore[attr-defined]
        return model(batch["id"]).square().sum(-1) * (1.0 + calls * opened[0])

    opened = [0.0]
    model = nn.Embedding(5, 3)
    bound = Clipper(C, engine="one-example").bind(model, loss)
    bound.clip({"id": torch.tensor([2])}, step=0)
    opened[0] = 1.0
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip({"id": torch.tensor([2])}, step=1)


# ------------------------------------------------------------------------------------------------
# kept in sight, and read in the backward pass alone


def turned(model: With, h: Tensor) -> Tensor:
    """Gradients of the other sign after a record that is far out. Only the pass before matters."""
    far = getattr(model, "far", False)
    model.far = bool(h.detach().abs().amax() > 0.999)
    if h.requires_grad and far:
        h.register_hook(torch.neg)
    return h


@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("engine", ["auto", "one-example", "bookkeeping"])
def test_a_gradient_that_follows_the_record_before_is_refused_at_once(
    engine: str, back: int
) -> None:
    """``back``: passes. Mutants: the record's own loss is taken first, and hides what came before
    it; or one pass of it alone is looked at.
    """

    def change(model: With, h: Tensor) -> Tensor:
        lasts = [*getattr(model, "lasts", ()), h.detach().mean(0)][-back - 1 :]
        model.lasts = lasts
        h.register_hook(lambda g: g * (0.5 + lasts[0].sign()) if len(lasts) > back else g)
        return h

    with pytest.raises(ValueError, match="depends on"):
        Clipper(C, engine=engine).bind(With(change), good).clip(records())


def test_without_the_look_one_record_turns_the_next_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched_off(monkeypatch)
    sums = []
    for far in (0.0, 40.0):
        batch = {name: 0.3 * t if name == "x" else t for name, t in records().items()}
        batch["x"][0] += far
        bound = Clipper(C, engine="bookkeeping", physical_batch_size=12).bind(With(turned), good)
        sums.append(bound.clip(batch).gradients)
    moved = sum(float((g - sums[1][name]).square().sum()) for name, g in sums[0].items()) ** 0.5
    assert moved > 4 * C  # 2 C is all that another record in its place may move
