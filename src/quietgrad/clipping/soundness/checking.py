"""That nothing escapes the capture, and that capturing changes no loss: captured gradients against
plain autograd on the same graph.

Finds parameters that act outside their module's call (functional use, a weight penalty in the
loss), modules whose repeated forward pass differs (randomness), and layers without an example
dimension, which would go unnoticed where another dimension equals the batch size. For privacy an
escape does no harm, since the clipped sum is formed of captured factors alone; for training it
would be a wrong gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.clipping.capture.backward import (
    accumulated_gradients,
    forward_captured,
    grads_of,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.escapes import NotCaptured, draws_again, escaped, never_called
from quietgrad.clipping.capture.layout import Layout, in_graph
from quietgrad.clipping.capture.spread import each_gradient
from quietgrad.clipping.engines.contributions import contributions_of
from quietgrad.clipping.norms.factors import Contribution, formed
from quietgrad.clipping.soundness.fingerprints import HALVES
from quietgrad.clipping.soundness.held_still import seeded
from quietgrad.clipping.soundness.records import take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.generators import States
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, tensors_of

# Captured and plain gradients of one example may differ by rounding only.
LARGEST_DIFFERENCE = 1e-3
LARGEST_DIFFERENCE_IN_HALF_PRECISION = 1e-1


def require_capture(subject: Subject, few: Batch) -> bool:
    """Whether one of these examples, alone, had a finite gradient that was captured as autograd
    computes it.

    Raises:
        ValueError: naming the parameter or layer that escapes.
    """
    places = range(batch_size_of(few))

    def same(place: int) -> bool:
        one = take(few, [place])
        return with_any_checkpointing(
            subject.checkpointing, lambda reentrant: _same_gradients(subject, one, reentrant)
        )

    conclusive = any(same(place) for place in places)
    if len(places) > 1:
        pair = take(few, [0, 1])
        with_any_checkpointing(
            subject.checkpointing,
            lambda reentrant: _require_same_losses_under_capture(subject, pair, reentrant),
        )
    return conclusive


def _require_same_losses_under_capture(subject: Subject, pair: Batch, reentrant: bool) -> None:
    passes = forward_captured(
        subject.model, subject.layout, subject.per_example_loss, pair, None, reentrant
    )
    with seeded(subject.devices), passes as (losses, recording):
        expanded, with_capture = sorted(recording.expanded), losses.detach()
        opened = sorted(recording.opened)
    if any(_draws(subject, name) for name in opened):
        opened = []  # its own masks
    if not expanded and not opened:
        return
    # The same random state again: dropout draws the same masks.
    without = subject.losses(pair)
    if not torch.allclose(with_capture, without, rtol=1e-2, atol=1e-4, equal_nan=True):
        if not expanded:
            raise other_routine(opened[0])
        raise ValueError(
            f"layer {expanded[0]!r} is called with one value for all examples, and giving every "
            "example its own changes the loss; give its "
            "input an example dimension, or freeze its parameters (requires_grad_(False))"
        )


def _draws(subject: Subject, name: str) -> bool:
    module = subject.model.get_submodule(name)
    return module.training and getattr(module, "dropout", 0.0) > 0


def _same_gradients(subject: Subject, one: Batch, reentrant: bool) -> bool:
    layout = subject.layout
    captured: dict[str, list[Contribution]] = defaultdict(list)
    recordings: list[Recording] = []

    def receive(use: Use) -> None:
        before = States.now() if use.site.rule is None else None
        for name, given in contributions_of(use, 1, recordings[0]).items():
            captured[name].append(formed(given))
        if before is not None and before.moved():
            raise draws_again(use.site.name)

    passes = forward_captured(
        subject.model, layout, subject.trained_loss, one, receive, reentrant, switch_off=False
    )
    with seeded(subject.devices), passes as (losses, recording):
        recordings.append(recording)
        parameters: list[Tensor] = list(layout.parameters.values())
        differences = _Differences(layout, captured, losses.device)
        found: Sequence[Tensor | None] = ()
        if layout.spread is not None:
            each_gradient(losses.sum(), in_graph(layout), differences.take)
        elif reentrant:
            found = tuple(accumulated_gradients(losses.sum(), layout.parameters))
        else:
            found = grads_of(losses.sum(), [recording.root, *parameters])[1:]
        called = {
            name
            for s in layout.sites
            if s.name in recording.calls
            for name in s.parameters.values()
        }
    half = any(p.dtype in HALVES for p in parameters) or torch.is_autocast_enabled()
    half = half or losses.dtype in HALVES or differences.half or _is_half(captured)
    # accelerate's autocast begins and ends inside the model's call: a bare layer shows no half.
    half = half or "_original_forward" in vars(subject.model)
    subject.half = subject.half or half
    limit = LARGEST_DIFFERENCE_IN_HALF_PRECISION if half else LARGEST_DIFFERENCE
    for name, gradient in zip(layout.parameters, found, strict=False):
        if gradient is not None:
            differences.take(name, gradient)
    size = differences.size
    for name, error in differences.of_all().items():
        if not math.isfinite(error + size):
            return False
        if error > limit * max(size, 1e-20):
            raise escaped(name) if name in called else never_called(name)
    return True


@dataclass
class _Differences:
    """How far captured gradients are from autograd's, one parameter after the other.

    Attributes:
        layout: of the model.
        captured: parameter name -> what was captured of one example; emptied.
        device: of the losses.
        half: whether what was looked at so far was in half precision.
    """

    layout: Layout
    captured: dict[str, list[Contribution]]
    device: torch.device
    half: bool = False
    _errors: dict[str, float] = field(default_factory=dict)
    _squares: list[float] = field(default_factory=list)

    def take(self, name: str, gradient: Tensor | None) -> None:
        """Compares one parameter's; None is the gradient of what the loss does not depend on."""
        parameter, gradient = self.layout.parameters[name], self.layout.here(name, gradient)
        dtype = accumulation_dtype(parameter.dtype)
        uses = self.captured.pop(name, [])
        self.half = self.half or _is_half({name: uses})
        with torch.no_grad():
            weight = torch.ones(1, device=self.device)
            difference = torch.zeros((), dtype=dtype, device=self.device)
            if gradient is not None:
                self._squares.append(_norm(gradient) ** 2)
                difference = -gradient.to(dtype)
            for use in uses:
                difference = difference + use.weighted_sum(
                    weight, self.layout.shape_of(name), dtype
                )
            self._errors[name] = _norm(difference)

    @property
    def size(self) -> float:
        """Norm of autograd's gradient."""
        return math.sqrt(sum(self._squares))

    def of_all(self) -> dict[str, float]:
        """Name -> norm of the difference, of all trainable parameters in order."""
        for name in self.layout.parameters:
            if name not in self._errors:
                self.take(name, None)
        return {name: self._errors[name] for name in self.layout.parameters}


def _norm(x: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(
            x, dtype=torch.float32 if x.device.type == "mps" else torch.float64
        )
    )


def other_routine(layer: str) -> NotCaptured:
    """Of a module whose fused routine computes something else than what is known of it."""
    return NotCaptured(
        f"layer {layer!r} gives another loss where its routine is made of captured linear maps, so "
        "this version of PyTorch computes something else there; take one example at a time "
        "(engine='one-example', exact for every layer)"
    )


def _is_half(captured: dict[str, list[Contribution]]) -> bool:
    found = (
        x
        for uses in captured.values()
        for use in uses
        for x in tensors_of(list(vars(use).values()))
    )
    return any(x.dtype in HALVES for x in found)
