"""A check, once per model, that nothing escapes the capture, that capturing changes no loss and that no loss mixes examples."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quietgrad.clipping.backward import (
    PerExampleLoss,
    accumulated_gradients,
    forward_captured,
    grads_of,
    uncompiled,
    visit_captured_calls,
    with_any_checkpointing,
)
from quietgrad.clipping.capture import Recording, Use
from quietgrad.clipping.factors import Contribution, weighted_sum
from quietgrad.clipping.layout import Layout
from quietgrad.clipping.tally import contributions_of
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, slice_batch

# Captured and plain gradients of one example may differ by rounding only.
LARGEST_DIFFERENCE = 1e-3
LARGEST_DIFFERENCE_IN_HALF_PRECISION = 1e-1

# Model -> trainable parameters for which the capture was checked; entries vanish with their models.
_checked: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def check_capture_once(model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch) -> None:
    """On first use of a model: captures one example alone and compares with plain autograd on the same graph.

    Finds parameters that act outside their module's call (functional use, a weight penalty in the loss), modules whose repeated forward pass differs
    (randomness), and layers without an example dimension, which would go unnoticed where another dimension equals the batch size. Then
    two examples together: the first one's loss must have no gradient at the second one's activations. Cost: three examples' forward and
    backward passes, once per model and set of trainable parameters; the random state is left as it was. An example with a gradient that is not finite
    decides nothing, and the next call checks again.

    Raises:
        ValueError: naming the parameter or layer.
    """
    names = frozenset(layout.parameters)
    if _checked.get(model) == names:
        return
    devices = sorted({p.device.index or 0 for p in layout.parameters.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        conclusive = with_any_checkpointing(
            model, lambda reentrant: _same_gradients(model, layout, per_example_loss, batch, reentrant)
        )
    if batch_size_of(batch) > 1:
        two = slice_batch(batch, 0, 2)
        with_any_checkpointing(
            model, lambda reentrant: _check_two_examples(model, layout, per_example_loss, two, devices, reentrant)
        )
    if conclusive:
        _checked[model] = names


def _same_gradients(
    model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch, reentrant: bool
) -> bool:
    captured: dict[str, list[Contribution]] = defaultdict(list)
    recordings: list[Recording] = []

    def receive(use: Use) -> None:
        for name, contribution in contributions_of(use, 1, recordings[0]).items():
            captured[name].append(contribution)

    one = slice_batch(batch, 0, 1)
    with forward_captured(model, layout, per_example_loss, one, receive, reentrant, switch_off=False) as (
        losses,
        recording,
    ):
        recordings.append(recording)
        parameters: list[Tensor] = list(layout.parameters.values())
        if reentrant:
            found = tuple(accumulated_gradients(losses.sum(), layout.parameters))
        else:
            found = grads_of(losses.sum(), [recording.root, *parameters])[1:]
        called = {name for s in layout.sites if s.name in recording.calls for name in s.parameters.values()}
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters) or torch.is_autocast_enabled()
    half = half or losses.dtype in (torch.float16, torch.bfloat16) or _is_half(captured)
    limit = LARGEST_DIFFERENCE_IN_HALF_PRECISION if half else LARGEST_DIFFERENCE
    plain = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(layout.parameters.items(), found, strict=True)
    }
    size = sum(float(g.double().pow(2).sum()) for g in plain.values()) ** 0.5
    weight = torch.ones(1, device=losses.device)
    with torch.no_grad():
        for name, parameter in layout.parameters.items():
            dtype = accumulation_dtype(parameter.dtype)
            difference = -plain[name].to(dtype)
            for use in captured.get(name, []):
                difference = difference + weighted_sum(use, weight, parameter.shape, dtype)
            error = float(difference.double().norm())
            if not torch.isfinite(torch.tensor(error + size)):
                return False
            if error > limit * max(size, 1e-20):
                raise ValueError(_escaped(name, name in called))
    return True


def _escaped(name: str, called: bool) -> str:
    if not called:
        return (
            f"parameter {name!r} influences the loss, but the module that owns it is never called, so its per-example gradients "
            "cannot be captured; freeze it, call the module instead of using its parameter directly, or take one example at a time "
            "(engine='one-example', exact for every layer)"
        )
    return (
        f"parameter {name!r}: the captured per-example gradient is not the one that autograd computes, so clipping would not bound it; it "
        "is used outside its module's call (a functional use, a weight penalty in the loss), or its module's forward pass is "
        "random; call the module instead, take the penalty out of the loss (weight_decay), or freeze it"
    )


def _is_half(captured: dict[str, list[Contribution]]) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return any(
        x.dtype in halves
        for uses in captured.values()
        for use in uses
        for x in vars(use).values()
        if isinstance(x, Tensor)
    )


def _check_two_examples(
    model: nn.Module,
    layout: Layout,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    devices: list[int],
    reentrant: bool,
) -> None:
    """One example's loss must not depend on the other's activations, and capture must not have changed it."""
    elsewhere: list[tuple[str, float, float]] = []

    def receive(use: Use) -> None:
        gradient = use.output_gradients.get(0)
        if gradient is not None and gradient.dim() and gradient.shape[0] == 2:
            own, other = gradient.detach().abs().flatten(1).amax(dim=1).tolist()
            elsewhere.append((use.site.name, own, other))

    passes = forward_captured(model, layout, per_example_loss, batch, receive, reentrant)
    with torch.random.fork_rng(devices), passes as (losses, recording):
        visit_captured_calls(losses[:1], recording, layout)
        expanded, with_capture = sorted(recording.expanded), losses.detach()
    for name, own, other in elsewhere:
        if other > 1e-6 * own:
            raise ValueError(_MIXES.format(f"its gradient at layer {name!r}"))
    _require_same_loss_alone(model, per_example_loss, batch, devices)
    if not expanded:
        return
    # The same random state again: dropout draws the same masks.
    with torch.random.fork_rng(devices), _without_graph(), uncompiled(model):
        without = per_example_loss(model, batch)
    if not torch.allclose(with_capture, without, rtol=1e-2, atol=1e-4, equal_nan=True):
        raise ValueError(
            f"layer {expanded[0]!r} is called with one value for all examples, and giving every example its own changes the loss; give its "
            "input an example dimension, or freeze its parameters (requires_grad_(False))"
        )


@contextlib.contextmanager
def _without_graph() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        # Checkpointed models warn of a forward pass without gradients, which is what is wanted here.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
        yield


_MIXES = (
    "the loss of one example depends on another example of the batch (seen in {}), so no per-example gradient exists; contrastive losses and "
    "batch statistics cannot be trained privately per example: use a loss of each example alone, or make the group of examples that "
    "belong together one record"
)


def _require_same_loss_alone(
    model: nn.Module, per_example_loss: PerExampleLoss, two: Batch, devices: list[int]
) -> None:
    """In evaluation mode, so that dropout draws nothing, an example's loss is the same with and without the other (detached statistics too)."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.random.fork_rng(devices), _without_graph(), uncompiled(model):
            together, again = per_example_loss(model, two), per_example_loss(model, two)
            alone = per_example_loss(model, slice_batch(two, 0, 1))
    finally:
        for module, training in modes:
            module.training = training
    if not torch.equal(together, again):
        return  # random in evaluation mode too: nothing can be compared
    tolerance = 5e-2 if together.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled() else 1e-2
    if not torch.allclose(together[:1], alone, rtol=tolerance, atol=1e-4, equal_nan=True):
        raise ValueError(_MIXES.format("its value without the other"))
