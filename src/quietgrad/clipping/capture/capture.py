"""Capture of layer inputs and of gradients at layer outputs, by forward hooks that are gone when
the block ends.

Every captured call's outputs pass through an identity of the autograd graph that hangs on one extra
leaf, the root. Asking autograd for the root's gradient alone makes the backward pass visit every
captured call and compute no weight gradient; each call's output gradient is handed to a receiver
the moment it is complete, with the inputs, which autograd keeps as it keeps its own saved tensors:
gradient checkpointing recomputes them. Memory over a plain backward pass: what the receiver keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quietgrad.clipping.capture.call_shapes import (
    give_outputs_examples,
    in_rows,
    require_examples_first,
    require_plain,
    tensors_among,
)
from quietgrad.clipping.capture.escapes import NotCaptured, gradients_of_its_own
from quietgrad.clipping.capture.layout import Layout, SharedInputs, Site
from quietgrad.clipping.capture.row_norms import RowWatch, row_hook, watches_rows
from quietgrad.clipping.capture.spread import Spread, put_inside
from quietgrad.clipping.capture.units import first_dimension
from quietgrad.clipping.norms.rules.registry import kept_input
from quietgrad.tensors import Autocast, map_tensors


@dataclass(frozen=True)
class Use:
    """One call of a captured module, with the gradients at its outputs.

    Attributes:
        site: the module.
        args, kwargs: its inputs, detached.
        output_gradients: position among the flattened outputs that the loss depends on -> gradient.
        shared: places among the flattened inputs that all examples share.
        autocast: of the call, where the fallback may have to repeat it.
    """

    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_gradients: dict[int, Tensor]
    shared: frozenset[int] = frozenset()
    autocast: Autocast | None = None

    @property
    def input(self) -> Tensor:
        """The one tensor input of a module that has a rule."""
        return tensors_among(self.args, self.kwargs)[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All inputs and output gradients."""
        return [*tensors_among(self.args, self.kwargs), *self.output_gradients.values()]


Receiver = Callable[[Use], None]
NONE: frozenset[int] = frozenset()


@dataclass
class Recording:
    """What a capture block shares with its hooks.

    Attributes:
        root: the leaf whose gradient makes the backward pass visit every captured call.
        receive: called once per captured call during the backward pass; None ignores what arrives.
        spread: where parameters are spread over ranks.
        calls: site name -> number of calls seen in the forward pass.
        in_forward: True until the losses exist; calls of recomputed forward passes are not counted.
        attach_all: also where no output requires a gradient (reentrant checkpointing).
        expanded: names of the modules whose inputs or outputs were expanded to the batch size.
        hidden: names of the modules that were called without a graph in the forward pass.
        opened: names of the modules whose last call was captured map by map (``routines``).
        paused: True while a module is called by the library itself.
        row_watch: told of linear layers' calls. What is captured is for spreads of autograd's own
            gradients: calls that cannot be are left out, and nothing that runs is changed.
    """

    root: Tensor
    receive: Receiver | None
    spread: Spread | None = None
    calls: dict[str, int] = field(default_factory=dict)
    in_forward: bool = True
    attach_all: bool = False
    expanded: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    paused: bool = False
    row_watch: RowWatch | None = None

    def note_call(self, site: Site) -> None:
        """Counts a call of the forward pass."""
        if self.in_forward:
            self.calls[site.name] = self.calls.get(site.name, 0) + 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The hooks do nothing inside the block."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


@dataclass(frozen=True)
class Call:
    """What of a call is not a tensor: the inputs' tensors are autograd's to keep."""

    site: Site
    recording: Recording
    leaves: tuple[Any, ...]
    tensor_places: tuple[int, ...]
    spec: Any  # None: positional tensors and nothing else, as nearly always
    output_positions: tuple[int, ...]
    shared: frozenset[int]
    autocast: Autocast | None = None

    def deliver(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if self.recording.in_forward:
            if self.recording.row_watch is None:
                raise gradients_of_its_own(self.site)
            return
        each = zip(self.output_positions, gradients, strict=True)
        at_outputs = {place: g for place, g in each if g is not None}
        if self.recording.receive is None or not at_outputs:
            return
        args, kwargs = tuple(inputs), {}
        if self.spec is not None:
            leaves = list(self.leaves)
            for place, tensor in zip(self.tensor_places, inputs, strict=True):
                leaves[place] = tensor
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = Use(self.site, args, kwargs, at_outputs, self.shared, self.autocast)
        self.recording.receive(found)


class Identity(torch.autograd.Function):
    """Outputs unchanged and without a copy; in the backward pass their gradients are delivered and
    passed on.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, inputs: list[Tensor], root: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        # The same memory in a tensor that is no view: in-place operations are welcome on it.
        return tuple(output.data for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        try:
            inputs = ctx.saved_tensors
        except RuntimeError as error:  # written into since: the module may not need them any more
            if call.recording.row_watch is None or "inplace" not in str(error):
                raise
        else:
            gradients = tuple(in_rows(gradient) for gradient in gradients)
            call.deliver(inputs, gradients)
        return (None, None, None, *gradients)


@contextmanager
def captured(
    layout: Layout,
    batch_size: int,
    receive: Receiver | None,
    attach_all: bool = False,
    row_watch: RowWatch | None = None,
) -> Iterator[Recording]:
    """Forward and backward passes inside the block deliver every call of the layout's modules to
    ``receive``.

    On exit, also by an exception, no hook is left. Inputs of size 1 along the example dimension
    (BERT's default ``position_ids``) are expanded to the batch size, and so are such outputs of
    modules without a rule (T5's position bias): every example gets a gradient of its own.

    Raises:
        ValueError: from the forward pass, if a captured module gets inputs without an example
            dimension.
    """
    device = next(iter(layout.parameters.values())).device
    root = torch.zeros((), device=device, requires_grad=True)
    recording = Recording(root, receive, layout.spread, attach_all=attach_all, row_watch=row_watch)
    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        for site in layout.sites:
            record = _recorder(site, recording, batch_size, layout.shared)
            if row_watch is None:
                expand = _expander(site, recording, batch_size, layout.shared)
                handles.append(site.module.register_forward_pre_hook(expand, with_kwargs=True))
            elif watches_rows(site, layout):
                record = row_hook(site, row_watch, recording, batch_size, record)
            # A rule is of what the module itself returns, before hooks change it; other modules run
            # again with their hooks, and what is cut is given its layout by one.
            first = site.rule is not None and layout.cut is None
            hook = site.module.register_forward_hook(record, prepend=first, with_kwargs=True)
            handles.append(hook)
            if not first:
                put_inside(site.module, hook.id)
        if attach_all:
            handles += attach_frozen(layout, root)
        yield recording
    finally:
        for handle in handles:
            handle.remove()


class _Hang(torch.autograd.Function):
    """The output unchanged, as something that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        return output.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def attach_frozen(layout: Layout, root: Tensor) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that hang the outputs of frozen modules on the root. Reentrant checkpointing builds no
    graph for a segment whose inputs require no gradient (frozen embeddings below LoRA): its
    trainable layers would get no gradient, without an error.
    """

    def hang(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, Tensor) or output.requires_grad:
            return None
        return _Hang.apply(root, output) if output.is_floating_point() else None

    return [module.register_forward_hook(hang) for module in layout.frozen]


def is_off(recording: Recording) -> bool:
    return recording.paused or not torch.is_grad_enabled()


def _note_hidden(site: Site, recording: Recording) -> None:
    # So reentrant checkpointing calls modules, or a user's own no_grad.
    if recording.in_forward and not recording.paused and not torch.is_grad_enabled():
        recording.hidden.add(site.name)


def _expander(
    site: Site, recording: Recording, batch_size: int, shared: SharedInputs
) -> Callable[..., Any]:
    def expand(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_off(recording):
            return None
        require_plain(site, (*args, *kwargs.values()))
        if batch_size == 1 or not site.unit.examples_first(module, args):
            return None
        if site.rule is not None and args and first_dimension(args[0]) == batch_size:
            return None
        leaves, spec = _flattened(args, kwargs)
        common = shared.places(site.name, leaves, spec, batch_size) if site.rule is None else NONE
        if any(first_dimension(x) == batch_size for i, x in enumerate(leaves) if i not in common):
            return None
        recording.expanded.add(site.name)

        def widen(x: Tensor) -> Tensor:
            return x.expand(batch_size, *x.shape[1:]) if x.dim() and x.shape[0] == 1 else x

        return map_tensors(args, widen), map_tensors(kwargs, widen)

    return expand


def _recorder(
    site: Site, recording: Recording, batch_size: int, shared: SharedInputs
) -> Callable[..., Any]:
    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        try:
            return attached(args, kwargs, output)
        except NotCaptured:
            if recording.row_watch is None:
                raise
        return None

    def attached(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if is_off(recording):
            _note_hidden(site, recording)
            return None
        if site.name in recording.opened:
            recording.note_call(site)
            return None
        simple = isinstance(output, Tensor)
        outputs, output_spec = ([output], None) if simple else pytree.tree_flatten(output)
        positions = tuple(i for i, leaf in enumerate(outputs) if _carries_gradient(leaf, recording))
        if not positions:
            return None
        require_plain(site, (*args, *kwargs.values(), *outputs))
        if site.rule is not None:
            require_examples_first(site, args, kwargs, batch_size)
        else:
            expanded = recording.expanded if recording.row_watch is None else None
            give_outputs_examples(site, outputs, positions, batch_size, expanded)
        leaves, spec = _flattened(args, kwargs)
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        inputs = [kept_input(site.rule, site.parameters, leaves[i]) for i in places]
        if recording.spread is not None:
            inputs = [recording.spread.lasting(x) for x in inputs]
        common = shared.places(site.name, leaves, spec, batch_size) if site.rule is None else NONE
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        recording.note_call(site)
        cast = None if site.rule is not None else Autocast.now(recording.root.device)
        call = Call(site, recording, others, places, spec, positions, common, cast)
        for i, attached in zip(
            positions,
            Identity.apply(call, inputs, recording.root, *(outputs[i] for i in positions)),
            strict=True,
        ):
            outputs[i] = attached
        return outputs[0] if simple else pytree.tree_unflatten(outputs, output_spec)  # type: ignore[arg-type]

    return record


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Leaves and structure; structure None: positional tensors alone, as nearly always."""
    if not kwargs and all(isinstance(x, Tensor) for x in args):
        return list(args), None
    return pytree.tree_flatten((args, kwargs))


def _carries_gradient(leaf: Any, recording: Recording) -> bool:
    return isinstance(leaf, Tensor) and (
        leaf.requires_grad or (recording.attach_all and leaf.is_floating_point())
    )
