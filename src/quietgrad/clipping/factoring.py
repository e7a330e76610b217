"""One forward and one backward pass to per-example gradients in factored form, and a check that nothing escaped the capture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture import Recording, captured, input_of
from quietgrad.clipping.factors import Contribution, weighted_sum
from quietgrad.clipping.fallback import fallback_contributions
from quietgrad.clipping.layout import Layout
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, slice_batch

PerExampleLoss = Callable[[nn.Module, Batch], Tensor]

# Captured and plain gradients of one example may differ by rounding only.
LARGEST_DIFFERENCE = 1e-3
LARGEST_DIFFERENCE_IN_HALF_PRECISION = 1e-1

# Model -> trainable parameters for which the capture was checked; entries vanish with their models.
_checked: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Factored:
    """Per-example gradients of one micro-batch in factored form, by parameter name."""

    contributions: dict[str, list[Contribution]]
    parameters: dict[str, nn.Parameter]
    batch_size: int
    device: torch.device


def factor(model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch) -> Factored:
    """Runs forward and backward once and returns every parameter's per-example gradients in factored form."""
    n = batch_size_of(batch)
    with torch.enable_grad():
        with captured(layout, n) as recording:
            losses = per_example_loss(model, batch)
        _require_per_example(losses, n)
        gradients, _ = _gradients(losses, layout, recording)
    contributions = _contributions(recording, gradients, n)
    return Factored(contributions, layout.parameters, n, losses.device)


def check_capture_once(model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch) -> None:
    """On first use of a model: captures one example alone and compares with plain autograd on the same graph.

    Finds parameters that act outside their module's call (functional use, a weight penalty in the loss), modules whose repeated forward pass differs
    (randomness), and layers without an example dimension, which would go unnoticed where another dimension equals the batch size. Cost: one
    example, once per model and set of trainable parameters; the random state is left as it was. An example with a gradient that is not
    finite decides nothing, and the next call checks again.

    Raises:
        ValueError: naming the parameter or layer.
    """
    names = frozenset(layout.parameters)
    if _checked.get(model) == names:
        return
    devices = sorted({p.device.index or 0 for p in layout.parameters.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.enable_grad():
        with captured(layout, 1) as recording:
            losses = per_example_loss(model, slice_batch(batch, 0, 1))
        _require_per_example(losses, 1)
        gradients, plain = _gradients(losses, layout, recording, with_parameters=True)
    contributions = _contributions(recording, gradients, 1)
    half = any(g.dtype in (torch.float16, torch.bfloat16) for found in gradients for g in found.values())
    limit = LARGEST_DIFFERENCE_IN_HALF_PRECISION if half else LARGEST_DIFFERENCE
    size = sum(float(g.double().pow(2).sum()) for g in plain.values()) ** 0.5
    one = losses.new_ones(1)
    for name, parameter in layout.parameters.items():
        dtype = accumulation_dtype(parameter.dtype)
        difference = -plain[name].to(dtype)
        for use in contributions.get(name, []):
            difference = difference + weighted_sum(use, one, parameter.shape, dtype)
        error = float(difference.double().norm())
        if not torch.isfinite(torch.tensor(error + size)):
            return
        if error > limit * max(size, 1e-20):
            raise ValueError(
                f"parameter {name!r}: the captured per-example gradient is not the one that autograd computes, so clipping would not bound it; it "
                "is used outside its module's call (a functional use, a weight penalty in the loss), or its module's forward pass is "
                "random; call the module instead, take the penalty out of the loss (weight_decay), or freeze it"
            )
    _checked[model] = names


def _contributions(recording: Recording, gradients: list[dict[int, Tensor]], n: int) -> dict[str, list[Contribution]]:
    contributions: dict[str, list[Contribution]] = defaultdict(list)
    with torch.no_grad():
        for use, at_outputs in zip(recording.uses, gradients, strict=True):
            if not at_outputs:
                continue  # the loss does not depend on this call
            found: dict[str, Contribution]
            if use.site.rule is None:
                found = dict(fallback_contributions(use, at_outputs, n))
            else:
                found = use.site.rule(use.site.module, input_of(use), at_outputs[0], use.site.parameters)
            for local, contribution in found.items():
                contributions[use.site.parameters[local]].append(contribution)
    return dict(contributions)


def _require_per_example(losses: object, n: int) -> None:
    # Messages do not give the batch's size away.
    if not isinstance(losses, Tensor) or losses.shape != (n,):
        what = f"a tensor of {losses.dim()} dimensions" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"per_example_loss returned {what}; return a tensor of shape (examples,), one loss per example (for torch losses: reduction='none'; "
            "sum or average over tokens yourself; a loss that compares examples has no per-example form)"
        )
    if not losses.requires_grad:
        raise ValueError(
            "per_example_loss returned losses without a gradient; check that it does not detach or use torch.no_grad()"
        )


def _gradients(
    losses: Tensor, layout: Layout, recording: Recording, with_parameters: bool = False
) -> tuple[list[dict[int, Tensor]], dict[str, Tensor]]:
    """Gradients at captured outputs, by use; with ``with_parameters`` also those of all parameters, from the same backward pass."""
    edges = [edge for use in recording.uses for _, edge in use.edges]
    called = {name for use in recording.uses for name in use.site.parameters.values()}
    # A parameter that no captured call accounts for must not influence the loss: asking for its gradient finds out.
    asked = {name: p for name, p in layout.parameters.items() if with_parameters or name not in called}
    if not edges and not asked:
        return [], {}
    try:
        wanted: list[Any] = [*edges, *asked.values()]  # autograd takes edges and tensors together
        found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" in str(error).lower():
            raise ValueError(
                "reentrant gradient checkpointing hides the layers from per-example clipping; use the non-reentrant kind: "
                "use_reentrant=False (Hugging Face: gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}))"
            ) from error
        raise
    plain: dict[str, Tensor] = {}
    for (name, parameter), gradient in zip(asked.items(), found[len(edges) :], strict=True):
        if gradient is not None and name not in called:
            raise ValueError(
                f"parameter {name!r} influences the loss, but the module that owns it is never called, so its per-example gradients "
                "cannot be captured; freeze it, or call the module instead of using its parameter directly"
            )
        plain[name] = torch.zeros_like(parameter) if gradient is None else gradient
    remaining = iter(found)
    gradients: list[dict[int, Tensor]] = []
    for use in recording.uses:
        at_outputs = {position: next(remaining) for position, _ in use.edges}
        gradients.append({position: g for position, g in at_outputs.items() if g is not None})
    return gradients, plain
