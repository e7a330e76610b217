"""Optimizers in a run's loop: they step on what was released, and on nothing else.

A loop that was written without privacy has a line ``loss.backward()``. Left in beside
``run.backward`` it adds a gradient of private records, neither clipped nor noisy, to ``.grad``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from quietgrad.noise.noisy_sum import WRITTEN
from quietgrad.tensors import is_spread

REMEDY = (
    "it would publish them without clipping and noise. Take loss.backward() out: run.backward (or "
    "release and write_gradients) stands in its place. Steps on public records: outside the loop "
    "over the run's batches (run.batches(1) and run.loader(..., steps=1) make short ones)"
)


class Stepping:
    """What optimizers may step on while a run's loop is at a batch.

    Seen is what backward passes add to ``.grad`` of the parameters that the run trains, and what
    an optimizer of theirs holds besides. Not seen: steps that are no ``torch.optim`` optimizer's,
    and passes over sharded parameters.

    Args:
        remedy: for gradients of backward passes that are not the run's.
        always: whether all of the script is looked at as a loop's body is.
    """

    def __init__(self, remedy: str = REMEDY, always: bool = False) -> None:
        self._remedy, self._always = remedy, always
        self._trained: Any = WeakIdKeyDictionary()  # parameter -> handle of the hook on it
        self._raw: Any = WeakIdKeyDictionary()  # those that a backward pass of the loop's met
        self._stepped: Any = WeakIdKeyDictionary()  # stepped on before the run knew its model
        self._in_loop, self._clips, self._is_over = always, False, False
        _watch_optimizers()
        _STEPPINGS.add(self)

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """While the loop's body runs for a batch."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False
            self._stepped.clear()

    @contextlib.contextmanager
    def clipping(self) -> Iterator[None]:
        """Inside, backward passes are the run's own: reentrant checkpointing fills ``.grad``, and
        what was there is put back.
        """
        before, self._clips = self._clips, True
        try:
            yield
        finally:
            self._clips = before

    def met(self, parameters: Iterable[Tensor]) -> None:
        """Records are clipped for these from now on.

        Raises:
            RuntimeError: where the open batch's loop has stepped on them already.
        """
        for p in parameters:
            if p in self._stepped:
                self._stepped.clear()
                raise RuntimeError(
                    "in the loop over the run's batches an optimizer stepped on gradients that "
                    f"were not released, before run.backward was called: {self._remedy}; begin "
                    "again with weights of before this step"
                )
            if p not in self._trained and not is_lazy(p):  # without weights it is refused later
                self._trained[p] = None if is_spread(p) else _hooked(p, weakref.ref(self))

    def over(self) -> None:
        """The run is closed: what the parameters are used for is no matter of its."""
        self._is_over = True
        for handle in self._trained.values():
            if handle is not None:
                handle.remove()
        for kept in (self._trained, self._raw, self._stepped):
            kept.clear()

    def backward_met(self, p: Tensor) -> None:
        """A backward pass has added to a parameter's ``.grad``."""
        if self._in_loop and not self._clips:
            self._raw[p] = True
            if hasattr(p.grad, WRITTEN):  # was added to, in place
                delattr(p.grad, WRITTEN)

    def is_asked(self) -> bool:
        """Whether steps are looked at just now."""
        return not self._is_over and (self._in_loop or len(self._raw) > 0)

    def trains(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the run trains one of them; what is stepped on before that is known is kept."""
        if not len(self._trained):
            for p in parameters if not self._always else ():
                if p.grad is not None and not hasattr(p.grad, WRITTEN):
                    self._stepped[p] = True
            return False
        return any(p in self._trained for p in parameters)

    def require(self, parameters: Iterable[Tensor]) -> None:
        """Before an optimizer steps on them, of which the run trains one at least.

        Raises:
            RuntimeError: for a gradient that was not released.
        """
        for p in parameters:
            grad = p.grad
            if grad is None or hasattr(grad, WRITTEN):
                if len(self._raw):  # a look by identity costs more than the rest
                    self._raw.pop(p, None)
            elif p in self._raw:
                raise RuntimeError(
                    "the optimizer would step on gradients that were not released: a backward "
                    "pass of the script's own has added to .grad of what is trained privately, "
                    f"and {self._remedy}"
                )
            elif self._in_loop and p.requires_grad and not _is_trained(p):
                raise RuntimeError(
                    "the optimizer holds a parameter with a gradient that was not released, "
                    "beside those that the run trains: its gradient would be without clipping "
                    "and noise. Make it a part of the private model; what learns from public "
                    "numbers alone: an optimizer of its own; or take loss.backward() out"
                )


_STEPPINGS: weakref.WeakSet[Stepping] = weakref.WeakSet()


def _is_trained(p: Tensor) -> bool:
    return any(p in one._trained for one in _STEPPINGS)


def _hooked(p: Tensor, stepping: weakref.ref[Stepping]) -> RemovableHandle:
    def met(parameter: Tensor) -> None:
        one = stepping()
        if one is not None:
            one.backward_met(parameter)

    handle: RemovableHandle = p.register_post_accumulate_grad_hook(met)
    return handle


@functools.cache
def _watch_optimizers() -> None:
    """``torch.optim`` calls this before each step of each optimizer."""

    def before(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        asked = [one for one in _STEPPINGS if one.is_asked()]
        if not asked:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        asked = [one for one in asked if one.trains(parameters)]
        if not asked:
            return None

        def require() -> None:
            for one in asked:
                one.require(parameters)

        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if not callable(closure):
            require()
            return None
        return _with_closure(closure, require, optimizer, arguments, options)

    register_optimizer_step_pre_hook(before)


def _with_closure(
    closure: Callable[[], Any],
    require: Callable[[], None],
    optimizer: torch.optim.Optimizer,
    arguments: Any,
    options: Any,
) -> Any:
    """Arguments of a step whose closure may run a backward pass: looked at after it."""

    def checked() -> Any:
        found = closure()
        require()
        return found

    others = {name: value for name, value in options.items() if name != "closure"}
    return (optimizer, checked, *arguments[2:]), others
