"""What was attached since the places were found by a walk (``reach``): found from where it was
attached, as a walk of everything takes a hundred times as long. And small tensors, whose numbers
are compared at every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from quietgrad.clipping.soundness.kept.holders import Held, HeldGenerator, HeldTensor, Named
from quietgrad.clipping.soundness.kept.reach import Attributes, Found, walked
from quietgrad.clipping.soundness.kept.snapshot import held_of
from quietgrad.clipping.soundness.switches.news import values_of
from quietgrad.clipping.soundness.unchanged import are_alike, equal_contents
from quietgrad.sending import read_together

# Tensors up to this size together are compared by their numbers at every call: a write through
# ``.data`` or numpy is counted nowhere.
SMALL_BYTES = 2**18
SMALL = 64
# Of new tensors and arrays, each up to this size is copied.
COPIED_BYTES = 2**16

Places = dict[Hashable, tuple[Found, Held]]


class Newer:
    """Finds what is beneath new values, and forgets it once they are gone.

    Args:
        seen: what was come across before, by identity; added to.

    Attributes:
        times: that places were added or taken away.
    """

    def __init__(self, seen: dict[Any, Any]) -> None:
        self._seen = seen
        self.times = 0
        # Identity of a value -> in how many places it was attached, and what was found with it.
        self._beneath: dict[int, tuple[int, list[tuple[Hashable, Hashable]]]] = {}

    def follow(self, places: Places, found: Found, before: Held, now: Held) -> None:
        """Adds what is beneath the values that a place came to hold, to ``places``."""
        earlier = {id(value): value for _, value in values_of(before)}
        later = {id(value): (name, value) for name, value in values_of(now)}
        for gone in earlier.keys() - later.keys():
            self._forget(places, gone, earlier[gone])
        named = isinstance(found.thing, Attributes | Named | type)
        for new in later.keys() - earlier.keys():
            name, value = later[new]
            self._add(places, Found(f"{found.place}.{name}" if named else found.place, value))

    def _add(self, places: Places, found: Found) -> None:
        root = id(found.thing)
        if root in self._beneath:
            times, known_beneath = self._beneath[root]
            self._beneath[root] = times + 1, known_beneath
            return
        beneath: list[tuple[Hashable, Hashable]] = []
        known = len(self._seen)
        for one in walked(deque([found]), self._seen):
            key = key_of(one)
            held = None if key in places else held_of(one, _fits)
            if held is not None and not isinstance(held, HeldGenerator):
                places[key] = one, held
                self.times += 1
                beneath.append((id(one.thing), key))
        if len(self._seen) > known:
            new = islice(reversed(self._seen), len(self._seen) - known)
            self._beneath[root] = 1, [*beneath, *((number, None) for number in new)]

    def _forget(self, places: Places, root: int, value: Any) -> None:
        if root in self._beneath:
            times, beneath = self._beneath[root]
            if times > 1:
                self._beneath[root] = times - 1, beneath
                return
            del self._beneath[root]
            for number, key in beneath:
                self._seen.pop(number, None)
                self._take_away(places, key)
        elif isinstance(value, Tensor) and value.grad_fn is not None:  # it holds on to a graph
            self._seen.pop(root, None)
            self._take_away(places, root)

    def _take_away(self, places: Places, key: Hashable) -> None:
        self.times += places.pop(key, None) is not None


class SmallTensors:
    """The smallest of those that are copied."""

    def __init__(self, held: Iterable[tuple[Hashable, Held]]) -> None:
        pairs = [
            (key, one.tensor, one.copy)
            for key, one in held
            if isinstance(one, HeldTensor) and one.copy is not None
        ]
        self.keys: set[Hashable] = set()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        left = SMALL_BYTES
        for key, tensor, copy in sorted(pairs, key=lambda pair: pair[2].nbytes)[:SMALL]:
            left -= copy.nbytes
            if left < 0:
                break
            self.keys.add(key)
            self._pairs.append((tensor, copy))

    def are_same(self) -> bool:
        """Whether all of them hold what they held. Read together, where they are on a GPU."""
        away = [pair for pair in self._pairs if not pair[0].is_cpu]
        return all(
            torch.equal(*pair) or equal_contents(*pair) for pair in self._pairs if pair[0].is_cpu
        ) and all(read_together(are_alike(*pair) for pair in away))


def _fits(thing: Any, size: int) -> bool:
    return size <= COPIED_BYTES


def key_of(found: Found) -> Hashable:
    """Of a place."""
    thing = found.thing
    if isinstance(thing, Attributes):
        return "attributes", id(thing.owner)
    if isinstance(thing, Named):
        return id(thing.namespace), thing.names
    return id(thing)
