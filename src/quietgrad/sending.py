"""What a processor made, to where a model is, without waiting for a GPU.

A copy from ordinary memory to a GPU, and every number that is read from one, waits until all that
was begun there is done: the GPU then has nothing to do until the processor has told it more. A copy
from pinned memory is put into its queue like any product; torch gives that memory to nobody else
before the copy is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def sent(made: Tensor, device: torch.device) -> Tensor:
    """A tensor of the processor's on a device: the same numbers."""
    if device.type == made.device.type:
        return made
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def numbers_beside(
    values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """[n] numbers, on the device of ``like`` and of its dtype, where no other is given."""
    kind = like.dtype if dtype is None else dtype
    return sent(torch.tensor(values, dtype=kind, device="cpu"), like.device)


def read_together(numbers: Iterable[Tensor]) -> list[int]:
    """Whole numbers and truth values, scalars of any devices, as Python's: each device is waited
    for once.
    """
    each = list(numbers)
    found = [0] * len(each)
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(each):
        places.setdefault(number.device, []).append(place)
    for some in places.values():
        values = torch.stack([each[place].to(torch.int64) for place in some]).tolist()
        for place, value in zip(some, values, strict=True):
            found[place] = value
    return found
