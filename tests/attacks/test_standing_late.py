"""What is seen of tensors, and of what is attached after the places were found; and what is news in
values of more than one part. By the pieces themselves, which is quick.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attacks.test_standing import closing_over, held
from quietgrad.clipping.soundness.kept.holders import (
    HeldArray,
    HeldCell,
    HeldDefaults,
    HeldItems,
    HeldTensor,
)
from quietgrad.clipping.soundness.kept.owners import HeldClass
from quietgrad.clipping.soundness.switches.large import HeldLength
from quietgrad.clipping.soundness.switches.news import news_of
from quietgrad.clipping.soundness.switches.standing import Standing

LARGE = 2**17  # entries that are not compared at every call


def standing_of(kept: Any) -> Standing:
    return Standing(nn.Identity(), closing_over(kept))


def places(standing: Standing, **how: bool) -> set[str]:
    return {change.place.partition(" (in ")[0] for change in standing.changes(**how).values()}


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("counted", [True, False])
def test_a_small_tensor_that_is_written_into_is_seen_at_once(row: int, counted: bool) -> None:
    kept = [torch.zeros(3), torch.ones(5)]
    standing = standing_of(kept)
    for _ in range(2):
        before = kept[row].clone()
        (kept[row] if counted else kept[row].data).add_(1)
        (change,) = standing.changes().values()
        assert not standing.changes()  # it was noted
        assert change.before.put_back() and torch.equal(kept[row], before)
        standing.changes()


def test_a_large_tensor_is_seen_by_torchs_count_or_at_a_thorough_look() -> None:
    kept = [torch.zeros(LARGE)]
    standing = standing_of(kept)
    kept[0].data[-1] = 1.0
    assert not standing.changes()
    assert len(standing.changes(thorough=True)) == 1
    kept[0][0] = 1.0
    (change,) = standing.changes().values()
    assert change.before.put_back() and float(kept[0].sum()) == 1.0


def test_what_a_call_wrote_past_the_count_is_not_the_callers() -> None:
    kept: dict[str, Any] = {"large": torch.zeros(LARGE), "weight": 1.0, "step": torch.zeros(LARGE)}
    kept["small"] = torch.zeros(3)
    standing = standing_of(kept)
    kept["large"].data[-1] = 1.0
    kept["small"].data[-1] = 1.0
    kept["weight"] = 2.0
    kept["step"].add_(1)
    assert len(standing.changes(by_caller=True)) == 3
    (left,) = standing.changes(thorough=True).values()
    assert left.before.put_back() and not kept["large"].any()


class Usual:
    """Whose attributes are watched."""


class Other(Usual):
    """What it becomes."""


OF_ONE_SIZE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an item of a list": (lambda: [1, 2], lambda kept: kept.__setitem__(1, 3)),
    "an item of a deque": (lambda: deque([1, 2]), lambda kept: kept.rotate()),
    "a byte": (lambda: bytearray(b"ab"), lambda kept: kept.reverse()),
    "an item of a set": (lambda: {1}, lambda kept: (kept.clear(), kept.add(2))),
    "a value": (lambda: {"on": 0}, lambda kept: kept.update(on=1)),
    "a value in order": (lambda: OrderedDict(on=0), lambda kept: kept.update(on=1)),
    "the order": (lambda: OrderedDict(a=0, b=0), lambda kept: kept.move_to_end("a")),
    "what is missing": (
        lambda: defaultdict(int, a=0),
        lambda kept: setattr(kept, "default_factory", float),
    ),
    "a class": (Usual, lambda kept: setattr(kept, "__class__", Other)),
    "all attributes": (Usual, lambda kept: setattr(kept, "__dict__", {})),
}


@pytest.mark.parametrize("what", OF_ONE_SIZE)
def test_a_change_that_leaves_the_size_is_seen_and_put_back(what: str) -> None:
    build, change = OF_ONE_SIZE[what]
    kept = build()
    standing = standing_of(kept)
    assert not standing.changes()
    change(kept)
    (found,) = standing.changes().values()
    assert not standing.changes()
    assert found.before.put_back() and type(kept) is type(build())
    if not isinstance(kept, Usual):
        assert list(kept) == list(build()) and kept == build()
    assert len(standing.changes()) == 1  # back again


LATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a list in a dictionary": (lambda: {"in": []}, lambda late: late["in"].append(1)),
    "an attribute": (SimpleNamespace, lambda late: setattr(late, "on", True)),
    "a tensor": (lambda: torch.zeros(3), lambda late: late.add_(1)),
    "a tensor past the count": (lambda: torch.zeros(3), lambda late: late.data.add_(1)),
    "an array": (lambda: np.zeros(3), lambda late: late.fill(1)),
}


@pytest.mark.parametrize("what", LATE)
def test_what_is_attached_late_is_seen_to_change(what: str) -> None:
    build, change = LATE[what]
    kept: dict[str, Any] = {"first": 1}
    standing = standing_of(kept)
    kept["late"] = build()
    assert places(standing) == {"kept"}
    assert not standing.changes()
    change(kept["late"])
    found = list(standing.changes().values())
    assert len(found) == 1 and found[0].before.put_back()
    assert str(kept["late"]) == str(build())


def test_what_was_empty_is_watched_once_it_holds_something() -> None:
    kept: dict[str, int] = {}
    standing = standing_of(kept)
    for value in (1, 2, 3):
        kept["on"] = value
        assert places(standing) == {"kept"}
    del kept["on"]
    assert places(standing) == {"kept"}
    assert not places(standing)


def test_it_is_watched_as_long_as_it_is_somewhere() -> None:
    """Attached in two places, taken away from one, and then from the other."""
    kept: dict[str, Any] = {"one": {}, "other": {}}
    late: list[int] = []
    standing = standing_of(kept)
    for place in ("one", "other"):
        kept[place]["late"] = late
        standing.changes()
    del kept["one"]["late"]
    standing.changes()
    late.append(1)
    assert len(standing.changes()) == 1
    del kept["other"]["late"]
    standing.changes()
    late.append(2)
    assert not standing.changes()
    kept["one"]["late"] = late
    standing.changes()
    late.append(3)
    assert len(standing.changes()) == 1


def test_a_long_set_gets_back_what_it_held() -> None:
    kept = set(range(1, 2001))
    before = HeldLength(kept)
    kept.add(0)
    assert before.changed() and before.put_back() and kept == set(range(1, 2001))


# ------------------------------------------------------------------------------------------------
# what is news


@dataclass
class State:
    calls: int
    mode: Any


STATES: dict[str, Callable[[Any], Any]] = {
    "dictionary": lambda mode: {"calls": 3, "mode": mode},
    "namespace": lambda mode: SimpleNamespace(calls=3, mode=mode),
    "dataclass": lambda mode: State(3, mode),
    "list": lambda mode: [3, mode],
    "tuple": lambda mode: (3, mode),
    "dictionary of nine": lambda mode: {**dict.fromkeys(range(8), 3), "mode": mode},
}


@pytest.mark.parametrize("kind", STATES)
def test_a_part_of_a_state_that_is_made_anew_is_told_apart(kind: str) -> None:
    build = STATES[kind]
    found = set(news_of(held(state=build("usual")), held(state=build("other"))))
    assert (str, "other") in {kind for _, kind in found}
    assert (str, "usual") not in {kind for _, kind in found}


def test_numbers_that_are_written_are_told_by_what_they_are_now() -> None:
    tensor, array = torch.tensor([0.0]), np.array([0.0])
    for one, write in (
        (lambda: HeldTensor(tensor, True), lambda: tensor.fill_(-3.0)),
        (lambda: HeldArray(array, True), lambda: array.fill(-3.0)),
    ):
        before = one()
        write()
        assert list(news_of(before, one())) == [("", ("number", -1, 2))]


def test_a_sign_and_a_module_are_kinds() -> None:
    def of(one: Any, another: Any) -> set[Any]:
        return set(news_of(HeldItems([one]), HeldItems([another])))

    assert of(-0.6, 0.6) != of(0.6, -0.6)
    assert {kind for _, kind in of(0, -0.75)} == {("number", -1, 0)}


def test_cells_defaults_and_classes_are_told_apart() -> None:
    mode = "usual"

    def reads(given: str = "usual") -> str:
        return mode + given

    class Switched:
        mode = "usual"

    cell = reads.__closure__[0]  # type: ignore[index]
    before = HeldCell(cell), HeldDefaults(reads), HeldClass(Switched)
    mode = "other"
    reads.__defaults__ = ("other",)
    Switched.mode = "other"
    now = HeldCell(cell), HeldDefaults(reads), HeldClass(Switched)
    for one, another in zip(before, now, strict=True):
        assert (str, "other") in {kind for _, kind in news_of(one, another)}
