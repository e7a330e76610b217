"""What the generic fallback makes of each example: compared alone and in company, as losses and
factors are.

It repeats a module's forward pass for each example, and sees what the module is called with. What
the module reads besides was set for the whole batch: ``self.mask[: len(x)]`` is the first example's
for all of them, though the model itself mixes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quietgrad.clipping.capture.call_shapes import tensors_among
from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.fallback import gradients_in_turn
from quietgrad.clipping.soundness.company.rule_gradients import RuleGradients
from quietgrad.clipping.soundness.fingerprints import numbers, wide

KIND = "repeated"
KEPT = 4096  # numbers of a gradient, which sums of its entries with known numbers stand for


def repeated_gradients(use: Use, examples: int, recording: Recording) -> dict[str, RuleGradients]:
    """The module's name of each parameter, and what the fallback gives, where there is no rule."""
    if use.site.rule is not None or not use.output_gradients:
        return {}
    parts: dict[str, list[Tensor]] = {}
    try:
        with recording.pause():
            for gradients in gradients_in_turn(use, examples):
                for name, gradient in gradients.items():
                    parts.setdefault(name, []).append(_few_of(gradient))
    except ValueError:  # such a model is taken one at a time, or refused, where it is clipped
        return {}
    room = _norms([*use.output_gradients.values()], examples)
    inputs = _norms(tensors_among(use.args, use.kwargs), examples)
    room = room * torch.where(inputs > 0, inputs, 1.0)
    return {name: RuleGradients(KIND, (torch.stack(p),), room) for name, p in parts.items()}


def _few_of(gradient: Tensor) -> Tensor:
    flat = wide(gradient.detach().flatten())
    if len(flat) <= KEPT:
        return flat
    known = flat * numbers(len(flat), flat.device, flat.dtype)
    return torch.nn.functional.pad(known, (0, -len(flat) % KEPT)).view(-1, KEPT).sum(0)


def _norms(tensors: list[Tensor], examples: int) -> Tensor:
    """[examples] of all together that have the examples first."""
    squares = [
        torch.linalg.vector_norm(wide(t.detach()).flatten(1), dim=1).square()
        for t in tensors
        if t.dim() > 1 and len(t) == examples and t.is_floating_point()
    ]
    if not squares:
        return torch.zeros(examples, device=tensors[0].device if tensors else None)
    return torch.stack(squares).sum(0).sqrt()
