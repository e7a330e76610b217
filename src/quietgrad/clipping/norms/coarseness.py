"""The coarsest precision that takes part in a pass, and the least divisor that follows from it.

Wherever half precision takes part, every later number was rounded by it: a float32 layer above a
bfloat16 product has factors that are off by bfloat16's spacing. So it is a fact of the whole pass,
not of a factor's type. It is known from what stands before records are read (parameters, buffers,
autocast, reduced-precision products) and from a look at every operation while the guard examines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.clipping.norms.rounding import LEAST_SHARE, unit_roundoff
from quietgrad.tensors import narrowed_products

SINGLE = unit_roundoff(torch.float32)
_SINGLE_ALONE = {torch.float32}

# In units of u S, u of a coarser precision than float32: no norm below that divides. A factor that
# was rounded twice in different ways differs by 2 u.
OF_COARSE = 2.0


def roundoff_of(dtypes: Iterable[torch.dtype]) -> float:
    """The largest unit roundoff of some types; 0 where none is of floating point."""
    return max((_roundoff(dtype) for dtype in dtypes), default=0.0)


def _roundoff(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    try:
        return torch.finfo(dtype).eps / 2
    except (TypeError, RuntimeError):  # four bits, packed in pairs
        return 0.25


def standing(own: Collection[Tensor]) -> float:
    """The largest unit roundoff that is known of a pass before it is made: nothing of it follows
    from records. ``own``: the model's parameters and buffers.
    """
    devices = {"cpu"} | {t.device.type for t in own if t.device.type != "meta"}
    cast = {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
    return max(roundoff_of({t.dtype for t in own} | cast), narrowed_products(devices))


def is_coarse(roundoff: float) -> bool:
    """Whether it is one of half precision, or less."""
    return roundoff > SINGLE


def least_times(roundoff: float) -> float:
    """What float32's least divisor is multiplied by in a pass of that precision."""
    return max(1.0, OF_COARSE * roundoff / LEAST_SHARE) if is_coarse(roundoff) else 1.0


def refuse_coarser(layer: str, tensors: Sequence[Tensor], times: float) -> None:
    """Checks one call's inputs and output gradients.

    Args:
        layer: the module's name.
        tensors: of the call.
        times: what least divisors are multiplied by in this pass.

    Raises:
        ValueError: where they are of half precision, and the pass is taken to be without.
    """
    dtypes = {t.dtype for t in tensors}
    if dtypes == _SINGLE_ALONE:  # nearly always, and at every call of a layer
        return
    if least_times(roundoff_of(dtypes)) > times:
        raise ValueError(
            f"layer {layer!r} runs in half precision, and nothing did when the model was looked "
            "at: whether it does must not follow from records; run the whole step in "
            "torch.autocast, or in float32"
        )


class Watch(TorchDispatchMode):
    """Inside, notes the coarsest precision that any operation gives a result in.

    Attributes:
        roundoff: its unit roundoff; 0 before the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.roundoff = 0.0
        self._known: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in (found,) if isinstance(found, Tensor) else pytree.tree_leaves(found):
            if isinstance(one, Tensor) and one.dtype not in self._known:
                self._known.add(one.dtype)
                self.roundoff = max(self.roundoff, _roundoff(one.dtype))
        return found
