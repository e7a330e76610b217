"""What model and loss keep in plain Python, as it stands between two calls, and whether a call
changed it. All places are compared together, by identity: half a millisecond for two hundred
layers. Only where something changed is one place after the other looked at.

Places are found by a walk (``reach``). What is attached later is found by the next walk; the place
that it was attached to has changed.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from quietgrad.clipping.soundness.kept.holders import (
    Held,
    HeldArray,
    HeldGenerator,
    HeldItems,
    HeldTensor,
    factory_of,
)
from quietgrad.clipping.soundness.kept.owners import HeldAttributes
from quietgrad.clipping.soundness.kept.reach import MOST_ITEMS, Found
from quietgrad.clipping.soundness.kept.snapshot import Snapshot, held_of
from quietgrad.clipping.soundness.switches.large import HeldLength
from quietgrad.clipping.soundness.switches.newer import Newer, SmallTensors, key_of
from quietgrad.clipping.soundness.unchanged import version_of

# Tensors and arrays up to this size together are copied, and stay so from call to call.
MOST_BYTES = 2**24

_ROWS: tuple[Any, ...] = (list, deque, set, bytearray)


class Change(NamedTuple):
    """One place that is not as it was.

    Attributes:
        place: its name, which tells nothing of any record.
        before, now: what it held, and holds; each can be put back.
    """

    place: str
    before: Held
    now: Held


class _State(NamedTuple):
    """What is compared together: sizes of containers, versions of tensors, and all items."""

    sizes: list[int]
    versions: list[int]
    items: list[Any]

    def is_same(self, other: _State) -> bool:
        return (
            self.sizes == other.sizes
            and self.versions == other.versions
            and len(self.items) == len(other.items)
            and all(map(is_, self.items, other.items))
        )


class Standing:
    """The plain state of a model and a loss, as it stood when it was noted last.

    Memory: a reference for each thing that is kept, and copies of small tensors and arrays. Of
    containers of more than a thousand items, their items once.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._model, self._loss = model, loss
        self.walk()

    def walk(self) -> None:
        """Finds all places anew, as they stand now."""
        snapshot = Snapshot(self._model, self._loss, MOST_BYTES)
        self._places: dict[Hashable, tuple[Found, Held]] = {
            key_of(found): (found, _bounded(held))
            for found, held in snapshot.held
            if not isinstance(held, HeldGenerator)
        }
        self._newer = Newer(snapshot.seen)
        self._note()

    def changes(self, by_caller: bool = False, thorough: bool = False) -> dict[Hashable, Change]:
        """What changed since it was noted, which is noted with this.

        Args:
            by_caller: between two calls. Of larger tensors those alone that count a write: what a
                call wrote past the count is not the caller's.
            thorough: also compare the numbers of larger tensors.
        """
        if (
            not thorough
            and self._now().is_same(self._before)
            and self._small.are_same()
            and not any(self._places[key][1].changed() for key in self._others)
        ):
            return {}
        changed: dict[Hashable, Change] = {}
        for key in self._suspects(by_caller):
            found, held = self._places[key]
            if held.changed():
                now = _held_again(found, held)
                changed[key] = Change(found.place, held, now)
                self._places[key] = found, now
        known = self._newer.times
        for key, change in changed.items():
            self._newer.follow(self._places, self._places[key][0], change.before, change.now)
        if self._newer.times > known or not all(map(_stays_sorted, changed.values())):
            self._note()
        else:
            self._note_again(changed)
        return changed

    def _suspects(self, by_caller: bool) -> list[Hashable]:
        """Places that may have changed: what was empty and is empty has not."""
        before, now = self._before, self._now()
        sizes = zip(self._sized, before.sizes, now.sizes, strict=True)
        sized = [
            key
            for key, earlier, later in sizes
            if earlier or later or self._has_more_than_items(key)
        ]
        tensors = [
            key
            for key, earlier, later in zip(
                self._tensors, before.versions, now.versions, strict=True
            )
            if earlier != later or not by_caller or key in self._small.keys
        ]
        return [*sized, *tensors, *self._others]

    def _has_more_than_items(self, key: Hashable) -> bool:
        holder = self._sized[key]
        return isinstance(holder, defaultdict) or isinstance(self._places[key][1], HeldAttributes)

    def _note(self) -> None:
        """Sorts places by how they are compared together."""
        self._sized: dict[Hashable, Any] = {}
        self._tensors: dict[Hashable, Tensor] = {}
        self._others: list[Hashable] = []
        self._mappings: list[Any] = []
        self._ordered: list[Any] = []
        self._factories: list[Any] = []
        self._owners: list[Any] = []
        self._rows: dict[Any, list[Any]] = {kind: [] for kind in _ROWS}
        for key, (_, held) in self._places.items():
            if isinstance(held, HeldItems):
                self._note_items(key, held)
            elif isinstance(held, HeldTensor):
                self._tensors[key] = held.tensor
            else:
                self._others.append(key)
        self._small = SmallTensors((key, self._places[key][1]) for key in self._tensors)
        self._before = self._now()

    def _note_again(self, changed: Iterable[Hashable]) -> None:
        """The same where places are compared as they were."""
        if any(key in self._tensors for key in changed):
            self._small = SmallTensors((key, self._places[key][1]) for key in self._tensors)
        self._before = self._now()

    def _note_items(self, key: Hashable, held: HeldItems) -> None:
        holder, kind = held.holder, held.kind
        owner = held.owner if isinstance(held, HeldAttributes) else None
        if type(holder).__len__ is not kind.__len__ or isinstance(owner, threading.local):
            self._others.append(key)
            return
        self._sized[key] = holder
        # A layer has ten OrderedDicts, whose own attributes are empty: that they stay so will do.
        if owner is not None and type(owner) is not OrderedDict:
            self._owners.append(owner)
        if isinstance(holder, defaultdict):
            self._factories.append(holder)
        if len(holder):
            mappings = self._ordered if kind is OrderedDict else self._mappings
            self._rows.get(kind, mappings).append(holder)

    def _now(self) -> _State:
        rows = (map(kind.__iter__, some) for kind, some in self._rows.items())
        return _State(
            [*map(len, self._sized.values())],
            [version_of(tensor) for tensor in self._tensors.values()],
            [
                *map(type, self._owners),
                *map(object.__getattribute__, self._owners, repeat("__dict__")),
                *map(factory_of, self._factories),
                *chain.from_iterable(map(dict.keys, self._mappings)),
                *chain.from_iterable(map(dict.values, self._mappings)),
                *chain.from_iterable(map(OrderedDict.keys, self._ordered)),
                *chain.from_iterable(map(OrderedDict.values, self._ordered)),
                *chain.from_iterable(chain.from_iterable(rows)),
            ],
        )


def with_changes_of(before: Held, change: Change) -> Held | None:
    """What a place held, with what was changed in it since by somebody else; None where the two
    cannot be told apart.
    """
    holds = [before, change.before, change.now]
    if not all(isinstance(held, HeldItems) and issubclass(held.kind, dict) for held in holds):
        return None
    old, earlier, later = (_pairs(cast(HeldItems, held)) for held in holds)
    for name in earlier.keys() - later.keys():
        old.pop(name, None)
    old |= {
        name: value
        for name, value in later.items()
        if name not in earlier or earlier[name] is not value
    }
    made = copy.copy(cast(HeldItems, before))
    if isinstance(change.now, HeldAttributes) and isinstance(made, HeldAttributes):
        earlier_class = cast(HeldAttributes, change.before).of_class
        if change.now.of_class is not earlier_class:
            made.of_class = change.now.of_class
    made.items = [part for pair in old.items() for part in pair]
    return made


def _pairs(held: HeldItems) -> dict[Any, Any]:
    return dict(zip(held.items[::2], held.items[1::2], strict=True))


def _stays_sorted(change: Change) -> bool:
    """Whether a place is compared as it was before it changed."""
    before, now = change.before, change.now
    if isinstance(before, HeldItems) and isinstance(now, HeldItems):
        return before.holder is now.holder and bool(before.items) == bool(now.items)
    return type(before) is type(now)


def _bounded(held: Held) -> Held:
    if type(held) is HeldItems and held.kind.__len__(held.holder) > MOST_ITEMS:
        return HeldLength(held.holder)
    return held


def _held_again(found: Found, held: Held) -> Held:
    """The same place as it is now; a tensor is copied where it was before."""
    if isinstance(held, HeldAttributes):
        return held.again()
    if isinstance(held, HeldLength) and held.kind.__len__(held.holder) > MOST_ITEMS:
        return HeldLength(held.holder, held)
    if isinstance(held, HeldItems | HeldLength):
        return _bounded(HeldItems(held.holder))
    copied = not isinstance(held, HeldTensor | HeldArray) or held.is_copied
    again = held_of(found, lambda thing, size: copied)
    assert again is not None
    return again
