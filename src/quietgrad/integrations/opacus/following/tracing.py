"""What a loop does with a micro-batch, written down while it runs.

Records of the loader and outputs of the private model are ``Traced``: tensors that behave as any
other and note on the micro-batch's ``Tape`` which function made which tensor of which. From the
note the loss is computed again for every record on its own (``replay``): what one record
contributes is a function of that record by construction.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CALL = "call"
LEAF = "leaf"


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
        is_of_before: whether it was made of records of an earlier micro-batch.
    """

    tensor: Tensor
    rows: int | None
    is_of_before: bool = False


@dataclass(frozen=True, eq=False)
class Node:
    """A function that was called, or where records entered.

    Attributes:
        what: the function; ``CALL`` for the private model, ``LEAF`` for records.
        args, kwargs: its arguments, tensors replaced by ``Ref`` and ``Const``.
        values: tensors that it made, detached. Private.
        rows: for each of them the dimension that is the records', or None.
        in_place: whether it wrote into its first argument.
        module: the wrapped model of a ``CALL``.
        inputs: of a ``CALL``, the tensors that the tape knows, in the order of their ``Ref``.
    """

    what: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: tuple[Tensor, ...]
    rows: tuple[int | None, ...]
    in_place: bool = False
    module: Any = None
    inputs: tuple[Tensor, ...] = ()


def mapped(value: Any, kinds: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """``function`` of every leaf of one of the kinds in nested mappings, lists, tuples, slices."""
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
    return value


def int_of(x: float) -> float:
    """The whole number at ``x``; numbers that are none stand for themselves."""
    return float(round(x)) if math.isfinite(x) else x


def leaves(value: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Leaves of the kinds, in the order of ``mapped``."""
    found: list[Any] = []
    mapped(value, kinds, found.append)
    return found


class Tape:
    """One micro-batch: how many records it holds, and what was made of them. Private.

    Attributes:
        records: how many.
        batch_first: whether records come first in tensors of two dimensions and more.
        nodes: what was called, in order; empty once the micro-batch is over.
        read: fractions that the loop read off its tensors as numbers.
    """

    def __init__(self, records: int, batch_first: bool = True) -> None:
        self.records = records
        self.batch_first = batch_first
        self.nodes: list[Node] = []
        self.read: set[float] = set()
        self.is_open = True

    def close(self) -> None:
        """Lets go of everything. Tensors that the loop keeps are known as an earlier batch's."""
        self.is_open = False
        self.nodes = []

    def rows_dim(self, t: Tensor) -> int | None:
        """The dimension of a tensor that is as long as there are records."""
        places = (0, 1) if self.batch_first or t.dim() < 2 else (1, 0)
        return next((d for d in places if d < t.dim() and t.shape[d] == self.records), None)

    def enter(self, records: Any) -> Any:
        """Records as the loop is to see them."""
        return mapped(records, Tensor, lambda t: self._made(LEAF, (), {}, t))

    def note(self, what: Any, args: Any, kwargs: Any, result: Any, module: Any = None) -> Any:
        """The result of a call, traced."""
        found = leaves(result, Tensor)
        first = args[0] if args else None
        in_place = isinstance(first, Traced) and _is_in_place(what)
        if not found and not in_place:
            self.read.update(x for x in leaves(result, float) if x != int_of(x))
            return result
        given = leaves((args, kwargs), Traced) if what == CALL else []
        inputs = tuple(t.plain.detach() for t in given if t.tape is self)
        args, kwargs = self._noted(args), self._noted(kwargs)
        if in_place:
            assert isinstance(first, Traced)
            self._made(what, args, kwargs, first.plain, in_place=True, again=first)
            return first if found else result
        return self._made(what, args, kwargs, result, module=module, inputs=inputs)

    def _noted(self, value: Any) -> Any:
        def one(t: Tensor) -> Ref | Const | Tensor:
            if isinstance(t, Traced) and t.tape is self:
                return t.ref
            plain = plain_of(t)
            if isinstance(plain, nn.Parameter):
                return Const(plain, None)
            return Const(plain.detach(), self.rows_dim(plain), isinstance(t, Traced))

        return mapped(value, Tensor, one)

    def _made(
        self,
        what: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        in_place: bool = False,
        module: Any = None,
        again: Traced | None = None,
        inputs: tuple[Tensor, ...] = (),
    ) -> Any:
        tensors = leaves(result, Tensor)
        kept = tuple(t.detach() for t in tensors) if what in (CALL, LEAF) else ()
        rows = tuple(self.rows_dim(t) for t in tensors)
        self.nodes.append(Node(what, args, kwargs, kept, rows, in_place, module, inputs))
        place = len(self.nodes) - 1
        if again is not None:
            again.ref = Ref(place, 0)
            return again
        numbers = iter(range(len(tensors)))
        return mapped(result, Tensor, lambda t: Traced.of(t, self, Ref(place, next(numbers))))


class Traced(Tensor):
    """A tensor that notes what is made of it; for all else it is the tensor that it stands for."""

    plain: Tensor
    tape: Tape
    ref: Ref

    @staticmethod
    def of(t: Tensor, tape: Tape, ref: Ref) -> Traced:
        """``t``, traced."""
        traced: Traced = t.detach().as_subclass(Traced)
        traced.plain, traced.tape, traced.ref = t, tape, ref
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.backward and isinstance(args[0], Traced):
            return _backward(*args, **kwargs)
        traced = [t for t in leaves((args, kwargs), Tensor) if isinstance(t, Traced)]
        with torch._C.DisableTorchFunctionSubclass():
            plain_args = mapped(args, Tensor, plain_of)
            result = func(*plain_args, **mapped(kwargs, Tensor, plain_of))
        tape = next((t.tape for t in traced if hasattr(t, "tape") and t.tape.is_open), None)
        if func in _NOT_NOTED:
            return result
        if tape is None:  # what is made of records of before stays known as such
            old = next((t.tape for t in traced if hasattr(t, "tape")), None)
            if old is None:
                return result
            return mapped(result, Tensor, lambda t: Traced.of(t, old, Ref(0, 0)))
        return tape.note(func, args, kwargs, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_of(self).detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return plain_of(self).detach().clone()


# What is asked of a tensor's place in autograd's graph, and not of its numbers.
_NOT_NOTED = {
    vars(torch._C.TensorBase)["grad"].__get__,
    Tensor.retain_grad,
    Tensor.register_hook,
    torch.autograd.grad,
}


def plain_of(t: Any) -> Any:
    """The tensor that a traced one stands for; any other as it is."""
    return getattr(t, "plain", t) if isinstance(t, Traced) else t


def _is_in_place(what: Any) -> bool:
    name = getattr(what, "__name__", "")
    if name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE):
        return True
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


_IN_PLACE = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "div", "pow", "mod", "and", "or")
}


def _backward(
    loss: Traced,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    plain, tape = loss.plain, loss.tape
    if tape.is_open:
        modules = modules_below(tape, loss.ref)
        if modules and (gradient is not None or inputs is not None or plain.dim()):
            raise ValueError(
                "backward() was called with gradient= or inputs=, or on more than one number; call "
                "loss.backward() on the mean (or sum) of the records' losses"
            )
        for module in modules:
            module.note_backward(tape, loss.ref, plain.detach())
    plain.backward(gradient, retain_graph, create_graph, inputs)


def reachable(tape: Tape, ref: Ref) -> set[Ref]:
    """All that a tensor was made of, itself too."""
    found: set[Ref] = set()
    open_ends = [ref]
    while open_ends:
        one = open_ends.pop()
        if one not in found:
            found.add(one)
            node = tape.nodes[one.node]
            open_ends += leaves((node.args, node.kwargs), Ref)
    return found


def modules_below(tape: Tape, ref: Ref) -> list[Any]:
    """Wrapped models whose outputs a tensor was made of, each once."""
    nodes = (tape.nodes[one.node] for one in reachable(tape, ref))
    return list({id(n.module): n.module for n in nodes if n.what == CALL}.values())
