"""The attributes of an object, and what says how they are looked up: the object's class, and which
dictionary is theirs. Both may be exchanged.
"""

from __future__ import annotations

from quietgrad.clipping.soundness.kept.holders import HeldItems
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
