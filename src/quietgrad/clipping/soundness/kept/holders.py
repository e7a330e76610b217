"""Places that can hold something between two calls, as they were, each of which can be put back.

Comparison is by identity, as an equal object in its place may be another one that is written into
later. Methods of builtin types are called directly: a subclass may do anything in its own.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor

from quietgrad.clipping.soundness.unchanged import equal_contents, version_of

# Stands for a name that nothing is bound to, and for an empty closure cell.
ABSENT = object()


class Held(Protocol):
    """One place, as it was when this was made."""

    def changed(self) -> bool: ...

    def put_back(self) -> bool:
        """As it was; False where that is not possible."""
        ...


@dataclass(frozen=True)
class Named:
    """Some names of a namespace: globals that a function reads, attributes of a module or object.

    Attributes:
        namespace: their dictionary.
        names: which of them.
    """

    namespace: dict[str, Any]
    names: frozenset[str]


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


class HeldItems:
    """A list, deque, set, bytearray or dictionary."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.kind = kind_of(holder)
        self._factory = factory_of(holder)
        self.items = self._now()

    def _now(self) -> list[Any]:
        if issubclass(self.kind, dict):
            return [part for item in list(self.kind.items(self.holder)) for part in item]
        return list(self.kind.__iter__(self.holder))

    def changed(self) -> bool:
        if self.kind is bytearray:
            return self._now() != self.items
        if self._factory is not factory_of(self.holder):
            return True
        now, parts = self.kind.__iter__(self.holder), 1
        if issubclass(self.kind, dict):
            now, parts = chain.from_iterable(self.kind.items(self.holder)), 2
        return parts * self.kind.__len__(self.holder) != len(self.items) or not all(
            map(is_, now, self.items)
        )

    def put_back(self) -> bool:
        if self._factory is not factory_of(self.holder):
            self.holder.default_factory = self._factory
        if self.changed():
            self.kind.clear(self.holder)
            if issubclass(self.kind, dict):
                for key, value in zip(self.items[::2], self.items[1::2], strict=True):
                    self.kind.__setitem__(self.holder, key, value)
            elif self.kind is set:
                set.update(self.holder, self.items)
            else:
                self.kind.extend(self.holder, self.items)
        return True


MUTABLE: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, bytearray)


def kind_of(holder: Any) -> Any:
    """The builtin one that it is, or inherits from."""
    return next(kind for kind in MUTABLE if isinstance(holder, kind))


def factory_of(holder: Any) -> Any:
    """What a ``defaultdict`` makes of a key that it does not have."""
    return holder.default_factory if isinstance(holder, defaultdict) else None


class HeldNames:
    """Some names of a namespace."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self.values = {name: named.namespace.get(name, ABSENT) for name in named.names}

    def changed(self) -> bool:
        now = self._named.namespace
        return any(now.get(name, ABSENT) is not value for name, value in self.values.items())

    def put_back(self) -> bool:
        now = self._named.namespace
        for name, value in self.values.items():
            if now.get(name, ABSENT) is value:
                continue
            if value is ABSENT:
                del now[name]
            else:
                now[name] = value
        return True


class HeldSlots:
    """Attributes of an object that has no dictionary of them."""

    def __init__(self, holder: Any, members: dict[str, Any]) -> None:
        self.holder, self._members = holder, members
        self.values = self._now()

    def _now(self) -> dict[str, Any]:
        return {name: slot_of(self.holder, member) for name, member in self._members.items()}

    def changed(self) -> bool:
        return not _same(self._now().values(), self.values.values())

    def put_back(self) -> bool:
        now = self._now()
        for name, value in self.values.items():
            if now[name] is value:
                continue
            if value is ABSENT:
                self._members[name].__delete__(self.holder)
            else:
                self._members[name].__set__(self.holder, value)
        return True


def slot_of(holder: Any, member: Any) -> Any:
    """What a slot holds, or ``ABSENT``."""
    try:
        return member.__get__(holder, type(holder))
    except AttributeError:
        return ABSENT


class HeldCell:
    """A variable that a function closes over."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell, self.value = cell, content_of(cell)

    def changed(self) -> bool:
        return content_of(self._cell) is not self.value

    def put_back(self) -> bool:
        if self.value is not ABSENT:
            self._cell.cell_contents = self.value
        elif self.changed():
            del self._cell.cell_contents
        return True


def content_of(cell: types.CellType) -> Any:
    """What a cell holds, or ``ABSENT``."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class HeldDefaults:
    """Code and default arguments of a function, which may be replaced; what is in them is seen
    apart.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self.values = self._now()

    def _now(self) -> tuple[Any, ...]:
        f = self._function
        return f.__code__, f.__defaults__, f.__kwdefaults__

    def changed(self) -> bool:
        return not _same(self._now(), self.values)

    def put_back(self) -> bool:
        if self.changed():
            f = self._function
            f.__code__, f.__defaults__, f.__kwdefaults__ = self.values
        return True


class HeldTensor:
    """A tensor's numbers.

    Args:
        tensor: which.
        copied: keep a copy; else only its version is known, and it cannot be put back.
    """

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self._version = tensor, version_of(tensor)
        self.copy, self.is_copied = tensor.detach().clone() if copied else None, copied

    def changed(self) -> bool:
        if version_of(self.tensor) != self._version:
            return self.copy is None or not equal_contents(self.copy, self.tensor)
        return self.copy is not None and not equal_contents(self.copy, self.tensor)

    def put_back(self) -> bool:
        if not self.changed():
            return True
        if self.copy is None:
            return False
        with torch.no_grad():
            if self.copy.shape == self.tensor.shape and self.copy.dtype == self.tensor.dtype:
                self.tensor.data.copy_(self.copy)
            else:
                self.tensor.data = self.copy.clone()
        return True


class HeldArray:
    """A numpy array's numbers, or those of Python's ``array``; small ones are copied."""

    def __init__(self, held: Any, copied: bool) -> None:
        self.array, self.is_copied = held, copied
        self.copy = copy.copy(held) if copied else None

    def changed(self) -> bool:
        return self.copy is not None and self.array.tobytes() != self.copy.tobytes()

    def put_back(self) -> bool:
        if self.changed():
            self.array[slice(None) if isinstance(self.array, array) else ...] = self.copy
        return True


def _pythons() -> Any:
    return random.random.__self__  # type: ignore[attr-defined]


class HeldGenerator:
    """The state of a random generator: torch's, Python's or numpy's."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._state = self._now()

    def _now(self) -> Any:
        if isinstance(self._generator, torch.Generator):
            return self._generator.get_state()
        if isinstance(self._generator, random.Random):
            return self._generator.getstate()
        if hasattr(self._generator, "bit_generator"):
            return self._generator.bit_generator.state
        return self._generator.get_state(legacy=False)

    def is_default(self) -> bool:
        """Whether it is one that the library keys."""
        numpy = sys.modules.get("numpy")
        numpys = None if numpy is None else numpy.random.mtrand._rand
        return any(
            self._generator is one
            for one in (torch.default_generator, *torch.cuda.default_generators, _pythons(), numpys)
        )

    def changed(self) -> bool:
        if isinstance(self._generator, torch.Generator):
            return not torch.equal(self._now(), self._state)
        return repr(self._now()) != repr(self._state)

    def put_back(self) -> bool:
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(self._state)
        elif isinstance(self._generator, random.Random):
            self._generator.setstate(self._state)
        elif hasattr(self._generator, "bit_generator"):
            self._generator.bit_generator.state = self._state
        else:
            self._generator.set_state(self._state)
        return True


class HeldCache:
    """The cache of ``functools.cache`` or ``lru_cache``. Single entries cannot be taken out: it is
    emptied where it has new ones, and fills again with what the function returns.
    """

    def __init__(self, cached: Any) -> None:
        self._cached = cached
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        info = self._cached.cache_info()
        return info.misses, info.currsize

    def changed(self) -> bool:
        return self._now() != self._before

    def put_back(self) -> bool:
        if self.changed():
            with contextlib.suppress(AttributeError):
                self._cached.cache_clear()
            self._before = self._now()
        return True
