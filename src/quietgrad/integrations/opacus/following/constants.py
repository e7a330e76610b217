"""Numbers that a loop puts into its loss: a schedule's are fine, those that it read off the batch
are not. A number that comes from records, or from how many there are, would scale every record's
gradient by what the others are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from quietgrad.integrations.opacus.following.replay import Program
from quietgrad.integrations.opacus.following.tracing import leaves

_SIGNS = ["add", "sub", "mul", "div", "truediv", "pow", "divide", "multiply", "true_divide"]
_NAMES = {f"{prefix}{name}" for name in _SIGNS for prefix in ("", "r", "i")}


@dataclass
class Constants:
    """What numbers a loop's body had before, to tell those that follow the number of records.

    One release may be made before it is known: with a single batch a number of records is a number
    like any other.
    """

    before: dict[Any, tuple[int, list[float]]] = field(default_factory=dict)

    def require(self, program: Program) -> None:
        """Refuses numbers that were read off the batch.

        Raises:
            ValueError: with the remedy.
        """
        found = [
            float(number)
            for place in program.nodes
            if _is_arithmetic(node := program.tape.nodes[place])
            for number in leaves((node.args, node.kwargs), (int, float))
            if not isinstance(number, bool)
        ]
        if any(number in program.tape.read for number in found):
            raise _read_off("a number that was read off the batch's tensors (item(), float())")
        n, key = program.tape.records, program.signature
        size, earlier = self.before.get(key, (n, found))
        if size != n and len(earlier) == len(found):
            for old, new in zip(earlier, found, strict=True):
                if old != new and (
                    math.isclose(old * n, new * size) or math.isclose(old * size, new * n)
                ):
                    raise _read_off("the number of records")
        self.before = {**self.before, key: (n, found)} if len(self.before) < 64 else {}


def _is_arithmetic(node: Any) -> bool:
    return getattr(node.what, "__name__", "").strip("_") in _NAMES


def _read_off(what: str) -> ValueError:
    return ValueError(
        f"the loss is scaled by {what}, so one record's gradient depends on the others; average "
        "the losses of the records with .mean() (or loss_reduction='sum'), and keep numbers of "
        "the batch out of the loss"
    )
