"""What kinds of value a place in plain Python came to hold: a switch that is thrown for the first
time is another kind, where a counter that goes on is the same one until it has doubled.
"""

from __future__ import annotations

import math
import types
from collections.abc import Hashable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.soundness.kept.holders import (
    Held,
    HeldArray,
    HeldCell,
    HeldDefaults,
    HeldItems,
    HeldNames,
    HeldSlots,
    HeldTensor,
)
from quietgrad.clipping.soundness.kept.owners import HeldClass

# Entries of a tensor, an array or a tuple that are told apart.
FEW = 16

_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def news_of(before: Held, now: Held) -> Iterator[tuple[str, Hashable]]:
    """(name in the place, kind of the value) of all that is there and was not. In memory only: it
    follows from records.
    """
    if isinstance(now, HeldTensor | HeldArray):
        yield from (("", kind) for kind in kinds_of(_written(now)))
        return
    known = {(name, id(value)) for name, value in values_of(before)}
    names = {name for name, _ in known}
    for name, value in values_of(now):
        names.discard(name)
        if (name, id(value)) not in known:
            yield from ((name, kind) for kind in kinds_of(value))
            for part, inner in _parts(value):
                yield from ((f"{name}.{part}", kind) for kind in kinds_of(inner))
    yield from ((name, "gone") for name in names)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """(name, part) of a state that is made anew with each call: a switch in it is one of few."""
    if isinstance(value, dict):
        parts = list(dict.items(value))
    elif isinstance(value, tuple | list):
        parts = list(enumerate(value))
    elif isinstance(value, Tensor | nn.Module | type) or not hasattr(value, "__dataclass_fields__"):
        parts = list(vars(value).items()) if isinstance(value, SimpleNamespace) else []
    else:
        parts = [(name, getattr(value, name, None)) for name in value.__dataclass_fields__]
    return parts if len(parts) <= FEW else []


def kinds_of(value: Any) -> Iterator[Hashable]:
    """One for a single thing; of few numbers together, one each. Numbers are of one kind from one
    power of two to the next.
    """
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
        if plain and not value.is_quantized and value.numel() <= FEW:
            yield from _each(value.detach().flatten().tolist())
        else:
            yield "tensor", value.dtype, value.dim()
    elif hasattr(value, "__array__") and hasattr(value, "tolist") and hasattr(value, "dtype"):
        few = getattr(value, "size", FEW + 1) <= FEW
        flat = value.reshape(-1).tolist() if few else ()
        yield from _each(flat) if few else iter(("array",))
    elif isinstance(value, tuple | frozenset) and len(value) <= FEW:
        yield from _each(value)
    else:
        yield _kind(value)


def _each(values: Iterable[Any]) -> Iterator[Hashable]:
    yield from {_kind(value) for value in values}


def _kind(value: Any) -> Hashable:
    kind = type(value)
    if value is None or kind in (bool, str, bytes):
        return kind, value
    if kind in (int, float):
        if not math.isfinite(value):
            return kind, repr(value)
        exponent = value.bit_length() if kind is int else math.frexp(value)[1]
        return "number", (value > 0) - (value < 0), exponent if value else 0
    if isinstance(value, _CODE):
        return kind, getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return str(kind)


def values_of(held: Held) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a place holds; names of what has none are empty."""
    if isinstance(held, HeldItems):
        if issubclass(held.kind, dict):
            pairs = zip(held.items[::2], held.items[1::2], strict=True)
            yield from ((key if type(key) is str else "", value) for key, value in pairs)
        else:
            yield from (("", value) for value in held.items)
    elif isinstance(held, HeldNames | HeldClass | HeldSlots):
        yield from held.values.items()
    elif isinstance(held, HeldCell):
        yield "", held.value
    elif isinstance(held, HeldDefaults):
        yield from (("", value) for value in held.values)


def _written(held: HeldTensor | HeldArray) -> Any:
    return held.tensor if isinstance(held, HeldTensor) else held.array
