"""Numbers that a loop puts into its loss: a schedule's are fine, those that it read off the batch
are not. A number that comes from records, or from how many there are, would scale every record's
gradient by what the others are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from quietgrad.integrations.opacus.following.draws import has_equal_rows
from quietgrad.integrations.opacus.following.nodes import CALL, LEAF, LOOK, Const, leaves
from quietgrad.integrations.opacus.following.replay import Program

_SIGNS = ["add", "sub", "mul", "div", "truediv", "pow", "divide", "multiply", "true_divide"]
_NAMES = {f"{prefix}{name}" for name in _SIGNS for prefix in ("", "r", "i")}
SMALL = 4096  # numbers of a tensor that are compared
REMEMBERED = 1 << 16  # numbers that were read off earlier batches
AT_HAND = 64  # loop bodies and numbers of records that are remembered

Values = tuple[float, ...]


@dataclass
class Constants:
    """What numbers a loop's body had before, to tell those that follow the records.

    A few releases may be made before it is known: with a single batch a number of records is a
    number like any other.
    """

    after_reading: dict[Any, tuple[Any, list[Values]]] = field(default_factory=dict)
    by_number: dict[Any, dict[int, _ByNumber]] = field(default_factory=dict)
    read: set[float] = field(default_factory=set)  # of earlier batches

    def remember(self, read: set[float]) -> None:
        """Numbers that were read off a batch may be in no later loss."""
        if len(self.read) < REMEMBERED:
            self.read |= {x for x in read if not _is_round(x)}

    def require(self, program: Program, slot: int = 0) -> None:
        """Refuses numbers that were read off the batch. Those of tensors count too.

        Args:
            program: of the step.
            slot: which step on the batch it is.

        Raises:
            ValueError: with the remedy.
        """
        tape = program.tape
        placed = [(place, v) for place in program.nodes for v in _values(tape.nodes[place])]
        found = [v for _, v in placed]
        late = [v for place, v in placed if tape.read_at is not None and place >= tape.read_at]
        if any(number in tape.read for values in late for number in values):
            raise _read_off("a number that was read off the batch's tensors (item(), float())")
        self._require_nothing_copied(program)
        same = [v for place in program.nodes for v in _of_equal_rows(tape.nodes[place])]
        if tape.read_at is not None and any(v in tape.read for values in same for v in values):
            raise _read_off("a number that was read off the batch's tensors (item(), float())")
        if any(v in self.read for values in found + same for v in values):
            raise _read_off("a number that was read off an earlier batch's tensors")
        rows = self.by_number.setdefault((program.signature, "rows", len(same)), {})
        for i, values in enumerate(same):
            if rows.setdefault(i, _ByNumber()).is_followed(tape.records, values):
                raise _read_off("the number of records, or a number that follows it")
        if len(self.by_number) > AT_HAND:
            self.by_number = {}
        bodies = self.by_number.setdefault((program.signature, len(found)), {})
        for i, values in enumerate(found):
            if bodies.setdefault(i, _ByNumber()).is_followed(tape.records, values):
                raise _read_off("the number of records, or a number that follows it")
        if tape.read_at is not None:
            self._require_unmoved(program, slot, late)

    def require_settings(self, tape: Any, *settings: Any) -> None:
        """Refuses noise multipliers and clipping norms that were read off a batch: the noise that
        is released, and the history, tell what they are.

        Args:
            tape: of the open batch.
            settings: of its release.

        Raises:
            ValueError: with the remedy.
        """
        read = self.read | {x for x in tape.read if not _is_round(x)}
        if any(_as_number(setting) in read for setting in settings):
            raise ValueError(
                "noise_multiplier or max_grad_norm is a number that was read off private records "
                "(item(), float()), and what is released tells it; set both by a rule that looks "
                "at the epoch, or at public records, alone"
            )

    def _require_unmoved(self, program: Program, slot: int, late: list[Values]) -> None:
        """What was done after values were read off may have looked at them: it has to be the same
        as on earlier batches.
        """
        read_at = program.tape.read_at
        assert read_at is not None
        nodes = (program.tape.nodes[place] for place in program.nodes if place >= read_at)
        now = [n.what for n in nodes]
        if not now:
            return
        then, earlier = self.after_reading.setdefault(slot, (now, late))
        if then != now or earlier != late:
            raise _read_off(
                "a number, or by a choice, that changed after values of the batch had been read "
                "(item(), numpy(), if): read them after backward(), set schedules before; else it"
            )

    def _require_nothing_copied(self, program: Program) -> None:
        """Raises:
        ValueError: where rows were made outside of torch out of copied ones.
        """
        since = program.tape.copied_at
        if since is None:
            return
        for place in program.nodes:
            node = program.tape.nodes[place]
            for const in leaves((node.args, node.kwargs), Const):
                if place < since or const.rows is None or not const.tensor.numel():
                    continue
                rows = const.tensor.movedim(const.rows, 0)
                if not bool((rows == rows[:1]).all()):
                    raise ValueError(
                        "the loss is made of rows that came from outside of torch after the "
                        "batch's tensors had been copied there (numpy(), tolist(), a pickle), so "
                        "one record's row may be made of others'; use torch's functions on the "
                        "tensors, change records in the data set, or copy after backward()"
                    )


@dataclass
class _ByNumber:
    """Whether a constant goes with the number of records: three of them with values in proportion,
    or values that came back, thrice, when the number did. A schedule's do neither.
    """

    values: dict[int, Values] = field(default_factory=dict)
    last: Values = ()
    returns: int = 0
    conflict: bool = False

    def is_followed(self, n: int, found: Values) -> bool:
        if self.conflict:
            return False
        if n in self.values:
            self.conflict = self.values[n] != found
            self.returns += found != self.last
        self.values[n], self.last = found, found
        if self.conflict or len(set(self.values.values())) < 2:
            return False
        return self.returns >= 3 or (len(self.values) >= 3 and self._in_proportion())

    def _in_proportion(self) -> bool:
        (n, first), *others = self.values.items()
        return any(
            all(
                len(v) == len(first)
                and all(math.isclose(a * m**power, b * n**power) for a, b in zip(first, v))
                for m, v in others
            )
            for power in (1, -1)
        )


def _values(node: Any) -> list[Values]:
    """Numbers, and tensors that are not one row a record."""
    found: list[Values] = []
    if _is_arithmetic(node):
        numbers = leaves((node.args, node.kwargs), (int, float))
        found += [(float(x),) for x in numbers if not isinstance(x, bool)]
    if node.what in (CALL, LEAF, LOOK):
        return found
    for const in leaves((node.args, node.kwargs), Const):
        t = const.tensor
        if const.rows is None and t.numel() <= SMALL and not t.is_complex() and not t.is_sparse:
            found.append(tuple(float(x) for x in t.detach().double().flatten().tolist()))
    return found


def _of_equal_rows(node: Any) -> list[Values]:
    """Numbers of tensors that are one row a record, and the same for all."""
    found: list[Values] = []
    for const in leaves((node.args, node.kwargs), Const):
        t = const.tensor
        if const.rows is None or t.is_complex() or t.shape[const.rows] < 2:
            continue
        row = t.select(const.rows, 0)
        if 0 < row.numel() <= SMALL and has_equal_rows(t, const.rows):
            found.append(tuple(float(x) for x in row.double().flatten().tolist()))
    return found


def _as_number(setting: Any) -> float:
    """Also of a tensor or a word; what is none is judged elsewhere."""
    try:
        return float(setting)
    except (TypeError, ValueError):
        return math.nan


def _is_round(x: float) -> bool:
    """A number that a script may have of its own: one of few binary or decimal places."""
    return x == round(x, 4) or float(x * 4096).is_integer() or not math.isfinite(x)


def _is_arithmetic(node: Any) -> bool:
    return getattr(node.what, "__name__", "").strip("_") in _NAMES


def _read_off(what: str) -> ValueError:
    return ValueError(
        f"the loss is scaled by {what}, so one record's gradient depends on the others; average "
        "the losses of the records with .mean() (or loss_reduction='sum'), and keep numbers of "
        "the batch out of the loss"
    )
