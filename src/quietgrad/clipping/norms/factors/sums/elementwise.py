"""Sums over positions whose bits do not follow from how far a record is padded.

A library's own sum takes another order at another length: where a record's positions cancel until
rounding alone is left, that rounding is its gradient, and a longer record beside it would change
all of it. Here each entry's additions come in the order of the positions, and zeros among them
change nothing. On the processor a text's rows are a bag of an embedding, which torch adds up row
after row; elsewhere, and of maps, every addition is an elementwise one, whatever the library, its
threads or the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.products import of_dtype
from quietgrad.clipping.norms.factors.sums.pairs import add_in_pairs
from quietgrad.tensors import accumulation_dtype

RUN = 32  # positions of a bag; more of them are bags of bags

SIDE_BY_SIDE = 8  # neighbouring positions of a text
ONE_AFTER_THE_OTHER = 16  # such runs of neighbours; more of them are added up in pairs of as many

SUM_OF_BAGS = 0  # a mode of torch's

# Entries of what all runs of some texts are added up to at once, or of rows that are copied: as
# many as a processor's cache takes.
AT_ONCE = 256 * 1024


def sum_of_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, ..., n] -> [b, n] in ``dtype``, over all dimensions between: positions of texts, or the
    lines of maps, which padding may make longer at their ends. A single row is given as it is.

    Texts come in runs, of runs where they are long: rounding grows with the logarithm of their
    length. A map's whole lines are added side by side, and then each other in pairs.
    """
    b, (length, n) = x.shape[0], x.shape[-2:]
    rows = x.shape[1:-1].numel()
    if rows == 1:
        return of_dtype(x.reshape(b, n), dtype)
    if not x.numel():
        return x.new_zeros(b, n, dtype=dtype)
    if x.shape[1:-2].numel() == 1:
        texts = x.reshape(b, length, n)
        return (_in_runs if x.device.type == "cpu" else _sum_of_texts)(texts, dtype)
    lines = x.reshape(b, -1, length, n)
    return add_in_pairs(_one_after_the_other(list(lines.unbind(1)), dtype))


def _in_runs(x_btn: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, t, n] -> [b, n], the same bits however the rows lie in memory."""
    b, t, n = x_btn.shape
    if x_btn.dtype == dtype and x_btn.is_contiguous():
        sums = _in_bags(x_btn)
    else:  # copied piece by piece: all rows at once may be far more than the batch takes
        examples, positions = max(1, AT_ONCE // (t * n)), max(1, AT_ONCE // (RUN * n)) * RUN
        pieces = [some.split(positions, dim=1) for some in x_btn.split(examples)]
        found = [[_in_bags(piece.contiguous().to(dtype)) for piece in some] for some in pieces]
        sums = torch.cat([torch.cat(some, dim=1) for some in found])
    return sums.view(b, n) if t <= RUN else _in_runs(sums, dtype)


def _in_bags(x_btn: Tensor) -> Tensor:
    """[b, t, n] -> [b, runs, n]: one call reads all rows once."""
    b, t, n = x_btn.shape
    numbers = torch.arange(b * t, device=x_btn.device)  # a script may set another default
    firsts = numbers[::t] if t <= RUN else numbers.view(b, t)[:, ::RUN].reshape(-1)
    rows = x_btn.view(b * t, n)
    sums: Tensor = torch.embedding_bag(rows, numbers, firsts, False, SUM_OF_BAGS)[0]
    return sums.view(b, -1, n)


def _sum_of_texts(x_btn: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, t, n] -> [b, n]: the more positions, the fewer calls for each."""
    b, t, n = x_btn.shape
    most = SIDE_BY_SIDE * ONE_AFTER_THE_OTHER
    if t <= most:
        side = min(t, SIDE_BY_SIDE)
        return add_in_pairs(_one_after_the_other(list(x_btn.split(side, dim=1)), dtype))
    found = x_btn.new_empty(b, n, dtype=dtype)
    at_once = max(1, AT_ONCE // max(1, -(-t // most) * SIDE_BY_SIDE * n))
    for start in range(0, b, at_once):
        some = slice(start, start + at_once)
        add_in_pairs(_stretches(x_btn[some], dtype), out=found[some])
    return found


def _stretches(x_btn: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, t, n] -> [b, SIDE_BY_SIDE, n]: runs one after the other within each stretch of positions,
    all stretches in one call, and stretches in pairs.
    """
    b, t, n = x_btn.shape
    rest = t % (SIDE_BY_SIDE * ONE_AFTER_THE_OTHER)
    whole = x_btn[:, : t - rest].unflatten(1, (-1, ONE_AFTER_THE_OTHER, SIDE_BY_SIDE))
    totals = _one_after_the_other(list(whole.unbind(2)), dtype)
    if rest:
        last = totals.new_zeros(b, 1, SIDE_BY_SIDE, n)
        found = _one_after_the_other(list(x_btn[:, t - rest :].split(SIDE_BY_SIDE, dim=1)), dtype)
        last[:, 0, : found.shape[1]] = found
        totals = torch.cat([totals, last], dim=1)
    return add_in_pairs(totals)


def _one_after_the_other(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of parts of one shape (the last may have fewer rows), in memory of its own."""
    first, *others = parts
    if others and first.dtype == others[0].dtype == dtype and first.shape == others[0].shape:
        total = first + others.pop(0)
    else:
        total = first.to(dtype, copy=True)
    for part in others:
        total[:, : part.shape[1]].add_(part)
    return total


def norms_of_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, ..., n] -> [b, ...] norms of what ``sum_of_rows`` adds up."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype)


def spread_of_channels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, channels, *positions] -> [b] float64 norm of the channels' sums of absolute values."""
    sums = torch.linalg.vector_norm(x.flatten(2), ord=1, dim=2, dtype=dtype)
    return torch.linalg.vector_norm(sums, dim=1, dtype=torch.float64)


def sum_over_positions(x: Tensor) -> Tensor:
    """The sum over positions for a layer rule: the same bits for an example however many zeros
    stand behind its positions, and whatever stands beside it. ``x.sum(1)`` is not.

    Args:
        x: [examples, ..., n], positions between; a map's lines are those of the last but one
            dimension. Two dimensions have no positions. Private where the gradient is.

    Returns:
        [examples, n], in float32 (float64 of float64).

    Raises:
        ValueError: for fewer than two dimensions.
    """
    if x.dim() < 2:
        raise ValueError(
            f"x has {x.dim()} dimensions where [examples, positions, n] is summed over positions; "
            "give one number an example as [examples, positions, 1]"
        )
    dtype = accumulation_dtype(x.dtype)
    return x.to(dtype) if x.dim() == 2 else sum_of_rows(x, dtype)


def sum_of_few(x_bkn: Tensor) -> Tensor:
    """[b, k, n] -> [b, n]: one after the other, so that zeros at the end change nothing."""
    total = x_bkn[:, 0].clone()
    for part in x_bkn.unbind(1)[1:]:
        total.add_(part)
    return total
