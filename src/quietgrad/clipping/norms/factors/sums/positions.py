"""Sums over positions: in short ones, whose rounding is small, added up in pairs.

Shape legend: b examples, g blocks, t positions, n long dimension, k projections, x examples and
blocks together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.products import AT_ONCE
from quietgrad.clipping.norms.factors.sums.columns import EVEN, IN_CACHE, whole_columns
from quietgrad.clipping.norms.factors.sums.pairs import InPairs, add_in_pairs, levels
from quietgrad.clipping.norms.factors.sums.scratch import Scratch

# Positions of a short sum, and of what is formed in one call. What is added to goes by ``add_``,
# never as the third operand of a product: libraries begin their sums with it.
POSITIONS, GROUP = 32, 512

# Entries of the longer rows: products of two positions with fewer are so small that another routine
# forms them, with another rounding.
LEAST = 2 * EVEN

# Short sums up to which adding one after the other is adding up in pairs.
FEW = 3


def additions_over_positions(positions: int) -> int:
    """On the longest path through a sum over so many positions. Up to two million it is the same
    for all, so that padding does not change what a record is divided by.
    """
    return POSITIONS + max(16, levels(-(-positions // POSITIONS)))


def add_over_positions(
    total: Tensor | None,
    long_bgtn: Tensor,
    small_bgtk: Tensor,
    scratch: Scratch | None = None,
) -> Tensor:
    """total + small^T long, [b, g, k, n], of sums over at most ``POSITIONS`` positions.

    With the few rows first: a processor's library needs a third less time than for the transposed
    product. Memory of the result, and ``AT_ONCE`` entries. ``scratch``: where the result may lie.
    """
    b, g, t, k = small_bgtk.shape
    n = long_bgtn.shape[3]
    small, long = small_bgtk.flatten(0, 1), long_bgtn.flatten(0, 1)
    if not small.is_cuda:
        small = _even(small, whole_columns(k))
        long = _even(long, max(whole_columns(n), LEAST))
    scratch = scratch or Scratch()
    shape = (b * g, small.shape[2], long.shape[2])
    found = scratch.take("positions" if total is None else "more positions", shape, small)
    if not t:
        found.zero_()
    elif t <= FEW * POSITIONS:
        _one_after_the_other(small, long, found, scratch)
    else:
        _all_at_once(small, long, found, scratch)
    found = found[:, :k, :n].contiguous().unflatten(0, (b, g))
    return found if total is None else total.add_(found)


def _even(rows: Tensor, entries: int) -> Tensor:
    """Rows of so many entries, zeros at their ends, each beginning at a whole run of them."""
    odd, run = entries - rows.shape[-1], min(entries, EVEN)
    if odd:
        return torch.nn.functional.pad(rows, (0, odd))
    cut = any(stride % run for stride in rows.stride()[:-1])
    starts = rows.data_ptr() % (run * rows.element_size())
    return rows.clone(memory_format=torch.contiguous_format) if cut or starts else rows


def _one_after_the_other(
    small_xtk: Tensor, long_xtn: Tensor, out: Tensor, scratch: Scratch
) -> None:
    """Few short sums, many examples in one call."""
    t, entries = small_xtk.shape[1], out.shape[1] * out.shape[2]
    examples = max(1, AT_ONCE // entries)
    for few, many, into in zip(
        small_xtk.split(examples), long_xtn.split(examples), out.split(examples), strict=True
    ):
        spare = scratch.take("runs", tuple(into.shape), into) if t > POSITIONS else into
        for start in range(0, t, POSITIONS):
            run = slice(start, start + POSITIONS)
            left, right = few[:, run].transpose(1, 2), many[:, run].to(few.dtype)
            torch.bmm(left, right, out=spare if start else into)
            if start:
                into.add_(spare)


def _all_at_once(small_xtk: Tensor, long_xtn: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Many short sums in one call, of a few examples."""
    x, t, _ = small_xtk.shape
    runs = min(-(-t // POSITIONS), GROUP // POSITIONS)
    most = AT_ONCE if small_xtk.is_cuda else IN_CACHE
    examples = max(1, most // (runs * out.shape[1] * out.shape[2]))
    if not small_xtk.is_cuda and (t % POSITIONS or t > GROUP):
        examples = 1  # else what is cut into runs would have to be copied
    for start in range(0, x, examples):
        some = slice(start, start + examples)
        _sum_of_groups(small_xtk[some], long_xtn[some], out[some], scratch)


def _sum_of_groups(small_xtk: Tensor, long_xtn: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Groups of ``GROUP`` positions, added up in pairs as they come: one held for each level."""
    t = small_xtk.shape[1]
    if t <= GROUP:
        _sum_of_runs(small_xtk, long_xtn, out, scratch)
        return
    total, spare = InPairs(), None
    for start in range(0, t, GROUP):
        group = slice(start, start + GROUP)
        part = torch.empty_like(out) if spare is None else spare
        _sum_of_runs(small_xtk[:, group], long_xtn[:, group], part, scratch)
        spare = total.add(part)
    out.copy_(total.total())


def _sum_of_runs(small_xtk: Tensor, long_xtn: Tensor, out: Tensor, scratch: Scratch) -> None:
    """At most ``GROUP`` positions."""
    x, t, k = small_xtk.shape
    long_xtn = long_xtn.to(small_xtk.dtype)
    runs, rest = divmod(t, POSITIONS)
    if rest and x > 1:
        small_xtk, long_xtn = (
            torch.nn.functional.pad(factor, (0, 0, 0, POSITIONS - rest))
            for factor in (small_xtk, long_xtn)
        )
        runs, rest = runs + 1, 0
    whole = runs * POSITIONS
    parts = scratch.take("runs", (x, runs + bool(rest), *out.shape[1:]), out)
    each = parts.flatten(0, 1)
    if runs:
        few = small_xtk[:, :whole].reshape(x * runs, POSITIONS, k).transpose(1, 2)
        many = long_xtn[:, :whole].reshape(x * runs, POSITIONS, -1)
        torch.bmm(few, many, out=each[: x * runs])
    if rest:
        few, many = small_xtk[:, whole:].transpose(1, 2), long_xtn[:, whole:]
        torch.bmm(few, many, out=each[runs:])
    add_in_pairs(parts, out)
