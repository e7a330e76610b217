"""One call of a loop, made again: for all records together where that is the same, else for each
as if the batch held nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.integrations.opacus.following.nodes import Const, Node, Ref, leaves, mapped
from quietgrad.integrations.opacus.following.tracing import Tape
from quietgrad.integrations.opacus.following.values import (
    ARITHMETIC,
    AVERAGED,
    CASTS,
    SHAPES,
    SQUEEZES,
    Batched,
    Flat,
    NotAlone,
    Numbers,
    Offsets,
    Records,
    Rows,
    Value,
    rows_of,
)


@dataclass
class Step:
    """One node of a tape at work.

    Attributes:
        tape: its tape.
        is_rows: whether a tensor from elsewhere is one row a record.
        place: of the node on the tape.
        node: what is called.
        records: rows of what is one row a record. Private.
        values: what nodes before it made. Private.
        count: records that are looked at.
    """

    tape: Tape
    is_rows: Callable[[Node, Const], bool]
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
            if not self.is_rows(node, leaf):
                return leaf.tensor
            rows = self.records[f"{self.place}:{i}"]
            return of(Batched(rows.movedim(0, leaf.rows), leaf.rows))

        return mapped(node.args, (Ref, Const), one), mapped(node.kwargs, (Ref, Const), one)

    def together(self, model: nn.Module) -> list[Value]:
        """The model on all records at once."""
        node = self.node
        refs = leaves((node.args, node.kwargs), Ref)
        shapes = {id(self.values[ref]): t.shape for ref, t in zip(refs, node.inputs, strict=True)}

        def whole(value: Value) -> Tensor:
            if not isinstance(value, list):
                return value.tensor
            return self._joined(value, shapes[id(value)])

        args, kwargs = self._arguments(whole)
        found = leaves(model(*args, **kwargs), Tensor)
        return [
            Batched(self._with_its_records(t, given, d), d or 0)
            for t, given, d in zip(found, node.values, node.rows, strict=True)
        ]

    def _with_its_records(self, t: Tensor, given: Tensor, rows: int | None) -> Tensor:
        """An output of one record whose squeeze() took the records' dimension with it."""
        lost = self.count == 1 and rows is not None and t.dim() + 1 == given.dim()
        return t.unsqueeze(rows) if lost and rows is not None else t

    def require_inputs(self) -> None:
        """Raises:
        NotAlone: unless records on their own make up what the model was called on.
        """
        refs = leaves((self.node.args, self.node.kwargs), Ref)
        for ref, given in zip(refs, self.node.inputs, strict=True):
            value = self.values[ref]
            found = self._joined(value, given.shape) if isinstance(value, list) else value.tensor
            same = found.shape == given.shape and torch.allclose(
                found.double(), given.double(), rtol=1e-3, atol=1e-6, equal_nan=True
            )
            if not same:
                raise NotAlone

    def _joined(self, rows: Rows, shape: torch.Size) -> Tensor:
        """Records as the model was given them: along the dimension that was the batch's."""
        one, n = rows[0].shape, self.tape.records
        for dim in range(len(one)):
            if one[dim] == 1 and (*one[:dim], n, *one[dim + 1 :]) == tuple(shape):
                return torch.cat(rows, dim)
        raise NotAlone

    def one_by_one(self, function: Callable[..., Any]) -> list[Value]:
        """A function of the loop's on every record as a batch of one; the model too, where it
        gives one number for all.
        """
        values: list[Any] = []
        args, kwargs = self._arguments(lambda value: _Row(rows_of(value)))
        for i in range(self.count):
            args_i, kwargs_i = mapped((args, kwargs), _Row, operator.methodcaller("of", i))
            if function in SHAPES:
                args_i = self._of_one_record(args_i)
            elif function in SQUEEZES and self._keeps_records(args_i, kwargs_i):
                dims = [d for d in range(1, args_i[0].dim()) if args_i[0].shape[d] == 1]
                args_i = (args_i[0], tuple(dims))
            if self.node.in_place:
                args_i = (args_i[0].clone(), *args_i[1:])
            result = function(*args_i, **kwargs_i)
            values.append(leaves(args_i[0] if self.node.in_place else result, Tensor))
        refs = leaves((self.node.args, self.node.kwargs), Ref)
        given = next((v for ref in refs if isinstance(v := self.values[ref], Flat)), None)
        made: list[Rows] = [list(each) for each in zip(*values, strict=True)]
        return [rows if given is None else given.again(rows) for rows in made]

    def _keeps_records(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether squeeze() left the records' dimension alone: there were several."""
        return len(args) == 1 and not kwargs and self.tape.records > 1

    def _of_one_record(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sizes that name the number of records, for one: the first is a multiple of it, since
        records come first in the tensor.
        """
        n, tensor, sizes = self.tape.records, args[0], args[1:]
        nested = len(sizes) == 1 and isinstance(sizes[0], list | tuple)
        sizes = tuple(sizes[0]) if nested else sizes
        first = sizes[0] if sizes else None
        if isinstance(first, int) and not isinstance(first, bool) and first > 0 and n > 1:
            if first % n == 0:
                sizes = (first // n, *sizes[1:])
            elif not self.tape.batch_first and len(sizes) > 1 and sizes[1] == n:
                sizes = (first, 1, *sizes[2:])
        return (tensor, sizes) if nested else (tensor, *sizes)

    def fast(self) -> list[Value] | None:
        """Usual losses and arithmetic on all records at once, where that is the same."""
        node = self.node
        if node.what in AVERAGED:
            return self._averaged()
        if node.what in CASTS and len(leaves((node.args, node.kwargs), (Ref, Const))) == 1:
            value = self.values.get(node.args[0])
            if isinstance(value, Flat | Offsets):
                return [value.cast(lambda t: node.what(t, *node.args[1:], **node.kwargs))]
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
    """A value that is asked for one record after the other."""

    rows: Rows

    def of(self, i: int) -> Any:
        return self.rows[i]
