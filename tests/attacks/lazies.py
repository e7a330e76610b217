"""Models and losses that make something of the first records and keep it for ever, in every place
that Python has.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from attacks.guarded import Loss, With, good, small

Pair = tuple[nn.Module, Loss]
PLACES: dict[str, Callable[[], Pair]] = {}
# Out of reach: they are not refused, and filled by a made-up record.
HIDDEN: dict[str, Callable[[], Pair]] = {}
# Of hooks that are everybody's: to be removed after a test.
handles: list[Any] = []


def place(where: dict[str, Callable[[], Pair]] = PLACES) -> Callable[..., Any]:
    def note(build: Callable[[], Pair]) -> Callable[[], Pair]:
        where[build.__name__] = build
        return build

    return note


def shifted(batch: dict[str, Tensor], mean: Tensor) -> dict[str, Tensor]:
    """Records with a mean taken off, far enough from zero that whose it is matters."""
    return {**batch, "x": 3 * (batch["x"] - mean)}


def mean_of(batch: dict[str, Tensor]) -> Tensor:
    return 5 * batch["x"].mean(0, keepdim=True)


@place()
def list_in_a_closure() -> Pair:
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not kept:
            kept.append(mean_of(batch))
        return good(model, shifted(batch, kept[0]))

    return small(), loss


@place()
def dictionary_of_shapes_in_a_closure() -> Pair:
    kept: dict[int, Tensor] = {}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return good(model, shifted(batch, kept.setdefault(batch["x"].shape[1], mean_of(batch))))

    return small(), loss


@place()
def variable_of_a_closure() -> Pair:
    kept: Tensor | None = None

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal kept
        kept = mean_of(batch) if kept is None else kept
        return good(model, shifted(batch, kept))

    return small(), loss


@place()
def number_of_a_closure() -> Pair:
    kept: float | None = None

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal kept
        kept = float(mean_of(batch).mean()) if kept is None else kept
        return good(model, {**batch, "x": batch["x"] - kept})

    return small(), loss


@place()
def tensor_that_is_written_into() -> Pair:
    kept = torch.zeros(1, 6)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not kept.any():
            kept.copy_(mean_of(batch))
        return good(model, shifted(batch, kept))

    return small(), loss


@place()
def numpy_array_that_is_written_into() -> Pair:
    import numpy as np

    kept = np.zeros((1, 6), dtype=np.float32)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not kept.any():
            kept[:] = mean_of(batch).numpy()
        return good(model, shifted(batch, torch.from_numpy(kept.copy())))

    return small(), loss


@place()
def default_argument() -> Pair:
    def loss(model: nn.Module, batch: dict[str, Tensor], kept: Any = []) -> Tensor:  # noqa: B006
        if not kept:
            kept.append(mean_of(batch))
        return good(model, shifted(batch, kept[0]))

    return small(), loss


@place()
def keyword_default() -> Pair:
    def loss(model: nn.Module, batch: dict[str, Tensor], *, kept: Any = {}) -> Tensor:  # noqa: B006
        return good(model, shifted(batch, kept.setdefault("mean", mean_of(batch))))

    return small(), loss


@place()
def attribute_of_the_function() -> Pair:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not hasattr(loss, "kept"):
            loss.kept = mean_of(batch)
        return good(model, shifted(batch, loss.kept))

    return small(), loss


@place()
def argument_of_a_partial() -> Pair:
    def loss(kept: list[Tensor], model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not kept:
            kept.append(mean_of(batch))
        return good(model, shifted(batch, kept[0]))

    return small(), functools.partial(loss, [])


_KEPT: dict[str, Tensor] = {}


@place()
def global_dictionary() -> Pair:
    _KEPT.clear()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return good(model, shifted(batch, _KEPT.setdefault("mean", mean_of(batch))))

    return small(), loss


@place()
def global_that_does_not_exist_yet() -> Pair:
    globals().pop("_LATER", None)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        global _LATER
        if "_LATER" not in globals():
            _LATER = mean_of(batch)
        return good(model, shifted(batch, _LATER))

    return small(), loss


def _helper(batch: dict[str, Tensor], kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    if not kept:
        kept.append(mean_of(batch))
    return kept[0]


@place()
def default_argument_of_a_function_that_is_called() -> Pair:
    _helper.__defaults__[0].clear()
    return small(), lambda model, batch: good(model, shifted(batch, _helper(batch)))


@place()
def functools_cache() -> Pair:
    now: list[Tensor] = []

    @functools.cache
    def kept() -> Tensor:
        return now[-1]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        now[:] = [mean_of(batch)]
        return good(model, shifted(batch, kept()))

    return small(), loss


class Callable_:
    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(model, batch)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.mean = mean_of(batch) if self.mean is None else self.mean
        return good(model, shifted(batch, self.mean))


@place()
def object_that_is_called() -> Pair:
    return small(), Callable_()


@place()
def bound_method() -> Pair:
    return small(), Callable_().loss


@place()
def slot() -> Pair:
    class Slotted:
        __slots__ = ("mean",)

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            if not hasattr(self, "mean"):
                self.mean = mean_of(batch)
            return good(model, shifted(batch, self.mean))

    return small(), Slotted()


@place()
def cached_property() -> Pair:
    class Lazy:
        now: Any = None

        @functools.cached_property
        def mean(self) -> Tensor:
            return mean_of(self.now)

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.now = batch
            return good(model, shifted(batch, self.mean))

    return small(), Lazy()


@place()
def class_attribute() -> Pair:
    class Shared:
        mean: Tensor | None = None

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            if Shared.mean is None:
                Shared.mean = mean_of(batch)
            return good(model, shifted(batch, Shared.mean))

    return small(), Shared()


@place()
def weak_dictionary() -> Pair:
    kept: Any = weakref.WeakKeyDictionary()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if model not in kept:
            kept[model] = mean_of(batch)
        return good(model, shifted(batch, kept[model]))

    return small(), loss


@place()
def thread_local() -> Pair:
    kept = threading.local()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not hasattr(kept, "mean"):
            kept.mean = mean_of(batch)
        return good(model, shifted(batch, kept.mean))

    return small(), loss


@place()
def attribute_of_the_model() -> Pair:
    def change(model: With, h: Tensor) -> Tensor:
        if not hasattr(model, "mean"):
            model.mean = h.detach().mean(0, keepdim=True)
        return h / model.mean

    return With(change), good


@place()
def attribute_of_a_layer_inside() -> Pair:
    class Normalised(nn.Module):
        scale: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = x.detach().abs().mean()
            return x / self.scale

    return nn.Sequential(nn.Linear(6, 8), Normalised(), nn.Linear(8, 3)), good


@place()
def hook_of_a_layer() -> Pair:
    model = small()
    kept: list[Tensor] = []

    def centre(module: nn.Module, arguments: Any) -> Any:
        if not kept:
            kept.append(5 * arguments[0].detach().mean(0, keepdim=True))
        return (arguments[0] - kept[0],)

    model[0].register_forward_pre_hook(centre)
    return model, good


@place()
def attribute_of_a_parameter() -> Pair:
    def change(model: With, h: Tensor) -> Tensor:
        weight: Any = model.head.weight
        if not hasattr(weight, "kept"):
            weight.kept = h.detach().mean(0, keepdim=True)
        return h / weight.kept

    return With(change), good


@place()
def buffer_of_another_model() -> Pair:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            if not self.mean.any():
                self.mean = 5 * x.mean(0, keepdim=True)
            return x - self.mean

    teacher = Teacher()
    return small(), lambda model, batch: good(model, {**batch, "x": teacher(batch["x"])})


@place()
def hook_of_the_backward_pass() -> Pair:
    kept: list[Tensor] = []

    def scaled(gradient: Tensor) -> Tensor:
        if not kept:
            kept.append(gradient[:1].clone())
        return gradient / kept[0]

    def change(model: With, h: Tensor) -> Tensor:
        h.register_hook(scaled)
        return h

    return With(change), good


@place()
def hook_of_all_modules() -> Pair:
    kept: list[Tensor] = []

    def centre(module: nn.Module, arguments: Any) -> Any:
        if not isinstance(module, nn.Tanh):
            return None
        if not kept:
            kept.append(5 * arguments[0].detach().mean(0, keepdim=True))
        return (arguments[0] - kept[0],)

    handles.append(register_module_forward_pre_hook(centre))
    return small(), good


@place()
def gradient_alone() -> Pair:
    """The loss is the same whoever came first; its gradient is not."""
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        if not kept:
            kept.append(30 * batch["x"].mean(0)[:3])
        pull = logits @ kept[0]
        return good(model, batch) + pull - pull.detach()

    return small(), loss


@place(HIDDEN)
def generator_of_python() -> Pair:
    def means() -> Any:
        first = yield
        mean = mean_of(first)
        while True:
            yield mean

    kept = means()
    next(kept)
    return small(), lambda model, batch: good(model, shifted(batch, kept.send(batch)))


@place(HIDDEN)
def context_variable() -> Pair:
    kept: Any = contextvars.ContextVar("kept", default=None)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if kept.get() is None:
            kept.set(mean_of(batch))
        return good(model, shifted(batch, kept.get()))

    return small(), loss


@place(HIDDEN)
def namespace_of_a_library() -> Pair:
    vars(torch).pop("kept_of_the_first", None)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept = vars(torch).setdefault("kept_of_the_first", mean_of(batch))
        return good(model, shifted(batch, kept))

    return small(), loss


@place(HIDDEN)
def object_of_a_library() -> Pair:
    logger: Any = logging.Logger("of the first")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not hasattr(logger, "kept"):
            logger.kept = mean_of(batch)
        return good(model, shifted(batch, logger.kept))

    return small(), loss
