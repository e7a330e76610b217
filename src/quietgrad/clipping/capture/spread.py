"""Parameters that are spread over ranks by ``fully_shard``, while a model runs.

At rest a module holds a shard of each of its parameters (a DTensor). Before its forward pass, and
again before its backward pass, all ranks gather the whole ones, which take part in the graph, and
drop them afterwards. A pass that is not followed by a backward pass leaves some of them behind:
every pass of the library ends with all parameters at rest.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.tensors import is_spread, local_of

TOO_OLD = (
    "the parameters are sharded by fully_shard, and this version of torch cannot put them away "
    "after a pass (FSDPModule.reset_iter_state is missing); install a newer torch"
)


def sharding_modules(model: nn.Module) -> list[Any]:
    """The modules that were given to ``fully_shard``."""
    return [
        module
        for module in model.modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    ]


def put_inside(module: nn.Module, hook: int) -> None:
    """Lets a forward hook that was registered last run before what ``fully_shard`` does, so that
    the backward pass gathers before it meets the hook's node; after hooks that were there before,
    as those are that give a cut layer's output its layout. The order of others stays.
    """
    hooks: Any = module._forward_hooks
    names = {key: getattr(found, "__qualname__", "") for key, found in hooks.items()}
    gathering = next((k for k, name in names.items() if name == "FSDPState._post_forward"), None)
    if gathering is None:
        return
    keys = list(hooks)
    for key in keys[keys.index(gathering) :]:
        if key != hook:
            hooks.move_to_end(key)


def put_away(model: nn.Module) -> None:
    """All parameters at rest, whatever pass was made last. Only where passes begin can they be told
    to forget about one; before a first pass there is nothing to put away.
    """
    for module in sharding_modules(model):
        # A torch without this is refused by name (TOO_OLD).
        if module._get_fsdp_state()._is_root and hasattr(module, "reset_iter_state"):
            module.reset_iter_state()


@dataclass
class Spread:
    """What is known of a model whose parameters are spread over ranks.

    Attributes:
        model: the user's.
        whole: parameter name -> the tensor that stands in its place in the graph of every pass. Its
            memory is there only while its module runs.
    """

    model: nn.Module
    whole: dict[str, Tensor] = field(default_factory=dict)
    _memory: dict[str, int] = field(default_factory=dict)
    _gathered: frozenset[int] = frozenset()

    def lasting(self, kept: Tensor) -> Tensor:
        """A tensor that is kept of a pass, or a copy of it where its memory is that of a gathered
        parameter: it goes with the parameter, before what is kept is used.
        """
        if type(kept) is not Tensor:
            return kept
        if len(self._memory) != len(self.whole):  # asked at every call of every layer
            storages = {name: local_of(p).untyped_storage() for name, p in self.whole.items()}
            self._memory = {name: storage._cdata for name, storage in storages.items()}
            self._gathered = frozenset(self._memory.values())
        return kept.clone() if kept.untyped_storage()._cdata in self._gathered else kept

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A pass, with its backward pass where there is one; afterwards all parameters are at rest,
        also after an exception.
        """
        handles = self._watched()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            put_away(self.model)

    def _watched(self) -> list[Any]:
        """Hooks that note what stands in the graph for parameters that were not seen yet."""
        missing = {
            name: (module, local, p)
            for path, module in self.model.named_modules()
            for local, p in module._parameters.items()
            if p is not None
            and is_spread(p)
            and (name := f"{path}.{local}" if path else local) not in self.whole
        }
        if not missing:
            return []

        def note(module: nn.Module, args: Any) -> None:
            for name, (owner, local, at_rest) in list(missing.items()):
                found = owner._parameters[local]
                # Of what is cut beside it stands a DTensor, too: of fewer ranks.
                if found is not None and found is not at_rest:
                    self.whole[name] = found
                    del missing[name]

        # Registered after those that gather, so they run after them.
        return [m.register_forward_pre_hook(note) for m in sharding_modules(self.model)]


Taker = Callable[[str, Tensor], None]


def each_gradient(loss: Tensor, parameters: dict[str, Tensor], take: Taker) -> None:
    """Hands the gradients of a scalar loss to ``take``, one parameter after the other as the
    backward pass forms them: no more than one module's are there at a time. ``.grad`` fields are
    left as they were.

    Args:
        loss: of a pass whose parameters may be spread over ranks.
        parameters: name -> tensor in the graph, a leaf.
        take: told name and gradient, which is dropped afterwards; not called for parameters that
            the loss does not depend on.
    """
    before = {name: p.grad for name, p in parameters.items()}
    handles = []

    def handed(name: str) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            gradient, p.grad = p.grad, None
            assert gradient is not None
            take(name, gradient)

        return hook

    try:
        for name, p in parameters.items():
            p.grad = None
            handles.append(p.register_post_accumulate_grad_hook(handed(name)))
        with others_left_alone(parameters.values()):
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        for name, p in parameters.items():
            p.grad = before[name]


@contextlib.contextmanager
def others_left_alone(own: Iterable[Tensor]) -> Iterator[None]:
    """Inside, ``backward()`` changes no ``.grad`` but those of ``own``, as it seems from outside.
    Else it gives a gradient to every leaf that a loss depends on, also to those beside what is
    clipped (a temperature of the loss, a second model). There it would stay, without noise, for the
    next optimizer to step on. Asked for chosen gradients autograd does no such thing, but reentrant
    checkpointing forbids to ask.

    Reentrant checkpointing builds parts of the graph in the backward pass, and goes back through
    each by ``torch.autograd.backward``: so every such call is met on its way. Memory: one more
    gradient of each of the others, until the block is over.
    """
    backward, mine = torch.autograd.backward, threading.get_ident()
    known = {id(t) for t in own}
    before: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}

    def met(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # On a GPU the parts run in a thread of autograd's own, which Python did not start.
        ours = threading.get_ident() == mine or not _is_of_python()
        for leaf in _leaves_below(tensors) if ours else ():
            kept = before.get(id(leaf))
            if id(leaf) not in known and (kept is None or kept[0]() is not leaf):
                # Not held on to: the inputs of a part are leaves, too, and as large as activations.
                before[id(leaf)] = weakref.ref(leaf), leaf.grad
                leaf.grad = None
        backward(tensors, *args, **kwargs)

    torch.autograd.backward = met
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for found, gradient in before.values():
            leaf = found()
            if leaf is not None:
                leaf.grad = gradient


def _is_of_python() -> bool:
    return not isinstance(threading.current_thread(), threading._DummyThread)


def _leaves_below(tensors: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
    """What a backward pass from these would give a gradient to, each once."""
    roots = [tensors] if isinstance(tensors, Tensor) else tensors
    waiting = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
