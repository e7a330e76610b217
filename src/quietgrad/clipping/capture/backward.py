"""One forward and one backward pass under capture, and plain gradients of a loss, for every kind of
gradient checkpointing.

Autograd is asked for the root's gradient only (see ``capture``). Reentrant checkpointing forbids
asking for chosen gradients; there the parameters are switched off for the pass and everything else
is computed, which is the same work.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.capture import Receiver, Recording, attach_frozen, captured
from quietgrad.clipping.capture.escapes import (
    never_called,
    not_expandable,
    reentrant_and_spread,
)
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.capture.layout.modules import modules_of
from quietgrad.clipping.capture.routines.opening import routines_opened
from quietgrad.clipping.capture.row_norms import RowWatch
from quietgrad.clipping.capture.spread import others_left_alone
from quietgrad.generators import States
from quietgrad.tensors import Batch, batch_size_of

Result = TypeVar("Result")

# Passes of which one has to reach what is trained: all of so many leave out two layers, each at a
# rate of one in two, once in a million times.
TURNS = 50

PerExampleLoss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Checkpointing:
    """What was found out about a model's gradient checkpointing.

    Attributes:
        reentrant: calls of captured modules come without a graph, which is built in the backward
            pass.
    """

    reentrant: bool = False


class _NeedsPlainBackward(Exception):
    """Autograd cannot, or must not, be asked for chosen gradients."""


def with_any_checkpointing(known: Checkpointing, work: Callable[[bool], Result]) -> Result:
    """Runs ``work(reentrant)``, a second time with True if the first finds reentrant checkpointing;
    ``known`` remembers.
    """
    if not known.reentrant:
        try:
            return work(False)
        except _NeedsPlainBackward:
            known.reentrant = True
    return work(True)


@contextlib.contextmanager
def forward_captured(
    model: nn.Module,
    layout: Layout,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    receive: Receiver | None,
    reentrant: bool,
    switch_off: bool = True,
    row_watch: RowWatch | None = None,
) -> Iterator[tuple[Tensor, Recording]]:
    """Runs the forward pass; the hooks stay for the backward passes inside the block.

    Under reentrant checkpointing parameters are switched off, unless ``switch_off`` is False and
    their own gradients are wanted too. ``row_watch``: those alone are clipped, and what is captured
    is beside them (``Recording.row_watch``).

    Yields:
        ([examples] losses, the recording).
    """
    n = batch_size_of(batch)
    if reentrant and (layout.spread is not None or layout.cut is not None):
        raise reentrant_and_spread()
    with contextlib.ExitStack() as stack:
        stack.enter_context(layout.running())
        if reentrant and switch_off:
            stack.enter_context(_switched_off(layout))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncompiled(model))
        recording = stack.enter_context(captured(layout, n, receive, reentrant, row_watch))
        if row_watch is None:
            stack.enter_context(routines_opened(layout, n, recording))
        else:  # also where the pass fails: no activation outlives it
            stack.callback(row_watch.forget)
        try:
            losses = per_example_loss(model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if recording.expanded:
                raise not_expandable(sorted(recording.expanded)[0]) from error
            raise
        recording.in_forward = False
        if recording.hidden and not reentrant:
            raise _NeedsPlainBackward
        require_per_example(losses, n)
        if layout.spread is not None or layout.cut is not None:
            require_gradient(losses)  # ranks make the backward pass together
        yield losses, recording


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Modules compiled by ``torch.compile`` run as they were written: hooks see nothing of compiled
    code.
    """
    # Nothing can be compiled in a process that has not imported the compiler.
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None or not any(_is_compiled(module) for module in modules_of(model)):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@contextlib.contextmanager
def _switched_off(layout: Layout) -> Iterator[None]:
    try:
        for parameter in layout.parameters.values():
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in layout.parameters.values():
            parameter.requires_grad_(True)


def visit_captured_calls(
    losses: Tensor, recording: Recording, layout: Layout, retain_graph: bool = False
) -> None:
    """The backward pass that delivers every captured call and computes no weight gradient.

    Raises:
        NotCaptured: for a parameter that influences the loss though its module was never called.
    """
    if recording.attach_all and losses.requires_grad:
        with others_left_alone([recording.root]):
            losses.sum().backward(retain_graph=retain_graph)
        return
    called = {
        name for s in layout.sites if s.name in recording.calls for name in s.parameters.values()
    }
    # A parameter that no captured call accounts for must not influence the loss: asking for its
    # gradient finds out.
    asked = {
        name: p
        for name in layout.parameters
        if name not in called and (p := layout.in_graph(name)) is not None
    }
    wanted = [recording.root, *asked.values()]
    found = grads_of(losses.sum(), wanted, retain_graph)
    for name, gradient in zip(asked, found[1:], strict=True):
        if gradient is not None:
            raise never_called(name)


def grads_of(
    loss: Tensor, wanted: list[Tensor], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` where it is allowed to be used; None of a loss without a gradient."""
    if not loss.requires_grad:
        return (None,) * len(wanted)
    try:
        return torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=retain_graph)
    except RuntimeError as error:
        if "checkpoint" in str(error).lower() and ".grad()" in str(error):
            raise _NeedsPlainBackward from error
        raise


def gradients_of_batch(
    model: nn.Module,
    layout: Layout,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    reentrant: bool,
) -> dict[str, Tensor | None]:
    """Parameter name -> gradient of a batch's summed losses, by plain autograd."""
    hidden: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not torch.is_grad_enabled():
                hidden.append(name)

        return hook

    with contextlib.ExitStack() as stack:
        stack.enter_context(layout.running())
        stack.enter_context(torch.enable_grad())
        if reentrant:
            handles = attach_frozen(layout, torch.zeros((), device="cpu", requires_grad=True))
        else:
            handles = [
                site.module.register_forward_pre_hook(note(site.name)) for site in layout.sites
            ]
        for handle in handles:
            stack.callback(handle.remove)
        losses = per_example_loss(model, batch)
        require_per_example(losses, batch_size_of(batch))
        if hidden:
            raise _NeedsPlainBackward
        return plain_gradients(losses.sum(), layout.parameters, reentrant)


def plain_gradients(
    loss: Tensor, parameters: dict[str, nn.Parameter], reentrant: bool
) -> dict[str, Tensor | None]:
    """Parameter name -> gradient of a scalar loss; ``.grad`` fields are left as they were."""
    if not reentrant:
        return dict(zip(parameters, grads_of(loss, list(parameters.values())), strict=True))
    return dict(zip(parameters, accumulated_gradients(loss, parameters), strict=True))


def accumulated_gradients(loss: Tensor, parameters: dict[str, nn.Parameter]) -> list[Tensor | None]:
    """Gradients where autograd refuses to compute chosen ones; ``.grad`` fields are left as they
    were, of everything else that the loss depends on too.
    """
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        with others_left_alone(parameters.values()):
            if loss.requires_grad:
                loss.backward()
        return [p.grad for p in parameters.values()]
    finally:
        for name, p in parameters.items():
            p.grad = before[name]


def require_per_example(losses: Any, n: int) -> None:
    """Checks what the user's loss returned; messages do not give the batch's size away.

    Raises:
        ValueError: unless it is one loss per example.
    """
    shape = losses.shape if isinstance(losses, Tensor) else None
    if shape != (n,):
        what = type(losses).__name__ if shape is None else f"a tensor of {len(shape)} dimensions"
        if shape is not None and len(shape) == 1:  # what is asked for, but for its length
            what = "a row of another number of losses than the batch has examples"
        raise ValueError(
            f"per_example_loss returned {what}; return a tensor of shape (examples,), one loss per "
            "example (for torch losses: reduction='none'; "
            "sum or average over tokens yourself; a loss that compares examples has no per-example "
            "form)"
        )


def require_gradient(losses: Tensor) -> None:
    """Checks that losses depend on what is trained.

    Raises:
        ValueError: where they do not.
    """
    if not losses.requires_grad:
        raise ValueError(
            "per_example_loss returned losses without a gradient; check that it does not detach or "
            "use torch.no_grad()"
        )


def of_a_pass_that_trains(per_example_loss: PerExampleLoss) -> PerExampleLoss:
    """The loss, of the first pass that reaches what is trained. LayerDrop may leave out every layer
    that has an adapter: such a record adds zero where it is clipped, and shows nothing where model
    and loss are looked at, before the first release.

    Raises:
        ValueError: in its call, where no number that is drawn makes a difference.
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(TURNS):
            before = States.now()
            losses = per_example_loss(model, batch)
            require_per_example(losses, batch_size_of(batch))
            if losses.requires_grad or not before.moved():
                break
        require_gradient(losses)
        return losses

    return loss
