"""Which changes in plain Python are seen from one call to the next, what counts as news, and what
is tried out: by the pieces themselves, which is quick.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, small
from attacks.switches import is_rare, other
from attacks.test_switched import REFUSED, with_rare
from quietgrad.clipping.capture.backward import Checkpointing
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.soundness.kept.holders import HeldItems, HeldSlots
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.switches.news import kinds_of, news_of
from quietgrad.clipping.soundness.switches.standing import Change, Standing, with_changes_of
from quietgrad.clipping.soundness.switches.switched import Switches
from quietgrad.clipping.soundness.switches.torch_settings import TorchSettings


def closing_over(kept: Any) -> Callable[..., Any]:
    return lambda model, batch: kept


# ------------------------------------------------------------------------------------------------
# what is seen, and put back


def key_for_key(kept: dict[str, None]) -> None:
    del kept["usual"]
    kept["other"] = None


def moved_on(kept: list[list[int]]) -> None:
    kept[0].append(kept[1].pop(0))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a list that is emptied": (lambda: [1], lambda kept: kept.clear()),
    "a set that is emptied": (lambda: {1}, lambda kept: kept.clear()),
    "a first item": (list, lambda kept: kept.append(1)),
    "a key for a key": (lambda: {"usual": None}, key_for_key),
    "an item that goes on to the next list": (lambda: [[1], [2, 3]], moved_on),
    "a long list": (lambda: [0.5] * 2000, lambda kept: kept.append(0.5)),
    "a long deque": (lambda: deque([0.5] * 2000), lambda kept: kept.append(0.5)),
    "a long ordered dictionary": (
        lambda: OrderedDict.fromkeys(range(2000)),
        lambda kept: kept.update(x=None),
    ),
    "a long dictionary": (lambda: dict.fromkeys(range(2000)), lambda kept: kept.update(x=None)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_put_back(name: str) -> None:
    build, change = CHANGES[name]
    kept = build()
    standing = Standing(nn.Identity(), closing_over(kept))
    assert not standing.changes()
    change(kept)
    assert kept != build()
    found = standing.changes()
    assert {each.place.partition(" (in ")[0] for each in found.values()} == {"kept"}
    assert not standing.changes()  # it was noted
    assert all(each.before.put_back() for each in found.values())
    assert kept == build()
    assert list(kept) == list(build())


LONG: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a list that is shorter": (lambda: [0.5] * 2000, lambda kept: kept.pop()),
    "a list that is emptied": (lambda: [0.5] * 2000, lambda kept: kept.clear()),
    "a deque that is longer": (lambda: deque([0.5] * 2000), lambda kept: kept.append(0.5)),
    "a deque that is shorter": (lambda: deque([0.5] * 2000), lambda kept: kept.popleft()),
    "a set that is larger": (lambda: set(range(2000)), lambda kept: kept.add(-1)),
    "a set that is smaller": (lambda: set(range(2000)), lambda kept: kept.discard(7)),
    "a dictionary that is smaller": (
        lambda: dict.fromkeys(range(2000)),
        lambda kept: kept.pop(7, None),
    ),
    "bytes that are less": (lambda: bytearray(2000), lambda kept: kept.pop()),
}


@pytest.mark.parametrize("name", LONG)
def test_how_many_a_long_container_holds_is_a_switch_like_others(name: str) -> None:
    """Also where nobody knows any more what was taken away, or which came in."""
    build, change = LONG[name]
    kept = build()
    watched = Watched(small(), thrown_if(lambda: len(kept) != 2000, lambda: change(kept)))
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert len(kept) == 2000


@pytest.mark.parametrize("name", LONG)
def test_a_long_container_that_nobody_reads_is_left_as_the_call_left_it(name: str) -> None:
    build, change = LONG[name]
    kept, wanted = build(), build()
    change(wanted)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(kept) == 2000:
            change(kept)
        return good(model, batch)

    Watched(small(), loss).call()
    assert kept == wanted


def held(**items: Any) -> HeldItems:
    return HeldItems(dict(items))


def test_what_somebody_else_changed_is_told_apart_from_the_rest() -> None:
    """The caller's own changes, to what a place held before a record came."""
    gone, usual, set_now = object(), object(), object()
    before = held(mode="usual", gone=gone, weight=usual)
    change = Change(
        "", held(mode="other", gone=gone, weight=usual), held(mode="other", weight=set_now)
    )
    made = with_changes_of(before, change)
    assert isinstance(made, HeldItems)
    assert made.items == ["mode", "usual", "weight", set_now]
    rows = HeldItems([1])
    assert with_changes_of(rows, Change("", rows, rows)) is None


# ------------------------------------------------------------------------------------------------
# what is news

APART: dict[str, tuple[Any, Any]] = {
    "truth": (True, False),
    "words": ("usual", "other"),
    "bytes": (b"usual", b"other"),
    "none": (None, 0),
    "a sign": (3.0, -3.0),
    "a sign of whole numbers": (3, -3),
    "nothing": (0.6, 0.0),
    "no number": (0.0, float("nan")),
    "without end": (0.0, float("inf")),
    "the next power of two": (3.9, 4.1),
    "the next power of two of whole numbers": (3, 4),
    "truth beside others": ((1.0, False), (1.0, True)),
    "truth in a set": (frozenset({1.0, False}), frozenset({1.0, None})),
    "truth in a tensor": (torch.tensor([True]), torch.tensor([False])),
    "truth in an array": (np.array([True]), np.array([False])),
    "truth of numpy's": (np.bool_(True), np.bool_(False)),
    "functions": (is_rare, other),
    "classes": (HeldItems, HeldSlots),
    "methods": (Switches().begin, Switches().watching),
    "objects": ([], {}),
}


@pytest.mark.parametrize("name", APART)
def test_kinds_are_told_apart(name: str) -> None:
    one, another = APART[name]
    assert set(kinds_of(one)) != set(kinds_of(another))


@pytest.mark.parametrize(
    ("one", "another"),
    [(2.1, 3.9), (5, 7), ([1], [2]), (torch.zeros(99), torch.ones(99))],
)
def test_what_goes_on_is_of_one_kind(one: Any, another: Any) -> None:
    assert set(kinds_of(one)) == set(kinds_of(another))


class Slotted:
    __slots__ = ("calls", "mode")


def test_what_is_new_is_told_by_its_name_and_so_is_what_is_gone() -> None:
    before, now = held(calls=1000, mode="usual"), held(calls=1001)
    assert {name for name, _ in news_of(before, now)} == {"calls", "mode"}
    assert ("mode", "gone") in set(news_of(before, now))
    slotted = Slotted()
    slotted.calls, slotted.mode = 1000, "usual"
    members = {name: vars(Slotted)[name] for name in Slotted.__slots__}
    was = HeldSlots(slotted, members)
    slotted.mode = "other"
    assert list(news_of(was, HeldSlots(slotted, members))) == [("mode", (str, "other"))]


# ------------------------------------------------------------------------------------------------
# what is tried out

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Watched:
    """Calls of a loss under the eyes of ``Switches``, without a clipper."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss, self.switches = model, loss, Switches()
        self.subject = Subject(model, layout_of(model), loss, Checkpointing())
        self.switches.begin(self.subject)

    def call(self, rare: bool = False) -> None:
        batch = with_rare(records()) if rare else records()
        with self.switches.watching(self.subject, RECORDS, lambda: batch, None):
            self.loss(self.model, batch)


def thrown_if(condition: Callable[[], bool], throw: Callable[[], Any]) -> Loss:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if condition() else batch)
        if is_rare(batch["x"]):
            throw()
        return found

    return loss


def count_in(kept: dict[str, int]) -> Callable[[], None]:
    def count() -> None:
        kept["rare"] += 1

    return count


def test_the_state_from_before_all_changes_that_wait_is_tried() -> None:
    """The third change is of no new kind; the fourth is looked at, and the switch is older."""
    kept = {"rare": 0}
    watched = Watched(small(), thrown_if(lambda: kept["rare"] > 2, count_in(kept)))
    for _ in range(3):
        watched.call(rare=True)
    assert kept == {"rare": 3}
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert kept == {"rare": 2}


def test_a_second_change_of_a_known_kind_is_looked_at() -> None:
    kept = {"rare": 4}  # to 5, 6 and 7: one kind
    watched = Watched(small(), thrown_if(lambda: kept["rare"] > 5, count_in(kept)))
    watched.call(rare=True)
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert kept == {"rare": 5}


def test_news_beside_a_place_that_changes_at_every_call_is_looked_at() -> None:
    seen: list[int] = []
    last: object = None

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal last
        last = object()
        return thrown_if(lambda: bool(seen), lambda: seen.append(1))(model, batch)

    watched = Watched(small(), loss)
    for _ in range(4):
        watched.call()
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert not seen


def test_what_is_attached_by_one_record_and_written_into_by_another_is_looked_at() -> None:
    model: Any = small()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        if not hasattr(model, "kept"):
            model.kept = {"deep": {}}
        deep = model.kept["deep"]
        return thrown_if(lambda: bool(deep), lambda: deep.update(thrown=1))(model, batch)

    watched = Watched(model, loss)
    watched.call()
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert model.kept == {"deep": {}}


def test_a_switch_of_gradients_alone_is_looked_at() -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        if seen:
            found = found + 3.0 * (found - found.detach())  # the same values
        if is_rare(batch["x"]):
            seen.append(1)
        return found

    watched = Watched(small(), loss)
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert not seen


def test_a_switch_that_ends_all_later_calls_is_looked_at() -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if seen:
            raise RuntimeError("full")
        return thrown_if(lambda: False, lambda: seen.append(1))(model, batch)

    watched = Watched(small(), loss)
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert not seen


def test_what_came_before_public_records_in_a_call_is_not_theirs() -> None:
    seen: list[int] = []
    filled: list[int] = []
    watched = Watched(small(), thrown_if(lambda: bool(seen), lambda: [*filled, seen.append(1)]))
    switches, batch = watched.switches, records()
    watching = switches.watching(watched.subject, RECORDS, lambda: batch, None)
    with pytest.raises(ValueError, match=REFUSED), watching:
        seen.append(1)  # a trace of the first record
        with switches.filled_by_public():
            filled.append(2)
    assert not seen
    assert filled == [2]


def test_what_the_caller_changes_beside_a_change_that_waits_lets_it_wait() -> None:
    kept: dict[str, Any] = {"rare": 0, "weight": 1.0}
    watched = Watched(small(), thrown_if(lambda: kept["rare"] > 2, count_in(kept)))
    for _ in range(3):
        watched.call(rare=True)
        kept["weight"] = 0.5 * kept["weight"]
    with pytest.raises(ValueError, match=REFUSED):
        watched.call(rare=True)
    assert kept == {"rare": 2, "weight": 0.125}


# ------------------------------------------------------------------------------------------------
# settings of torch's


SETTINGS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "torch.set_grad_enabled": (torch.set_grad_enabled, False),
    "torch.set_autocast_enabled('cuda')": (partial(torch.set_autocast_enabled, "cuda"), True),
    "torch.set_autocast_dtype('cpu')": (partial(torch.set_autocast_dtype, "cpu"), torch.float16),
    "torch.set_autocast_dtype('cuda')": (partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16),
    "torch.backends.cudnn.enabled": (torch._C._set_cudnn_enabled, False),
    "torch.backends.cudnn.allow_tf32": (torch._C._set_cudnn_allow_tf32, False),
    "torch.backends.cudnn.deterministic": (torch._C._set_cudnn_deterministic, True),
    "torch.backends.cuda.enable_flash_sdp": (torch.backends.cuda.enable_flash_sdp, False),
    "torch.backends.cuda.enable_mem_efficient_sdp": (
        torch.backends.cuda.enable_mem_efficient_sdp,
        False,
    ),
    "torch.backends.cuda.enable_math_sdp": (torch.backends.cuda.enable_math_sdp, False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_switched_is_named_and_put_back(name: str) -> None:
    """Also those of a GPU, where there is none."""
    switch, value = SETTINGS[name]
    before = TorchSettings()
    try:
        switch(value)
        found = before.switched()
    finally:
        left = before.switched()
    assert (found, left) == (name, None)
