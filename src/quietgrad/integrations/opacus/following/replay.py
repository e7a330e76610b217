"""The loss of every record on its own, from what the loop was seen to do (``tracing``).

The model takes all records together; whatever the loop computes before and after it is computed
again for one record at a time, as if the batch held nothing else. So no mean, sum or statistic of
the loop's own can let one record's contribution depend on another. What the model does inside is
the guard's to examine, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.integrations.opacus.following.nodes import CALL, LEAF, LOOK, Const, Node, Ref, leaves
from quietgrad.integrations.opacus.following.steps import Step
from quietgrad.integrations.opacus.following.tracing import Tape
from quietgrad.integrations.opacus.following.values import (
    AVERAGED,
    WHOLE,
    Batched,
    Flat,
    Numbers,
    Offsets,
    Records,
    Value,
    rows_of,
)
from quietgrad.integrations.opacus.following.weights import reachable
from quietgrad.loading.bags import Bags


def _bags_of(kind: str, place: int, records: Records) -> Value:
    """What entered at a node as flat ids or as offsets, of the records that are asked for."""
    if kind == "flat":
        return Flat(Bags(records[f"{place}.0"], records[f"{place}.1"]))
    return Offsets(records[f"{place}.0"], kind == "ends")


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
        below = set().union(*(reachable(self.tape.nodes, ref) for ref in self.losses))
        self.used = below
        self.nodes = sorted({ref.node for ref in below})

    @property
    def signature(self) -> tuple[Any, ...]:
        """Which functions are called in which order: the same for the same loop, whatever the
        records.
        """
        nodes = [(place, self.tape.nodes[place]) for place in self.nodes]
        begin = {place: i for i, (place, _) in enumerate(nodes)}
        called = [
            (
                id(n.module) if n.what == CALL else n.what,
                n.tracks,
                tuple((begin[r.node], r.leaf) for r in leaves((n.args, n.kwargs), Ref)),
            )
            for _, n in nodes
        ]
        return (*called, len(self.losses), self.alone)

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
            if node.what in (LEAF, LOOK):
                for i, (t, rows) in enumerate(zip(node.values, node.rows, strict=True)):
                    if rows is not None:
                        found[f"{place}.{i}"] = t.movedim(rows, 0)
            for i, const in enumerate(leaves((node.args, node.kwargs), Const)):
                if self._is_rows(node, const):
                    found[f"{place}:{i}"] = const.tensor.movedim(const.rows, 0)
        return found

    def by_place(self) -> bool:
        """Whether records are given rows of the loop's own by their places in the batch."""
        nodes = [self.tape.nodes[place] for place in self.nodes]
        return any(
            const.by_place and self._is_rows(node, const)
            for node in nodes
            for const in leaves((node.args, node.kwargs), Const)
        )

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
            step = Step(self.tape, self._is_rows, place, node, records, values, count)
            made: list[Value]
            if node.bags:
                made = [_bags_of(node.bags, place, records)]
            elif node.what in (LEAF, LOOK):
                if node.what == LOOK and seen:
                    step.require_inputs()
                # What is not one row a record has no rows: it cannot be used.
                made = [
                    [] if d is None else Batched(records[f"{place}.{i}"].movedim(0, d), d)
                    for i, d in enumerate(node.rows)
                ]
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
                with torch.set_grad_enabled(node.tracks and torch.is_grad_enabled()):
                    made = step.fast() or step.one_by_one(node.what)
            values.update((Ref(place, i), value) for i, value in enumerate(made))
        total: Tensor | None = None
        for ref in self.losses:
            value = values[ref]
            if isinstance(value, Batched | Flat | Offsets):
                value = rows_of(value)
            one = (
                value.tensor
                if isinstance(value, Numbers)
                else torch.stack([r.reshape(()) for r in value])
            )
            total = one if total is None else total + one
        assert total is not None
        return total.reshape(count)
