"""How fast this machine trains a model, and what the model's head reads: from one micro-batch of
public records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.clipping.clipper import Clipper
from quietgrad.tensors import batch_size_of
from quietgrad.training.derived.rule import Reads
from quietgrad.training.tasks.records import logits_of

REPEATS = 3  # the guard looks at the first one, and at one of five hundred later


@dataclass(frozen=True)
class Sample:
    """A micro-batch of validation records, which are public, as training would take it.

    Attributes:
        model: what trains: the classifier, or what stands above cached states.
        batch: its inputs.
        size: records.
        caching: seconds a record that caching took; 0 without a cache.
        cached: whether there is a cache.
    """

    model: nn.Module
    batch: dict[str, Tensor]
    size: int
    caching: float
    cached: bool

    def as_clipped(self, users: bool) -> Any:
        """As the clipper takes it: where users are protected, one record of each."""
        return UserBatch(self.batch, (1,) * batch_size_of(self.batch)) if users else self.batch

    def seconds(self, clipper: Clipper | None, loss: PerExampleLoss, users: bool) -> float:
        """Seconds of clipping (or, without a clipper, of a backward pass), the fastest of a few."""
        bound = None if clipper is None else clipper.bind(self.model, loss)
        device = next(self.model.parameters()).device

        def once() -> float:
            started = time.perf_counter()
            if bound is not None:
                bound.clip(self.as_clipped(users), step=2)
            else:
                loss(self.model, self.batch).sum().backward()
                self.model.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        return min(once() for _ in range(REPEATS))

    def head_input(self) -> Reads | None:
        """What a linear layer named ``head`` reads; None without one."""
        head = getattr(self.model, "head", None)
        if not isinstance(head, nn.Linear):
            return None
        seen: list[Tensor] = []

        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0].detach().float().flatten(0, -2))

        hook = head.register_forward_pre_hook(look)
        try:
            with torch.no_grad():
                logits_of(self.model, self.batch)
        finally:
            hook.remove()
        inputs_bd = torch.cat(seen)
        squares, sums = inputs_bd.square().sum(dim=1), inputs_bd.abs().sum(dim=1)
        return Reads(float(squares.mean().sqrt()), float(sums.mean()))
