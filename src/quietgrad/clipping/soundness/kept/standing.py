"""What model and loss keep in plain Python, as it stands between two calls, and whether a call
changed it. All places are compared together, by identity: half a millisecond for two hundred
layers. Only where something changed is one place after the other looked at.

Places are found by a walk (``reach``). What is attached later is found by the next walk; the place
that it was attached to has changed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from quietgrad.clipping.soundness.kept.holders import (
    MUTABLE,
    Held,
    HeldArray,
    HeldGenerator,
    HeldItems,
    HeldTensor,
    Named,
)
from quietgrad.clipping.soundness.kept.reach import MOST_ITEMS, Attributes, Found
from quietgrad.clipping.soundness.kept.snapshot import Snapshot, held_of
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
    containers of more than a thousand items, only how many they are.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._model, self._loss = model, loss
        self.walk()

    def walk(self) -> None:
        """Finds all places anew, as they stand now."""
        snapshot = Snapshot(self._model, self._loss, MOST_BYTES)
        self._places: dict[Hashable, tuple[Found, Held]] = {
            _key(found): (found, _bounded(held))
            for found, held in snapshot.held
            if not isinstance(held, HeldGenerator)
        }
        self._note()

    def changes(self) -> dict[Hashable, Change]:
        """What changed since it was noted, which is noted with this."""
        if self._now().is_same(self._before) and not any(
            self._places[key][1].changed() for key in self._others
        ):
            return {}
        changed: dict[Hashable, Change] = {}
        for key in self._suspects():
            found, held = self._places[key]
            if held.changed():
                now = _held_again(found, held)
                changed[key] = Change(found.place, held, now)
                self._places[key] = found, now
        self._note()
        return changed

    def _suspects(self) -> list[Hashable]:
        """Places that may have changed: what was empty and is empty has not."""
        sizes = zip(self._sized, self._before.sizes, map(len, self._sized.values()), strict=True)
        sized = [key for key, before, now in sizes if before or now]
        return [*sized, *self._tensors, *self._others]

    def _note(self) -> None:
        """Sorts places by how they are compared together."""
        self._sized: dict[Hashable, Any] = {}
        self._tensors: dict[Hashable, Tensor] = {}
        self._others: list[Hashable] = []
        self._mappings: list[Any] = []
        self._rows: dict[Any, list[Any]] = {kind: [] for kind in _ROWS}
        for key, (_, held) in self._places.items():
            if isinstance(held, HeldItems):
                self._sized[key] = held.holder
                if len(held.holder):
                    of_kind = self._rows.get(held.kind, self._mappings)
                    of_kind.append(held.holder)
            elif isinstance(held, HeldTensor):
                self._tensors[key] = held.tensor
            else:
                self._others.append(key)
        self._before = self._now()

    def _now(self) -> _State:
        rows = (map(kind.__iter__, some) for kind, some in self._rows.items())
        return _State(
            [*map(len, self._sized.values())],
            [version_of(tensor) for tensor in self._tensors.values()],
            [
                *chain.from_iterable(map(dict.keys, self._mappings)),
                *chain.from_iterable(map(dict.values, self._mappings)),
                *chain.from_iterable(chain.from_iterable(rows)),
            ],
        )


class HeldLength:
    """Of a large container, how many items it holds: copies of all of them at every call would take
    longer the more there are.
    """

    def __init__(self, holder: Any) -> None:
        self.holder, self._length = holder, len(holder)
        self._kind: Any = next(kind for kind in MUTABLE if isinstance(holder, kind))

    def changed(self) -> bool:
        return len(self.holder) != self._length

    def put_back(self) -> bool:
        """As many items as there were: takes off what came behind (of a set, any). What was taken
        away nobody knows: others stand in its place, so that a look sees the number; False there.
        """
        missing = self._length - len(self.holder)
        for _ in range(-missing):
            self._kind.popitem(self.holder) if self._is_mapping else self._kind.pop(self.holder)
        if missing > 0:
            self._fill(missing)
        return missing == 0 or (missing < 0 and self._kind is not set)

    @property
    def _is_mapping(self) -> bool:
        return issubclass(self._kind, dict)

    def _fill(self, missing: int) -> None:
        if self._is_mapping:
            self._kind.update(self.holder, {object(): None for _ in range(missing)})
        elif self._kind is set:
            set.update(self.holder, [object() for _ in range(missing)])
        else:
            last = 0 if self._kind is bytearray else None
            last = self.holder[-1] if len(self.holder) else last
            self._kind.extend(self.holder, [last] * missing)


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
    made.items = [part for pair in old.items() for part in pair]
    return made


def _pairs(held: HeldItems) -> dict[Any, Any]:
    return dict(zip(held.items[::2], held.items[1::2], strict=True))


def _bounded(held: Held) -> Held:
    if isinstance(held, HeldItems) and len(held.holder) > MOST_ITEMS:
        return HeldLength(held.holder)
    return held


def _held_again(found: Found, held: Held) -> Held:
    """The same place as it is now; a tensor is copied where it was before."""
    if isinstance(held, HeldItems | HeldLength):
        holder = held.holder
        return HeldLength(holder) if len(holder) > MOST_ITEMS else HeldItems(holder)
    copied = not isinstance(held, HeldTensor | HeldArray) or held.is_copied
    again = held_of(found, lambda thing, size: copied)
    assert again is not None
    return again


def _key(found: Found) -> Hashable:
    thing = found.thing
    if isinstance(thing, Attributes):
        return id(thing.inside)
    if isinstance(thing, Named):
        return id(thing.namespace), thing.names
    return id(thing)
