"""Whether a user's layer rule gives a record the same bits however long its padding is.

A library adds up the positions of a longer text in another order. Of a record whose positions
cancel until rounding alone is left that order is all of the gradient, and the longest text of a
batch would decide it. So a rule is tried on made-up records of that kind: at one length, padded to
others, alone and beside others.

Their inputs are one number on one line of positions and zeros elsewhere, so that norms which a rule
may form are exact in any order. Products are rounded, or are not where a library adds them up at
once (which some processors do by length, too). Positions are followed by records of zeros, so that
none of theirs lies where a library computes the last few entries of a tensor by other instructions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from quietgrad.clipping.norms.factors import (
    Contribution,
    DenseFactors,
    DirectGradients,
    formed,
)
from quietgrad.clipping.norms.rules.registry import Rule

LENGTHS = (7, 14, 30)
LONGER = (1, 2, 5, 70)
FAR = 1000  # and so many, of few columns: torch takes products of under 400 multiplications apart
FEW = 2**18  # entries of what is tried then, at most
# Of other dimensions: where on each the line of ones lies, from 0 to 1. Often at the end, since
# libraries take the last few columns apart.
LINES = (1.0, 1.0, 0.0, 0.5, 1.0, 0.9)
NUMBER = 1.375  # few digits: its square is exact, and products with it are not
FILLING = 64  # entries after the records, at least
LARGEST = 2**25  # entries of what is tried
LARGE = {torch.float16: 64.0}  # in others 1e6


def moved_by_padding(
    rule: Rule, module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> str | None:
    """The parameter whose gradient, as the rule has it, has other bits where a record is padded.

    A dimension counts as positions where input and output have it in one size, and zeros behind a
    record change its gradient by rounding alone: a layer that takes a mean over it sees them.

    Args:
        rule, module, wanted: as a rule is called.
        x, grad: [examples, ...] of a call; their shapes and types count, and where ``x`` holds
            whole numbers, its first ones.

    Returns:
        The name, or None.
    """
    if not x.numel():
        return None
    with torch.no_grad(), _one_thread(x):
        for axis in range(1, min(x.dim(), grad.dim())):
            if x.shape[axis] != grad.shape[axis]:
                continue
            for length in LENGTHS:
                tried = _Tried(rule, module, tuple(wanted), axis, length)
                name = tried.moved(x, grad)
                if name is not None:
                    return name
    return None


class _Tried:
    """A rule at one length of one dimension."""

    def __init__(
        self, rule: Rule, module: nn.Module, wanted: tuple[str, ...], axis: int, length: int
    ) -> None:
        self.rule, self.module, self.wanted = rule, module, wanted
        self.axis, self.length = axis, length

    def moved(self, x: Tensor, grad: Tensor) -> str | None:
        sizes = [
            len(LINES) * (self.length + max(LONGER)) * t[0].numel() // t.shape[self.axis]
            for t in (x, grad)
        ]
        if max(sizes) > LARGEST:
            return None
        lines, gradients = self._inputs(x), self._gradients(grad)
        usual = self._gradients(grad, cancelling=False)
        whole = self._given(lines, gradients)
        plain = self._given(lines, usual)
        if whole is None or plain is None:
            return None
        for more in LONGER:
            longer = self._padded(lines, more), self._padded(gradients, more)
            if not _alike(plain, self._given(longer[0], self._padded(usual, more)), x.dtype):
                return None  # no dimension that may be padded
            name = _differing(whole, self._given(*longer))
            if name is not None:
                return name
        few = slice(1, 2)
        alone = self._given(lines[few], gradients[few])
        name = _differing({n: _examples(c, few) for n, c in whole.items()}, alone)
        if name is not None or FAR // max(LONGER) * max(sizes) > FEW:
            return name
        return _differing(
            whole, self._given(self._padded(lines, FAR), self._padded(gradients, FAR))
        )

    def _inputs(self, x: Tensor) -> Tensor:
        shape = [len(LINES), *x.shape[1:]]
        shape[self.axis] = self.length
        if not x.is_floating_point():
            return x[:1].narrow(self.axis, 0, 1).expand(shape).contiguous()
        lines = x.new_zeros(shape)
        for example, part in enumerate(LINES):
            at: list[Any] = [round(part * (size - 1)) for size in shape]
            at[0], at[self.axis] = example, slice(None)
            lines[tuple(at)] = NUMBER
        return lines

    def _gradients(self, grad: Tensor, cancelling: bool = True) -> Tensor:
        shape = [len(LINES), *grad.shape[1:]]
        shape[self.axis] = self.length
        source = torch.Generator().manual_seed(0)
        made = torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")
        if not cancelling:
            return made.abs().to(grad.device, grad.dtype)
        made = (made * LARGE.get(grad.dtype, 1e6)).to(grad.dtype).double()
        most = made.narrow(self.axis, 0, self.length - 1)
        made.narrow(self.axis, self.length - 1, 1).copy_(-most.sum(self.axis, keepdim=True))
        return made.to(grad.device, grad.dtype)

    def _padded(self, t: Tensor, more: int) -> Tensor:
        return pad(t, (*[0, 0] * (t.dim() - 1 - self.axis), 0, more))

    def _given(self, x: Tensor, grad: Tensor) -> dict[str, Contribution] | None:
        """None where the rule cannot run on it."""
        examples = slice(0, len(x))
        filling = -(-FILLING // max(x[0].numel(), 1))
        x, grad = (torch.cat([t, torch.zeros_like(t[:1].expand(filling, *t.shape[1:]))])
                   for t in (x, grad))  # fmt: skip
        try:
            found = self.rule(self.module, x, grad, self.wanted)
            return {name: _examples(formed(given), examples) for name, given in found.items()}
        except Exception:
            return None


def _examples(given: Contribution, few: slice) -> Contribution:
    if isinstance(given, DenseFactors):  # its sizes as a map stay
        return DenseFactors(given.left_bgtp[few], given.right_bgtd[few], given.map_sizes)
    return given.examples(few)


def _alike(
    one: dict[str, Contribution], other: dict[str, Contribution] | None, dtype: torch.dtype
) -> bool:
    """Whether gradients agree but for rounding."""
    if other is None:
        return False
    room = 0.05 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    for name, given in one.items():
        a, b = _formed(given), _formed(other[name])
        if a.shape != b.shape:
            return False
        if not bool((a - b).norm() <= room * a.norm()):
            return False
    return True


def _formed(given: Contribution) -> Tensor:
    if isinstance(given, DenseFactors):
        return given.left_bgtp.double().mT @ given.right_bgtd.double()
    assert isinstance(given, DirectGradients)
    return given.values_bn.double()


def _differing(one: dict[str, Contribution], other: dict[str, Contribution] | None) -> str | None:
    if other is None:
        return None
    return next((name for name in one if not _same_bits(one[name], other[name])), None)


def _same_bits(one: Contribution, other: Contribution) -> bool:
    if isinstance(one, DenseFactors) and isinstance(other, DenseFactors):
        return _same_factors(one, other)
    if isinstance(one, DirectGradients) and isinstance(other, DirectGradients):
        return torch.equal(one.values_bn.nan_to_num(), other.values_bn.nan_to_num())
    return False  # which of the two it is may not follow from padding


def _same_factors(one: DenseFactors, other: DenseFactors) -> bool:
    """The positions that count are the same; and where they are, unless they are known as a map's:
    the sum over them is the library's own, which takes a map at a record's own size.
    """
    for example in range(len(one.left_bgtp)):
        kept = []
        for use in (one, other):
            left, right = use.left_bgtp[example], use.right_bgtd[example]
            alive = ((left != 0).any(-1) & (right != 0).any(-1)).nonzero()
            groups, places = alive.unbind(1)
            kept.append((alive, left[groups, places], right[groups, places]))
        (alive, *factors), (again, *others) = kept
        if not one.map_sizes and not torch.equal(alive, again):
            return False
        if not all(map(torch.equal, factors, others)):
            return False
    return True


@contextlib.contextmanager
def _one_thread(x: Tensor) -> Iterator[None]:
    """Threads share out entries by their number, which changes how the last ones of each share are
    computed.
    """
    if x.is_cuda:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
