"""Containers of more than a thousand items: looked at is how many they hold, at every call."""

from __future__ import annotations

from typing import Any

from quietgrad.clipping.soundness.kept.holders import kind_of

# Of sets that hold more, and change at every call, what they held would take too long to keep.
MOST_OF_A_SET = 100_000


class HeldLength:
    """How many items a large container holds, and what is needed to have so many again.

    A list that grows is not copied again: its first items are those of before. A set is.

    Args:
        holder: the container.
        before: of the same one, earlier.
    """

    def __init__(self, holder: Any, before: HeldLength | None = None) -> None:
        self.holder, self.kind = holder, kind_of(holder)
        self._length = self.kind.__len__(holder)
        self._items: list[Any] | None = None if before is None else before._items
        if self.kind is set:
            self._items = list(set.__iter__(holder)) if self._length <= MOST_OF_A_SET else None
        elif self._items is None or len(self._items) > self._length:
            self._items = self._now()

    def _now(self) -> list[Any]:
        is_mapping = issubclass(self.kind, dict)
        return list(self.kind.items(self.holder) if is_mapping else self.kind.__iter__(self.holder))

    def changed(self) -> bool:
        return bool(self.kind.__len__(self.holder) != self._length)

    def put_back(self) -> bool:
        """Takes off what came behind, and gives back what was taken away, as far as it is known."""
        if not self.changed():
            return True
        now = self._now()
        known = now if len(now) > self._length and self.kind is not set else self._items
        if known is None or len(known) < self._length:
            return False
        self.kind.clear(self.holder)
        add = self.kind.update if issubclass(self.kind, dict | set) else self.kind.extend
        add(self.holder, known[: self._length])
        return True
