"""What a tape is written in: functions that were called, and places of what they made."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quietgrad.tensors import fields_of, map_fields

CALL = "call"
LEAF = "leaf"
LOOK = "look"  # a call without gradients


@dataclass(frozen=True)
class Ref:
    """A tensor that a node of the tape made.

    Attributes:
        node: place of the node on the tape.
        leaf: which of the tensors that it made, in order.
    """

    node: int
    leaf: int


@dataclass(frozen=True, eq=False)
class Const:
    """A tensor that came from elsewhere: labels made by the loop, class weights, images of a
    generator.

    Attributes:
        tensor: as it was, without its graph.
        rows: the dimension that may be the records', or None.
        is_of_before: whether it was made of records of an earlier micro-batch, or otherwise of
            records in a way that cannot be computed again for one of them.
        learns: whether it is a weight of no private model.
        learned_from: whether a gradient of it goes on to what it was made of: a weight's function,
            or another model's output.
        by_place: whether its rows differ though the loop has drawn no random number for them.
    """

    tensor: Tensor
    rows: int | None
    is_of_before: bool = False
    learns: bool = False
    learned_from: bool = False
    by_place: bool = False


@dataclass(frozen=True, eq=False)
class Node:
    """A function that was called, or where records entered.

    Attributes:
        what: the function; ``CALL`` for the private model, ``LOOK`` for its outputs without
            gradients, ``LEAF`` for records.
        args, kwargs: its arguments, tensors replaced by ``Ref`` and ``Const``.
        values: tensors that it made, detached. Private.
        rows: for each of them the dimension that is the records', or None.
        in_place: whether it wrote into its first argument.
        module: the wrapped model of a ``CALL`` or ``LOOK``.
        inputs: of those two, the tensors that the tape knows, in the order of their ``Ref``.
        bags: of a ``LEAF``, "flat" where its values are the ids of bags and their lengths;
            "offsets" or "ends", where they are lengths alone; else empty.
        tracks: whether gradients were tracked when it was called; it is called again alike.
        flows: whether a gradient goes through it to its arguments.
    """

    what: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: tuple[Tensor, ...]
    rows: tuple[int | None, ...]
    in_place: bool = False
    module: Any = None
    inputs: tuple[Tensor, ...] = ()
    bags: str = ""
    tracks: bool = True
    flows: bool = True


def mapped(value: Any, kinds: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """``function`` of every leaf of one of the kinds in nested mappings, lists, tuples, slices,
    dataclasses.
    """
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, Mapping):
        inside = {k: mapped(v, kinds, function) for k, v in value.items()}
        if type(value) is dict:
            return inside
        for make in (lambda: type(value)(**inside), lambda: type(value)(inside)):  # type: ignore[call-arg]
            with contextlib.suppress(TypeError, ValueError):
                return make()
        return inside
    if isinstance(value, tuple) and hasattr(value, "n_fields"):  # of torch.return_types
        return type(value)([mapped(v, kinds, function) for v in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, kinds, function) for v in value))
    if isinstance(value, tuple):  # torch.Size holds whole numbers alone
        return tuple(mapped(v, kinds, function) for v in value)
    if isinstance(value, list):
        return [mapped(v, kinds, function) for v in value]
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return slice(*(mapped(v, kinds, function) for v in ends))
    if not leaves(list(fields_of(value).values()), kinds):
        return value  # whatever else is a dataclass stays the one it is
    return map_fields(value, lambda field: mapped(field, kinds, function))


def int_of(x: float) -> float:
    """The whole number at ``x``; numbers that are none stand for themselves."""
    return float(round(x)) if math.isfinite(x) else x


def leaves(value: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Leaves of the kinds, in the order of ``mapped``."""
    found: list[Any] = []
    mapped(value, kinds, found.append)
    return found
