"""Memory as torch's tensors hold it: bytes of the storages that are alive, and their most at once.

A count of sizes, so it is the same on every machine and at every run: no allocator, no other
process and no page of the system's is in it. Of a tensor that is spread over ranks, what is here
counts. It works for tensors that are there and for those that are shapes alone (torch's
FakeTensorMode), so a plan and its test are counted by one rule. What a kernel holds inside itself
is not counted, nor what never met an operation of torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quietgrad.tensors import local_of

Result = TypeVar("Result")


class Held(TorchDispatchMode):
    """Inside, every storage that an operation makes is counted until it is let go.

    Attributes:
        now: bytes alive.
        peaks: label -> the most that was alive while it was set, in the order of setting.
    """

    def __init__(self, known: Iterable[Tensor] = (), counted: bool = False) -> None:
        """Args:
        known: tensors that are there before, such as a model's.
        counted: whether they count; else they are left out for good.
        """
        super().__init__()
        self.now = 0
        self.peaks: dict[str, int] = {}
        self._label = ""
        self._alive: dict[int, tuple[object, list[int]]] = {}
        for tensor in known:
            self.take(tensor, counted)

    @property
    def peak(self) -> int:
        """The most that was alive."""
        return max(self.peaks.values(), default=0)

    def mark(self, label: str) -> None:
        """What happens from here on has this name."""
        self._label = label
        self.peaks[label] = max(self.peaks.get(label, 0), self.now)

    def spike(self, size: int) -> None:
        """Counts so many bytes that come and go."""
        self.peaks[self._label] = max(self.peaks.get(self._label, 0), self.now + size)

    def over(self, work: Callable[[], Result]) -> tuple[Result, int]:
        """What ``work`` returns, and the most that it held over what was there."""
        now, peaks = self.now, self.peaks
        self.peaks = {}
        found = work()
        most = self.peak - now
        for label, value in self.peaks.items():
            peaks[label] = max(value, peaks.get(label, 0))
        self.peaks = peaks
        return found, max(most, 0)

    def take(self, tensor: Tensor, counted: bool = True) -> None:
        """Counts a tensor's storage, once."""
        storage = local_of(tensor).untyped_storage()
        place = storage._cdata
        if place in self._alive:
            return
        size = [storage.nbytes() if counted else 0]

        def gone(_: object) -> None:
            self._alive.pop(place, None)
            self.now -= size[0]

        self._alive[place] = weakref.ref(storage, gone), size
        self._more(size[0])

    def resized(self, tensor: Tensor) -> None:
        """Told that a tensor's storage has another size now: no operation of torch's says so
        (``fully_shard`` frees gathered parameters in this way).
        """
        self.take(tensor)
        storage = tensor.untyped_storage()
        size = self._alive[storage._cdata][1]
        more, size[0] = storage.nbytes() - size[0], storage.nbytes()
        self._more(more)

    def _more(self, size: int) -> None:
        self.now += size
        self.peaks[self._label] = max(self.peaks.get(self._label, 0), self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.take(value)
        return result
