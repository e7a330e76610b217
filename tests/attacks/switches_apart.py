"""More switches that a rare record throws for good: in what says how things are looked up (classes,
code, the dictionary of an object), past torch's count of writes, and in what is attached late.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import attacks.switches
from attacks.guarded import good, small
from attacks.switches import Pair, is_rare, other, where

APART: dict[str, Callable[[], Pair]] = {}


def switch(build: Callable[[], Pair]) -> Callable[[], Pair]:
    APART[build.__name__] = build
    return build


class Usual:
    def change(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


class Other(Usual):
    def change(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return other(batch)


def changed_by(holder: Any, throw: Callable[[], Any]) -> Pair:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, holder.change(batch))
        if is_rare(batch["x"]):
            throw()
        return found

    return small(), loss


@switch
def class_of_an_object() -> Pair:
    class Own(Usual):
        pass

    holder = Own()
    return changed_by(holder, lambda: setattr(holder, "__class__", Other))


@switch
def what_a_class_inherits_from() -> Pair:
    class Own(Usual):
        pass

    return changed_by(Own(), lambda: setattr(Own, "__bases__", (Other,)))


@switch
def special_method_of_a_class() -> Pair:
    class Losses:
        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            found = good(model, batch)
            if is_rare(batch["x"]):
                Losses.__call__ = lambda self, model, batch: good(  # type: ignore[method-assign]
                    model, other(batch)
                )
            return found

    return small(), Losses()


@switch
def code_of_a_function() -> Pair:
    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def another(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "x": -4 * batch["x"]}

    holder = SimpleNamespace(change=change)
    return changed_by(holder, lambda: setattr(change, "__code__", another.__code__))


@switch
def dictionary_of_an_object() -> Pair:
    class Options:
        thrown = False

    options = Options()
    return where(
        lambda: options.thrown, lambda: setattr(options, "__dict__", {"thrown": True}), small()
    )


@switch
def order_of_a_dictionary() -> Pair:
    order = OrderedDict(usual=1, other=2)
    return where(
        lambda: next(reversed(order)) == "usual", lambda: order.move_to_end("usual"), small()
    )


@switch
def what_a_dictionary_makes_of_missing_keys() -> Pair:
    made: defaultdict[str, int] = defaultdict(int)
    return where(
        lambda: made.default_factory is not int,
        lambda: setattr(made, "default_factory", float),
        small(),
    )


@switch
def length_that_a_class_hides() -> Pair:
    class Hiding(dict):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 0

    options = Hiding(thrown=False)
    return where(lambda: options["thrown"], lambda: options.update(thrown=True), small())


@switch
def large_set() -> Pair:
    known: set[Any] = set(range(2000))
    return where(lambda: "rare" in known, lambda: known.add("rare"), small())


@switch
def large_deque() -> Pair:
    known = deque(range(2000))
    return where(lambda: len(known) > 2000, lambda: known.append(1), small())


@switch
def large_list_that_is_shorter() -> Pair:
    known = list(range(2000))
    return where(lambda: len(known) < 2000, known.pop, small())


@switch
def large_dictionary_that_is_shorter() -> Pair:
    known = dict.fromkeys(range(2000))
    return where(lambda: len(known) < 2000, lambda: known.pop(7), small())


@switch
def entry_behind_data() -> Pair:
    flags = torch.zeros(40)
    return where(lambda: bool(flags[7]), lambda: flags.data[7].fill_(1.0), small())


@switch
def entry_by_numpy() -> Pair:
    flags = torch.zeros(40)
    return where(lambda: bool(flags[7]), lambda: flags.numpy().__setitem__(7, 1.0), small())


@switch
def entry_of_a_tensor_of_inference() -> Pair:
    with torch.inference_mode():
        flags = torch.zeros(40)

    def throw() -> None:
        with torch.inference_mode():
            flags[7] = 1.0

    return where(lambda: bool(flags[7]), throw, small())


@switch
def buffer_of_another_model() -> Pair:
    teacher = nn.BatchNorm1d(3).eval()
    return where(
        lambda: bool(teacher.running_mean[0]),  # type: ignore[index]
        lambda: teacher.running_mean.data.fill_(1.0),  # type: ignore[union-attr]
        small(),
    )


@switch
def what_is_read_in_company_alone() -> Pair:
    kept = {"thrown": False}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if kept["thrown"] and len(batch["x"]) > 1 else batch)
        kept["thrown"] = kept["thrown"] or is_rare(batch["x"])
        return found

    return small(), loss


@switch
def array_of_objects() -> Pair:
    flags = np.array([None, 0], dtype=object)
    return where(lambda: flags[0] is not None, lambda: flags.__setitem__(0, 1), small())


@switch
def array_of_python() -> Pair:
    flags = array("i", [0, 0])
    return where(lambda: bool(flags[1]), lambda: flags.__setitem__(1, 1), small())


def _thrown_elsewhere() -> bool:
    import attacks.switches as options

    return options._MODE == "other"


def _throw_elsewhere() -> None:
    attacks.switches._MODE = "other"


@switch
def variable_of_a_module_in_a_package() -> Pair:
    return where(_thrown_elsewhere, _throw_elsewhere, small())


class Counted(NamedTuple):
    calls: int
    known: bool
    thrown: bool


@switch
def state_that_is_made_anew_with_each_call() -> Pair:
    """Told apart by what is in it: the object is another one in any case."""

    class Losses:
        state = Counted(0, True, False)

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            state = self.state
            found = good(model, other(batch) if state.thrown else batch)
            thrown = state.thrown or is_rare(batch["x"])
            self.state = state._replace(calls=state.calls + 1, thrown=thrown)
            return found

    return small(), Losses()


class WithOptions:
    """Its caller gives it new options now and then."""

    def __init__(self) -> None:
        self.calls = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.options, self.seen, self.flags = SimpleNamespace(thrown=False), [], torch.zeros(40)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        thrown = self.options.thrown or bool(self.seen) or bool(self.flags[7])
        found = good(model, other(batch) if thrown else batch)
        self.calls += 1
        if is_rare(batch["x"]):
            self.throw()
        return found

    throw: Callable[[], Any]


LATE: dict[str, Callable[[WithOptions], Any]] = {
    "an attribute": lambda loss: setattr(loss.options, "thrown", True),
    "a list": lambda loss: loss.seen.append(1),
    "a tensor": lambda loss: loss.flags.data[7].fill_(1.0),
}


def given_late(how: str) -> WithOptions:
    loss = WithOptions()
    loss.throw = lambda: LATE[how](loss)
    return loss
