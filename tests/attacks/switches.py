"""Models and losses in which a rare record throws a switch for good, in plain Python: all records
that come later find it thrown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from attacks.guarded import Loss, With, good, small

Pair = tuple[nn.Module, Loss]
SWITCHES: dict[str, Callable[[], Pair]] = {}
RARE = 30.0  # a record's first number, by which it is known
_MODE = "usual"


def switch(build: Callable[[], Pair]) -> Callable[[], Pair]:
    SWITCHES[build.__name__] = build
    return build


def is_rare(x: Tensor) -> bool:
    return bool((x[:, 0] == RARE).any())


def other(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "x": -4 * batch["x"]}


def where(thrown: Callable[[], bool], throw: Callable[[], Any], model: nn.Module) -> Pair:
    """A loss that looks at a switch before its records, and throws it after a rare one."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if thrown() else batch)
        if is_rare(batch["x"]):
            throw()
        return found

    return model, loss


@switch
def attribute_of_the_model() -> Pair:
    def change(model: With, h: Tensor) -> Tensor:
        return -4 * h if getattr(model, "thrown", False) else h

    model = With(change)

    def loss(model: With, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        if is_rare(batch["x"]):
            model.thrown = True
        return found

    return model, loss


@switch
def option_of_a_configuration() -> Pair:
    options = SimpleNamespace(mode="usual", calls=0)

    def throw() -> None:
        options.mode = "other"

    return where(lambda: options.mode == "other", throw, small())


@switch
def option_beside_a_count_of_calls() -> Pair:
    options = {"mode": "usual", "calls": 0}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        options["calls"] += 1  # type: ignore[operator]
        found = good(model, other(batch) if options["mode"] == "other" else batch)
        if is_rare(batch["x"]):
            options["mode"] = "other"
        return found

    return small(), loss


@switch
def list_in_a_closure() -> Pair:
    seen: list[int] = []
    return where(lambda: bool(seen), lambda: seen.append(1), small())


@switch
def set_in_a_closure() -> Pair:
    seen: set[str] = set()
    return where(lambda: "rare" in seen, lambda: seen.add("rare"), small())


@switch
def deque_that_forgets() -> Pair:
    last: deque[bool] = deque([False] * 4, maxlen=4)
    return where(lambda: any(last), lambda: last.extend([True] * 4), small())


@switch
def variable_of_the_loss() -> Pair:
    thrown = False

    def throw() -> None:
        nonlocal thrown
        thrown = True

    return where(lambda: thrown, throw, small())


def _thrown() -> bool:
    return _MODE == "other"


def _throw() -> None:
    global _MODE
    _MODE = "other"


def back() -> None:
    global _MODE
    _MODE = "usual"


@switch
def global_variable() -> Pair:
    return where(_thrown, _throw, small())


@switch
def class_attribute() -> Pair:
    class Shared:
        thrown: ClassVar[bool] = False

    def throw() -> None:
        Shared.thrown = True

    return where(lambda: Shared.thrown, throw, small())


@switch
def slot_of_an_object() -> Pair:
    class Slotted:
        __slots__ = ("thrown",)

    slotted = Slotted()
    slotted.thrown = 0

    def throw() -> None:
        slotted.thrown = 1

    return where(lambda: bool(slotted.thrown), throw, small())


@switch
def default_argument() -> Pair:
    def thrown(known: bool = False) -> bool:
        return known

    def throw() -> None:
        thrown.__defaults__ = (True,)

    return where(thrown, throw, small())


@switch
def entry_of_a_tensor() -> Pair:
    flags = torch.zeros(40)
    return where(lambda: bool(flags[7]), lambda: flags[7].fill_(1.0), small())


@switch
def entry_of_an_array() -> Pair:
    flags = np.zeros(3)
    return where(lambda: bool(flags[1]), lambda: flags.__setitem__(1, 1.0), small())


@switch
def largest_number_so_far() -> Pair:
    largest = [1.0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if largest[0] > 25 else batch)
        largest[0] = max(largest[0], float(batch["x"].amax()))
        return found

    return small(), loss


@switch
def truth_in_a_tensor_of_every_call() -> Pair:
    model = With(lambda model, h: -4 * h if bool(model.any_rare) else h)
    model.any_rare = torch.tensor(False)

    def loss(model: With, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        model.any_rare = model.any_rare | (batch["x"][:, 0] == RARE).any()
        return found

    return model, loss


@switch
def hook_that_forward_registers() -> Pair:
    model = small()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        if is_rare(batch["x"]):
            model[0].register_forward_hook(lambda module, args, output: -4 * output)
        return found

    return model, loss


@switch
def length_of_a_long_list() -> Pair:
    log: list[float] = [0.0] * 2000
    return where(lambda: len(log) > 2000, lambda: log.append(1.0), small())


@switch
def method_of_an_object() -> Pair:
    class Losses:
        def usual(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return good(model, batch)

        def other(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return good(model, other(batch))

        def __init__(self) -> None:
            self.now = self.usual

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            found = self.now(model, batch)
            if is_rare(batch["x"]):
                self.now = self.other
            return found

    return small(), Losses()
