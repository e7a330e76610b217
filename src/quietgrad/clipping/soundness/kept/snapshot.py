"""Everything that a model and a loss can reach, as it was, to be put back; and what is in it, to be
compared.
"""

from __future__ import annotations

import functools
import sys
import types
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.soundness.kept.holders import (
    MUTABLE,
    Held,
    HeldArray,
    HeldCache,
    HeldCell,
    HeldDefaults,
    HeldGenerator,
    HeldItems,
    HeldNames,
    HeldSlots,
    HeldTensor,
    Named,
    content_of,
)
from quietgrad.clipping.soundness.kept.owners import HeldAttributes, HeldClass
from quietgrad.clipping.soundness.kept.reach import (
    Attributes,
    Found,
    is_generator,
    is_of_a_library,
    reachable,
    slots_of,
)

# Tensors and arrays up to this size together are copied; of others, and of the parameters of other
# models, the version is kept.
MOST_BYTES = 2**26


class Snapshot:
    """The plain state of a model and a loss, as it was when this was made.

    Attributes:
        held: what was found, and how it is put back.
        seen: all that was come across, by identity.
    """

    def __init__(self, model: nn.Module, loss: Any, most_bytes: int | None = None) -> None:
        self._left = MOST_BYTES if most_bytes is None else most_bytes
        self.held: list[tuple[Found, Held]] = []
        self.seen: dict[Any, Any] = {}
        self._found = list(reachable(model, loss, self.seen))
        self._copied: set[int] = set()
        self._disturbed: list[tuple[Tensor, Tensor]] = []
        for found in self._found:
            held = held_of(found, self._fits)
            if held is not None:
                self.held.append((found, held))

    def _fits(self, thing: Any, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        self._copied.add(id(thing))
        return True

    def changed(self) -> list[str]:
        """Names of places that are not as they were, nearest first."""
        return list(dict.fromkeys(found.place for found, held in self.held if held.changed()))

    def put_back(self) -> list[str]:
        """Puts everything back; returns the names of places where that was not possible."""
        while self._disturbed:
            tensor, before = self._disturbed.pop()
            tensor.data = before
        return [found.place for found, held in self.held if not held.put_back()]

    def put_back_generators(self) -> None:
        """Puts back where generators of random numbers stood, and nothing else."""
        for _, held in self.held:
            if isinstance(held, HeldGenerator):
                held.put_back()

    def moved_generators(self) -> list[str]:
        """Names of generators of random numbers that do not stand where they stood; torch's,
        numpy's and Python's own aside.
        """
        held = [(found, one) for found, one in self.held if isinstance(one, HeldGenerator)]
        return [found.place for found, one in held if not one.is_default() and one.changed()]

    def sharing(self, records: Iterable[Tensor]) -> list[Found]:
        """Tensors that lie where these records lie."""
        places = {t.untyped_storage().data_ptr() for t in records if t.numel()}
        return [
            found
            for found in self._found
            if type(found.thing) is Tensor
            and found.thing.layout is torch.strided
            and not found.thing.is_meta
            and found.thing.untyped_storage().data_ptr() in places
        ]

    def disturb(self, places: Iterable[str]) -> bool:
        """Makes other numbers of those in these places, until ``put_back``; says whether there were
        any. What is as it was when this was made is disturbed.
        """
        wanted, some = set(places), False
        for found in self._found:
            thing = found.thing
            if isinstance(thing, Attributes | Named):
                names = thing.inside if isinstance(thing, Attributes) else thing.names
                inside = thing.inside if isinstance(thing, Attributes) else thing.namespace
                for name in list(names):
                    if f"{found.place}.{name}" in wanted and type(inside.get(name)) is float:
                        inside[name] = _other(inside[name])
                        some = True
            elif found.place in wanted:
                some = self.disturb_one(thing) or some
        return some

    def disturb_one(self, thing: Any) -> bool:
        """The same of one object."""
        if isinstance(thing, Tensor):
            if type(thing) not in (Tensor, nn.Parameter) or not thing.numel():
                return False
            now = thing.data
            self._disturbed.append((thing, now))
            # Another tensor's: others may share what it holds. Whole numbers change places, so that
            # they stay in their range.
            floating = thing.is_floating_point()
            thing.data = _other(now) if floating else now.flatten().flip(0).view(now.shape)
            return True
        if _is_array(thing):
            if id(thing) not in self._copied or thing.dtype.kind != "f" or not thing.size:
                return False
            thing[...] = _other(thing)
            return True
        if type(thing) is types.CellType:
            if type(content_of(thing)) is float:
                thing.cell_contents = _other(thing.cell_contents)
                return True
            return False
        if isinstance(thing, dict | list):
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            numbers = [(key, value) for key, value in items if type(value) is float]
            for key, value in numbers:
                thing[key] = _other(value)
            return bool(numbers)
        return False


def held_of(found: Found, fits: Callable[[Any, int], bool]) -> Held | None:
    """How what was found is put back; None for what holds nothing itself.

    Args:
        found: which.
        fits: whether a tensor or an array of so many bytes may be copied.
    """
    thing, kind = found.thing, type(found.thing)
    if isinstance(thing, Attributes):
        return HeldAttributes(thing)
    if isinstance(thing, Named):
        return HeldNames(thing)
    if issubclass(kind, MUTABLE):
        return HeldItems(thing)
    if issubclass(kind, Tensor):
        plain = kind is Tensor and thing.layout is torch.strided and not thing.is_meta
        size = thing.numel() * thing.element_size()
        return HeldTensor(thing, plain and fits(thing, size))
    if kind is array:
        return HeldArray(thing, fits(thing, len(thing) * thing.itemsize))
    if _is_array(thing):
        return HeldArray(thing, fits(thing, thing.nbytes))
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple(thing)
    if is_generator(thing):
        return HeldGenerator(thing)
    if issubclass(kind, type):
        return None if is_of_a_library(thing) else HeldClass(thing)
    slots = slots_of(kind)
    return HeldSlots(thing, slots) if slots else None


def _other(number: Any) -> Any:
    return number * 1.5 + 1.0


_SIMPLE: dict[type, Any] = {
    types.CellType: HeldCell,
    types.FunctionType: HeldDefaults,
    functools._lru_cache_wrapper: HeldCache,
}

Contents = dict[str, list[Any]]


def contents(model: nn.Module, loss: Any) -> Contents:
    """Name of a place -> what is there, in a few numbers for each tensor. Private."""
    found: Contents = defaultdict(list)
    for place in reachable(model, loss):
        summed = _summary(place.thing)
        if summed is not None:
            found[place.place].append(summed)
    return found


def differing(one: Contents, other: Contents) -> list[str]:
    """Names of places that do not hold the same."""
    return [place for place in {**one, **other} if one.get(place) != other.get(place)]


def _summary(thing: Any) -> Any:
    if isinstance(thing, int | float | complex | str | bytes):
        return repr(thing)
    if _is_array(thing):
        return repr((thing.shape, thing.tobytes())) if thing.nbytes <= MOST_BYTES else None
    if not isinstance(thing, Tensor) or thing.is_meta or thing.layout is not torch.strided:
        return None
    if thing.numel() * thing.element_size() > MOST_BYTES:
        return None
    shape, flat = tuple(thing.shape), thing.detach().flatten()
    if thing.is_quantized or not flat.numel():
        return repr(shape)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    wide = flat.double() if flat.device.type != "mps" else flat.float()
    return repr((shape, float(wide[::2].sum()), float(wide[1::2].sum()), float(wide.norm())))


def _is_array(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray)
