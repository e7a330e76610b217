"""The loss of every record on its own, from what the loop was seen to do (``tracing``).

The model takes all records together; whatever the loop computes before and after it is computed
again for one record at a time, as if the batch held nothing else. So no mean, sum or statistic of
the loop's own can let one record's contribution depend on another. What the model does inside is
the guard's to examine, as everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.integrations.opacus.tracing import (
    CALL,
    LEAF,
    Const,
    Node,
    Ref,
    Tape,
    leaves,
    mapped,
    reachable,
)

Records = dict[str, Tensor]


@dataclass(frozen=True)
class Batched:
    """All records in one tensor, along one dimension."""

    tensor: Tensor
    dim: int


@dataclass(frozen=True)
class Numbers:
    """[records] one number each: of every record a tensor without dimensions."""

    tensor: Tensor


Rows = list[Any]  # one tensor a record, each as if of a batch of one
Value = Batched | Numbers | Rows

# Losses that are one number an element, averaged at the end: with default arguments the mean over
# a record's elements is what they are of that record alone.
AVERAGED = {
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}
ARITHMETIC = {
    getattr(kind, name)
    for kind in (Tensor, torch)
    for name in ("add", "sub", "mul", "div", "neg", "__add__", "__radd__", "__sub__", "__mul__")
    + ("__rmul__", "__rsub__", "__truediv__", "__neg__")
    if hasattr(kind, name)
} | {operator.add, operator.mul}
SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand}
SQUEEZES = {Tensor.squeeze, torch.squeeze}
# Of each number on its own, whatever stands beside it.
CASTS = {
    Tensor.to,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.long,
    Tensor.int,
    Tensor.type,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.detach,
}
WHOLE = {"weight", "pos_weight"}  # of losses: one number a class, however many records there are


@dataclass
class Program:
    """The losses that ``backward`` was called on since the last step, for one model.

    Attributes:
        tape: of the micro-batch.
        losses: their places.
        rows_are_constant: whether tensors from elsewhere that are as long as the batch are taken
            whole all the same.
    """

    tape: Tape
    losses: tuple[Ref, ...]
    rows_are_constant: bool = False

    def __post_init__(self) -> None:
        below = set().union(*(reachable(self.tape, ref) for ref in self.losses))
        self.used = below
        self.nodes = sorted({ref.node for ref in below})

    @property
    def signature(self) -> tuple[Any, ...]:
        """Which functions are called in which order: the same for the same loop, whatever the
        records.
        """
        nodes = [(place, self.tape.nodes[place]) for place in self.nodes]
        begin = {place: i for i, (place, _) in enumerate(nodes)}
        return tuple(
            (
                id(n.module) if n.what == CALL else n.what,
                tuple((begin[r.node], r.leaf) for r in leaves((n.args, n.kwargs), Ref)),
            )
            for _, n in nodes
        ) + (len(self.losses), self.alone)

    @property
    def alone(self) -> bool:
        """Whether the model gives something of all records together that the loss is made of (a
        loss of its own): then it takes one record at a time.
        """
        return any(
            self.tape.nodes[ref.node].what == CALL
            and self.tape.nodes[ref.node].rows[ref.leaf] is None
            for ref in self.used
        )

    def records(self) -> Records:
        """All that is one row a record, first dimension first. Private."""
        found: Records = {}
        for place in self.nodes:
            node = self.tape.nodes[place]
            if node.what == LEAF:
                assert node.rows[0] is not None
                found[str(place)] = node.values[0].movedim(node.rows[0], 0)
            for i, const in enumerate(leaves((node.args, node.kwargs), Const)):
                if self._is_rows(node, const):
                    found[f"{place}:{i}"] = const.tensor.movedim(const.rows, 0)
        return found

    def _is_rows(self, node: Node, const: Const) -> bool:
        if const.rows is None or (self.rows_are_constant and node.what != CALL):
            return False
        whole = [node.kwargs.get(name) for name in WHOLE] if node.what in AVERAGED else []
        return not any(const is w for w in whole)

    def losses_of(self, model: nn.Module, records: Records, seen: bool = False) -> Tensor:
        """[records] losses.

        Args:
            model: the private model.
            records: as ``records`` gave them, or some of their rows.
            seen: take the outputs that the model gave the loop, instead of running it again.

        Raises:
            NotAlone: with ``seen``, where the model would be given something else than it was.
        """
        count = len(next(iter(records.values())))
        values: dict[Ref, Value] = {}
        for place in self.nodes:
            node = self.tape.nodes[place]
            step = _Step(self, place, node, records, values, count)
            if node.what == LEAF:
                assert node.rows[0] is not None
                made = [Batched(records[str(place)].movedim(0, node.rows[0]), node.rows[0])]
            elif node.what == CALL and seen:
                step.require_inputs()
                if self.alone:
                    return records[next(iter(records))].new_zeros(count)
                made = [Batched(t, d or 0) for t, d in zip(node.values, node.rows, strict=True)]
            elif node.what == CALL and self.alone:
                made = step.one_by_one(model)
            elif node.what == CALL:
                made = step.together(model)
            else:
                made = step.fast() or step.one_by_one(node.what)
            values.update((Ref(place, i), value) for i, value in enumerate(made))
        total: Tensor | None = None
        for ref in self.losses:
            value = values[ref]
            if isinstance(value, Batched):
                value = rows_of(value)
            one = (
                value.tensor
                if isinstance(value, Numbers)
                else torch.stack([r.reshape(()) for r in value])
            )
            total = one if total is None else total + one
        assert total is not None
        return total.reshape(count)


class NotAlone(ValueError):
    """What the loop does before it calls the model makes records depend on each other."""


def rows_of(value: Value) -> Rows:
    """One tensor a record."""
    if isinstance(value, Batched):
        return list(value.tensor.split(1, value.dim))
    return list(value.tensor.unbind(0)) if isinstance(value, Numbers) else value


@dataclass
class _Step:
    """One node at work."""

    program: Program
    place: int
    node: Node
    records: Records
    values: dict[Ref, Value]
    count: int

    def _arguments(self, of: Callable[[Value], Any]) -> tuple[Any, Any]:
        node, consts = self.node, iter(range(10**9))

        def one(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return of(self.values[leaf])
            i = next(consts)
            if not self.program._is_rows(node, leaf):
                return leaf.tensor
            rows = self.records[f"{self.place}:{i}"]
            return of(Batched(rows.movedim(0, leaf.rows), leaf.rows))

        return mapped(node.args, (Ref, Const), one), mapped(node.kwargs, (Ref, Const), one)

    def together(self, model: nn.Module) -> list[Value]:
        """The model on all records at once."""
        node = self.node
        dims = iter(self._input_dims())

        def whole(value: Value) -> Tensor:
            dim = next(dims)
            if isinstance(value, Batched):
                return value.tensor
            if isinstance(value, Numbers):
                return value.tensor
            return torch.cat(value, dim)

        args, kwargs = self._arguments(whole)
        found = leaves(model(*args, **kwargs), Tensor)
        return [Batched(t, d or 0) for t, d in zip(found, node.rows, strict=True)]

    def require_inputs(self) -> None:
        """Raises:
        NotAlone: unless records on their own make up what the model was called on.
        """
        refs = leaves((self.node.args, self.node.kwargs), Ref)
        for ref, given in zip(refs, self.node.inputs, strict=True):
            value = self.values[ref]
            dim = self.program.tape.nodes[ref.node].rows[ref.leaf] or 0
            found = value.tensor if not isinstance(value, list) else torch.cat(value, dim)
            same = found.shape == given.shape and torch.allclose(
                found.double(), given.double(), rtol=1e-3, atol=1e-6, equal_nan=True
            )
            if not same:
                raise NotAlone

    def _input_dims(self) -> list[int]:
        found = []
        for leaf in leaves((self.node.args, self.node.kwargs), (Ref, Const)):
            if isinstance(leaf, Ref):
                found.append(self.program.tape.nodes[leaf.node].rows[leaf.leaf] or 0)
            elif self.program._is_rows(self.node, leaf):
                found.append(leaf.rows or 0)
        return found

    def one_by_one(self, function: Callable[..., Any]) -> list[Value]:
        """A function of the loop's on every record as a batch of one; the model too, where it
        gives one number for all.
        """
        values: list[Any] = []
        args, kwargs = self._arguments(lambda value: _Row(rows_of(value)))
        for i in range(self.count):
            of_one = mapped((args, kwargs), _Row, lambda row, i=i: row.rows[i])
            args_i, kwargs_i = of_one
            if function in SHAPES:
                args_i = self._of_one_record(args_i)
            elif function in SQUEEZES and self._keeps_records(args_i, kwargs_i):
                dims = [d for d in range(1, args_i[0].dim()) if args_i[0].shape[d] == 1]
                args_i = (args_i[0], tuple(dims))
            if self.node.in_place:
                args_i = (args_i[0].clone(), *args_i[1:])
            result = function(*args_i, **kwargs_i)
            values.append(leaves(args_i[0] if self.node.in_place else result, Tensor))
        return [list(each) for each in zip(*values, strict=True)]

    def _keeps_records(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether squeeze() left the records' dimension alone: there were several."""
        return len(args) == 1 and not kwargs and self.program.tape.records > 1

    def _of_one_record(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sizes that name the number of records, for one: the first is a multiple of it, since
        records come first in the tensor.
        """
        n, tensor, sizes = self.program.tape.records, args[0], args[1:]
        nested = len(sizes) == 1 and isinstance(sizes[0], list | tuple)
        sizes = tuple(sizes[0]) if nested else sizes
        first = sizes[0] if sizes else None
        if isinstance(first, int) and not isinstance(first, bool) and first > 0 and n > 1:
            if first % n == 0:
                sizes = (first // n, *sizes[1:])
            elif not self.program.tape.batch_first and len(sizes) > 1 and sizes[1] == n:
                sizes = (first, 1, *sizes[2:])
        return (tensor, sizes) if nested else (tensor, *sizes)

    def fast(self) -> list[Value] | None:
        """Usual losses and arithmetic on all records at once, where that is the same."""
        node = self.node
        if node.what in AVERAGED:
            return self._averaged()
        if node.what in CASTS and len(leaves((node.args, node.kwargs), (Ref, Const))) == 1:
            value = self.values.get(node.args[0])
            if isinstance(value, Batched):
                return [Batched(node.what(value.tensor, *node.args[1:], **node.kwargs), value.dim)]
        if node.what not in ARITHMETIC or node.kwargs:
            return None
        if not all(isinstance(a, int | float | Ref) for a in node.args):
            return None
        inputs = [self.values[a] for a in node.args if isinstance(a, Ref)]
        if not all(isinstance(value, Numbers) for value in inputs):
            return None
        args, _ = self._arguments(lambda value: value.tensor)  # type: ignore[union-attr]
        return [Numbers(node.what(*args))]

    def _averaged(self) -> list[Value] | None:
        node = self.node
        kwargs = {k: v for k, v in node.kwargs.items() if v is not None}
        plain = {"ignore_index": -100, "label_smoothing": 0.0, "beta": 1.0, "delta": 1.0}
        reduction = kwargs.pop("reduction", "mean")
        if len(node.args) > 2 or any(plain.get(k) != v for k, v in kwargs.items()):
            return None
        if reduction not in ("mean", "sum"):
            return None
        values: list[Any] = []
        consts = iter(range(2))
        for a in node.args:
            if isinstance(a, Ref):
                values.append(self.values[a])
            elif isinstance(a, Const):
                rows = self.records.get(f"{self.place}:{next(consts)}")
                values.append(None if rows is None else Batched(rows, a.rows or 0))
        if len(values) != 2 or not all(isinstance(v, Batched) and v.dim == 0 for v in values):
            return None
        first, second = (v.tensor for v in values)
        if node.what in (F.cross_entropy, F.nll_loss):
            if not second.is_floating_point() and bool((second == -100).any()):
                return None
        elif first.shape != second.shape:
            return None
        each = node.what(first, second, reduction="none").reshape(self.count, -1)
        return [Numbers(each.mean(dim=1) if reduction == "mean" else each.sum(dim=1))]


@dataclass(frozen=True)
class _Row:
    rows: Rows
