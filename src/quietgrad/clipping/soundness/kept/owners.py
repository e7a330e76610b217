"""The attributes of an object, and what says how they are looked up: the object's class, what is in
it, and which dictionary is theirs. All may be exchanged.
"""

from __future__ import annotations

from typing import Any

from quietgrad.clipping.soundness.kept.holders import ABSENT, HeldItems
from quietgrad.clipping.soundness.kept.reach import Attributes, dictionary_of


class HeldAttributes(HeldItems):
    """Of one object, as they were.

    Attributes:
        owner, of_class: the object, and its class.
    """

    def __init__(self, attributes: Attributes) -> None:
        super().__init__(attributes.inside)
        self.owner, self.of_class = attributes.owner, type(attributes.owner)

    def changed(self) -> bool:
        return (
            type(self.owner) is not self.of_class
            or dictionary_of(self.owner) is not self.holder
            or super().changed()
        )

    def put_back(self) -> bool:
        if type(self.owner) is not self.of_class:
            object.__setattr__(self.owner, "__class__", self.of_class)
        if dictionary_of(self.owner) is not self.holder:
            object.__setattr__(self.owner, "__dict__", self.holder)
        return super().put_back()

    def again(self) -> HeldAttributes:
        """As they are now."""
        inside = dictionary_of(self.owner)
        return HeldAttributes(Attributes(self.holder if inside is None else inside, self.owner))


# What Python itself notes in a class.
_OF_PYTHON = ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__slotnames__")


class HeldClass:
    """The attributes of a class, those that it does not have yet, and what it inherits from."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.values = self._now()

    def _now(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self.kind).items() if name not in _OF_PYTHON}
        return own | {"__bases__": self.kind.__bases__}

    def changed(self) -> bool:
        now = self._now()
        return now.keys() != self.values.keys() or any(
            now[name] is not value and (name != "__bases__" or now[name] != value)
            for name, value in self.values.items()
        )

    def put_back(self) -> bool:
        now = self._now()
        for name in now.keys() - self.values.keys():
            type.__delattr__(self.kind, name)
        for name, value in self.values.items():
            if now.get(name, ABSENT) is not value:
                type.__setattr__(self.kind, name, value)
        return True
