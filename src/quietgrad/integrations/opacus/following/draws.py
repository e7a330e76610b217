"""Whether a loop drew random numbers for the rows that it puts beside records. Rows that differ and
were not drawn belong to places in the batch: with one record more, all others would get another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Draws:
    """Watches torch's generators from here on; what the model draws does not count."""

    def __init__(self) -> None:
        self._states = _states()

    def any(self) -> bool:
        """Whether the loop has drawn anything."""
        now = _states()
        return len(now) != len(self._states) or any(
            not torch.equal(a, b) for a, b in zip(now, self._states, strict=True)
        )

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """The model runs: its dropout draws nothing for the loop."""
        before = self.any()
        yield
        if not before:
            self._states = _states()


def _states() -> list[Tensor]:
    found = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        found.append(torch.mps.get_rng_state())
    return found


def has_equal_rows(t: Tensor, dim: int | None) -> bool:
    """Whether every row is the first; of rows without values too."""
    if dim is None or t.layout is not torch.strided or not t.numel():
        return True
    rows = t.movedim(dim, 0)
    return bool(((rows == rows[:1]) | ((rows != rows) & (rows[:1] != rows[:1]))).all())
