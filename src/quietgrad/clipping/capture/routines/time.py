"""The order in which a recurrence runs over time, and which examples take part in which step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """One direction.

    States are kept as [t + 1, ...]: the initial one stands first, or last where time is reversed.

    Attributes:
        reverse: from the last step to the first.
        inactive: [t, b, 1] steps past an example's end, which leave its state as it is; None for
            none.
    """

    reverse: bool = False
    inactive: Tensor | None = None

    def states(self, initial: Tensor, steps: int) -> Tensor:
        """[t + 1, b, h] with the initial state in its place; the rest is not set."""
        states = initial.new_empty(steps + 1, *initial.shape)
        states[steps if self.reverse else 0] = initial
        return states

    def before(self, states: Tensor) -> Tensor:
        """[t, b, h] what each step starts from."""
        return states[1:] if self.reverse else states[:-1]

    def after(self, states: Tensor) -> Tensor:
        """[t, b, h] what each step ends with."""
        return states[:-1] if self.reverse else states[1:]

    def last(self, states: Tensor) -> Tensor:
        """[b, h] the final state, a copy."""
        return states[0 if self.reverse else -1].clone()

    def last_step(self, steps: int) -> int:
        return 0 if self.reverse else steps - 1

    def steps(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """(step, place of the state before it, of the state after it), in order."""
        for t in reversed(range(steps)) if self.reverse else range(steps):
            yield (t, t + 1, t) if self.reverse else (t, t, t + 1)

    def backwards(self, steps: int) -> Iterator[tuple[int, int | None]]:
        """(step, the step that ran before it or None), against the order."""
        for t in range(steps) if self.reverse else reversed(range(steps)):
            earlier = t + 1 if self.reverse else t - 1
            yield t, earlier if 0 <= earlier < steps else None

    def hold(self, t: int, before: Tensor, after: Tensor) -> None:
        """Inactive examples keep their state."""
        if self.inactive is not None:
            torch.where(self.inactive[t], before, after, out=after)

    def only_where_active(self, *derivatives_tbh: Tensor) -> None:
        """Zeros elsewhere."""
        if self.inactive is not None:
            for derivative in derivatives_tbh:
                derivative.masked_fill_(self.inactive, 0.0)

    def one_where_inactive(self, share_tbh: Tensor) -> Tensor:
        """What is kept of a state: all of it where nothing happens."""
        return share_tbh if self.inactive is None else share_tbh.masked_fill(self.inactive, 1.0)

    def passed(self, t: int, dh: Tensor, at_earlier: Tensor | None) -> Tensor | None:
        """[b, h] gradient at the state before step t that does not go through its gates."""
        if self.inactive is None:
            return at_earlier
        kept = dh.masked_fill(~self.inactive[t], 0.0)
        return kept if at_earlier is None else kept + at_earlier


def or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Nothing depends on what has no gradient."""
    return torch.zeros_like(like) if gradient is None else gradient
