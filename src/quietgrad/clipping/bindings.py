"""Which losses are one and the same, and the bound clippers of a run: each (model, loss) pair is
guarded once.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field

from torch import nn

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.soundness.refusals import refuse_calling_loop
from quietgrad.tensors import Batch


@dataclass
class Bindings:
    """The bound clippers of a run, one a (model, loss) pair, so that each pair is guarded once and
    not at every step.

    Attributes:
        clipper: what is bound. Put another in its place where only its clipping norm is another:
            bound clippers follow, and what is known of their models stays.
        most: pairs kept at hand; an older one is bound and guarded anew when it comes back.
    """

    clipper: Clipper
    most: int = 8
    _bound: list[BoundClipper] = field(default_factory=list)

    def of(self, model: nn.Module, per_example_loss: PerExampleLoss) -> BoundClipper:
        """The pair's bound clipper.

        Raises:
            ValueError: where a new pair's training loop has what cannot step on releases.
        """
        for i, known in enumerate(self._bound):
            if known.model is model and same_function(known.per_example_loss, per_example_loss):
                self._bound.append(self._bound.pop(i))
                known.per_example_loss, known.clipper = per_example_loss, self.clipper
                return known
        refuse_calling_loop(model)
        self._bound = [*self._bound[1 - self.most :], self.clipper.bind(model, per_example_loss)]
        return self._bound[-1]

    def check(
        self, model: nn.Module, per_example_loss: PerExampleLoss, public_batch: Batch
    ) -> None:
        """``BoundClipper.check``, before there is a run: what is known then, the run is given."""
        self.of(model, per_example_loss).check(public_batch)


def same_function(one: object, other: object) -> bool:
    """Whether two losses are one function: the same object, or the same code over the same
    defaults, globals and closed-over objects.

    A lambda written inside a training loop is a new object at every step; if all that it can read
    is the same (by identity, not by value), calling it is calling the one before. Anything else
    counts as another loss.
    """
    if one is other:
        return True
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
            return False
        if vars(one) or vars(other):  # attributes are read by the code, and may differ
            return False
        if (one.__kwdefaults__ or {}).keys() != (other.__kwdefaults__ or {}).keys():
            return False
        ones, others = _read_by(one), _read_by(other)
        return len(ones) == len(others) and all(a is b for a, b in zip(ones, others, strict=True))
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__self__ is other.__self__ and same_function(one.__func__, other.__func__)
    if type(one) is functools.partial and type(other) is functools.partial:
        return (
            same_function(one.func, other.func)
            and len(one.args) == len(other.args)
            and all(a is b for a, b in zip(one.args, other.args, strict=True))
            and one.keywords.keys() == other.keywords.keys()
            and all(value is other.keywords[key] for key, value in one.keywords.items())
        )
    return False


_EMPTY = object()


def _read_by(function: types.FunctionType) -> list[object]:
    """Defaults and contents of closure cells."""
    cells: list[object] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled yet
            cells.append(_EMPTY)
    keywords = function.__kwdefaults__ or {}
    return [*(function.__defaults__ or ()), *(keywords[key] for key in sorted(keywords)), *cells]
