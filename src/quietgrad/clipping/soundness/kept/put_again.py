"""Frozen weights that peft sets to themselves whenever their layer is called.

LoRA on a parameter (``LoraConfig(target_parameters=...)``, the way to the experts of a mixture) is
a parametrization for one call, and to register one is a write for torch's counter, though it leaves
the weight as it was. Whether it did is told by the weight's bits before and after every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WRAPPER = "ParamWrapper"
AT_ONCE = 2**20  # entries that are taken to int64 together: 8 MiB
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PutAgain:
    """Such weights of a model as they were.

    Attributes:
        were: identity -> its place in memory and layout, and a digest of its bits.
    """

    were: dict[int, tuple[object, Tensor]]

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> PutAgain:
        """Those under peft's wrappers among these modules, now."""
        found = {}
        for module in modules:
            weight = _wrapped(module)
            if weight is not None:
                found[id(weight)] = _place_of(weight), digest_of(weight)
        return cls(found)

    def holds(self, weight: Tensor) -> bool:
        """Whether a weight is one of these, and has the bits that it had, where it had them."""
        place, digest = self.were.get(id(weight), (None, None))
        if digest is None or place != _place_of(weight):
            return False
        return torch.equal(digest, digest_of(weight))


def _wrapped(module: nn.Module) -> nn.Parameter | None:
    """The frozen weight, in one piece and in torch's own layout, that a wrapper is about."""
    kind: Any = type(module)
    if not any(k.__name__ == WRAPPER and k.__module__.startswith("peft.") for k in kind.__mro__):
        return None
    wrapper: Any = module
    weight = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
    plain = type(weight) is nn.Parameter and not weight.is_complex() and weight.is_contiguous()
    return weight if plain and not weight.requires_grad else None


def _place_of(weight: Tensor) -> object:
    return weight.data_ptr(), weight.device, weight.dtype, weight.shape, weight.stride()


def digest_of(weight: Tensor) -> Tensor:
    """[2] sums of all bits as whole numbers, plain and weighted by place: a single entry that
    changes changes the first, and entries that change places the second. Of what has no whole
    numbers as wide, zeros.
    """
    whole = _WHOLE.get(weight.element_size())
    if whole is None:
        return torch.zeros(2, dtype=torch.int64, device=weight.device)
    with torch.no_grad():
        entries = weight.detach().contiguous().view(-1).view(whole)
        weights = numbers_of_places(min(AT_ONCE, len(entries)), weight.device)
        found = torch.zeros(2, dtype=torch.int64, device=weight.device)
        for block, some in enumerate(entries.split(AT_ONCE)):
            wide = some.to(torch.int64)
            found[0] += wide.sum()
            found[1] += (wide * weights[: len(wide)]).sum() * (2 * block + 1)
        return found


def numbers_of_places(count: int, device: torch.device) -> Tensor:
    """[count] numbers of 63 bits that have nothing to do with each other (the mixing step of
    SplitMix64).
    """
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    return mixed ^ (mixed >> 27)
