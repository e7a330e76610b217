"""What a loop does with a micro-batch, written down while it runs.

Records of the loader and outputs of the private model are ``Traced``: tensors that behave as any
other and note on the micro-batch's ``Tape`` which function made which tensor of which. From the
note the loss is computed again for every record on its own (``replay``): what one record
contributes is a function of that record by construction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.integrations.opacus.collating import BagPlaces
from quietgrad.integrations.opacus.following.draws import Draws, has_equal_rows
from quietgrad.integrations.opacus.following.hollow import (
    OF_SHAPES,
    READS,
    hollow,
    require_filled,
)
from quietgrad.integrations.opacus.following.nodes import (
    CALL,
    LEAF,
    LOOK,
    Const,
    Node,
    Ref,
    int_of,
    leaves,
    mapped,
)
from quietgrad.integrations.opacus.following.weights import modules_below, require_private_weights


class Tape:
    """One micro-batch: how many records it holds, and what was made of them. Private.

    Attributes:
        records: how many.
        batch_first: whether records come first in tensors of two dimensions and more.
        nodes: what was called, in order; empty once the micro-batch is over.
        read: fractions that the loop read off its tensors as numbers.
        numbers: the same, in order.
        read_at: how many nodes there were when values were first read off; None: they never were.
        copied_at: the same, of values of many elements (numpy, tolist, pickles).
    """

    def __init__(self, records: int, batch_first: bool = True) -> None:
        self.records = records
        self.batch_first = batch_first
        self.nodes: list[Node] = []
        self.read: set[float] = set()
        self.numbers: list[float] = []
        self.read_at: int | None = None
        self.copied_at: int | None = None
        self.is_open = True
        self.has_bags = False  # flat ids and offsets, which have no row a record
        self.draws = Draws() if records > 1 else None

    def close(self) -> None:
        """Lets go of everything. Tensors that the loop keeps are known as an earlier batch's."""
        self.is_open = False
        self.nodes, self.numbers = [], []

    def rows_dim(self, t: Tensor, only_its_own: bool = False) -> int | None:
        """The dimension of a tensor that is as long as there are records: the one that records
        stand on, or, unless `only_its_own`, the other (states of a recurrent layer).
        """
        places = [0, 1] if self.batch_first or t.dim() < 2 else [1, 0]
        if only_its_own:  # as many features as there happen to be records are no records
            del places[1]
        return next((d for d in places if d < t.dim() and t.shape[d] == self.records), None)

    def enter(self, records: Any, places: BagPlaces | None = None) -> Any:
        """Records as the loop is to see them.

        Args:
            records: of the micro-batch.
            places: where they are flat ids of bags, and offsets.
        """
        if places is None:
            return mapped(records, Tensor, lambda t: self._made(LEAF, (), {}, t))
        self.has_bags = True
        bags, kinds = places.bags(records), iter(places.kinds(records))
        lengths = next(b.lengths for b in bags if b is not None)
        own = iter(bags)

        def one(t: Tensor) -> Traced:
            kind, bag = next(kinds), next(own)
            if not kind:
                made: Traced = self._made(LEAF, (), {}, t)
                return made
            values = (lengths,) if bag is None else (bag.ids, bag.lengths)
            self.nodes.append(Node(LEAF, (), {}, values, (0,) * len(values), bags=kind))
            return Traced.of(t, self, Ref(len(self.nodes) - 1, 0))

        return mapped(records, Tensor, one)

    def was_read(self, in_bulk: bool) -> None:
        """Values left the tape."""
        self.read_at = len(self.nodes) if self.read_at is None else self.read_at
        if in_bulk and self.copied_at is None:
            self.copied_at = len(self.nodes)

    def note(self, what: Any, args: Any, kwargs: Any, result: Any, module: Any = None) -> Any:
        """The result of a call, traced."""
        found = leaves(result, Tensor)
        first = args[0] if args else None
        in_place = isinstance(first, Traced) and _is_in_place(what)
        if not found and not in_place:
            if getattr(what, "__name__", "") in READS:
                self.was_read(in_bulk=not isinstance(result, int | float | complex | str))
            self.numbers += [x for x in leaves(result, float) if x != int_of(x)]
            self.read.update(self.numbers)
            return result
        if what in OF_SHAPES and len(leaves((args, kwargs), Traced)) == 1:
            return result  # values of its own, as many as there are records
        given = leaves((args, kwargs), Traced) if what in (CALL, LOOK) else []
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
            require_filled(plain)
            learns = plain.is_leaf and plain.requires_grad
            kept = plain.detach().clone()  # the loop may write into its own
            rows = self.rows_dim(plain)
            by_place = self.draws is not None and rows is not None and not self.draws.any()
            by_place = by_place and not has_equal_rows(kept, rows)
            # What was made of earlier records is refused as that.
            passes_on = plain.requires_grad and not plain.is_leaf and not isinstance(t, Traced)
            return Const(kept, rows, isinstance(t, Traced), learns, passes_on, by_place)

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
        kept = tuple(t.detach() for t in tensors) if what in (CALL, LEAF, LOOK) else ()
        if what == LEAF:  # the loop may write into its records, through numpy too
            kept = tuple(t.clone() for t in kept)
        rows = tuple(self.rows_dim(t) for t in tensors)
        tracks = torch.is_grad_enabled() or what in (CALL, LEAF, LOOK)
        flows = what in (CALL, LEAF, LOOK) or any(t.requires_grad for t in tensors)
        self.nodes.append(
            Node(what, args, kwargs, kept, rows, in_place, module, inputs, "", tracks, flows)
        )
        place = len(self.nodes) - 1
        if again is not None:
            again.ref = Ref(place, 0)
            return again
        numbers = iter(range(len(tensors)))
        return mapped(result, Tensor, lambda t: Traced.of(t, self, Ref(place, next(numbers))))


class Traced(Tensor):
    """A tensor that notes what is made of it; for all else it is the tensor that it stands for.
    Its own memory holds no value of that tensor: what looks past torch's functions finds none.
    """

    plain: Tensor
    tape: Tape
    ref: Ref

    @staticmethod
    def of(t: Tensor, tape: Tape, ref: Ref) -> Traced:
        """``t``, traced."""
        traced: Traced = hollow(t).as_subclass(Traced)
        traced.plain, traced.tape, traced.ref = t, tape, ref
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.backward and isinstance(args[0], Traced):
            return _backward(*args, **kwargs)
        if func is torch.autograd.backward:
            raise RuntimeError(
                "torch.autograd.backward() passes the private model by; call loss.backward() on "
                "the sum of the losses"
            )
        given = leaves((args, kwargs), Tensor)
        traced = [t for t in given if isinstance(t, Traced)]
        if _is_in_place(func) and args:
            _make_writable(args[0])
        others = [(t, t._version) for t in given if not isinstance(t, Traced)]
        with torch._C.DisableTorchFunctionSubclass():
            plain_args = mapped(args, Tensor, plain_of)
            result = func(*plain_args, **mapped(kwargs, Tensor, plain_of))
        for t, version in others:
            if t._version != version:
                _taken_over(t)
        tape = next((t.tape for t in traced if hasattr(t, "tape") and t.tape.is_open), None)
        if func in _NOT_NOTED or tape is None:
            # Gradients by records, and what is made of records of before, stay known as such.
            return mapped(result, Tensor, lambda t: Traced.of(plain_of(t), CLOSED, Ref(0, 0)))
        return tape.note(func, args, kwargs, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.tape.is_open:
            self.tape.was_read(in_bulk=True)
        return plain_of(self).detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()


def _make_writable(t: Any) -> None:
    """Outputs of the model are leaves of the loop's graph; torch refuses to write into those.

    Raises:
        RuntimeError: for weights.
    """
    if isinstance(t, nn.Parameter):
        raise RuntimeError(
            "a parameter would be written into from records, without noise; let the optimizer "
            "change parameters, and begin with values that do not look at private records"
        )
    if not isinstance(t, Traced):
        return
    with torch._C.DisableTorchFunctionSubclass():
        if hasattr(t, "plain") and t.plain.is_leaf and t.plain.requires_grad:
            t.plain = t.plain.clone()


CLOSED = Tape(0)
CLOSED.close()


def _taken_over(t: Tensor) -> None:
    """A tensor of the loop's own, which records were written into, is followed from now on."""
    for one in (t, t._base):
        if one is not None and type(one) is Tensor:
            plain = one.detach()
            one.__class__ = Traced
            one.plain, one.tape, one.ref = plain, CLOSED, Ref(0, 0)  # type: ignore[attr-defined]


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
        modules = modules_below(tape.nodes, loss.ref)
        require_private_weights(tape.nodes, loss.ref)
        if modules and (gradient is not None or inputs is not None or plain.dim()):
            raise ValueError(
                "backward() was called with gradient= or inputs=, or on more than one number; call "
                "loss.backward() on the mean (or sum) of the records' losses"
            )
        for module in modules:
            module.note_backward(tape, loss.ref, plain.detach())
    if not plain.requires_grad:
        raise RuntimeError(
            "backward() was called on a loss that nothing learns from: the model's outputs were "
            "made in evaluation mode, under torch.no_grad(), or for an earlier batch; call "
            "model.train() before the loop, and backward() within the batch"
        )
    plain.backward(gradient, retain_graph, create_graph, inputs)
