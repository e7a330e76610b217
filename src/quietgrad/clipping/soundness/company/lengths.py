"""Records of differing lengths beside each other, an empty one among them: what is cut to the
shortest text, skipped beside an empty one, or sorted by length and then used by place, reads the
others' lengths. Records of one length show nothing of it, and a first batch may hold no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from quietgrad.clipping.soundness.company.alike import Company
from quietgrad.clipping.soundness.records import is_mask, take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch, batch_size_of, map_tensors, tensors_of

# Of a record's positions, what is left: whole, about half, one position, none.
THOROUGH = (1.0, 0.5, 0.0001, 0.0)
LATER = (1.0, 0.5, 0.0)


def require_lengths_apart(subject: Subject, few: Batch, thorough: bool) -> None:
    """A record's loss, and what its gradient is made of, do not follow from how long others are.

    Args:
        subject: model and loss; random numbers are held still.
        few: records, two or more.
        thorough: in two orders, by what gradients are made of too; else in one, by losses.

    Raises:
        Mixes: where they do.
    """
    whole = longest(few)
    if whole < 2:
        return
    company = Company(subject, "its value beside records of other lengths", thorough)
    # Of a model that is spread over ranks, no pass is begun that may well fail half-way.
    spread = subject.layout.spread is not None
    some = [(1.0, 0.5)] if spread else _shares(thorough, _on_gpu(few))
    at_once = max(batch_size_of(few), 2)  # no more memory than other looks of so few take

    def compared(shares: Sequence[float], padding: int) -> bool:
        made = shortened(
            take(few, [i % batch_size_of(few) for i in range(len(shares))]), shares, padding
        )
        order = list(range(len(shares)))
        # In one order: neither by length nor the other way round, where there are three.
        turned = [*order[1::-1], *order[2:]]
        return company.compare(made, [order[::-1], order] if thorough else [turned])

    for shares, padding in itertools.product(some, _paddings(subject.model, few)):
        if all(compared(beside, padding) for beside in _companies(shares, at_once)):
            return  # the model runs on these


def _companies(shares: Sequence[float], at_once: int) -> list[tuple[float, ...]]:
    """A whole record beside shorter ones, so many together."""
    whole, *shorter = shares
    each = range(0, len(shorter), at_once - 1)
    return [(whole, *shorter[start : start + at_once - 1]) for start in each]


def _shares(thorough: bool, on_gpu: bool) -> Iterator[tuple[float, ...]]:
    shares = THOROUGH if thorough else LATER
    if not on_gpu:  # where the place before a first one would end the process
        yield shares
    yield shares[:-1]  # many models have nothing to say of an empty text
    if len(shares) > 3:  # nor of one word, as convolutions over words
        yield shares[:-2]


def _paddings(model: nn.Module, records: Batch) -> list[int]:
    """What stands behind a text's words: what the model says, else 0. On a GPU an index out of
    range would end the process.
    """
    known = getattr(getattr(model, "config", None), "pad_token_id", None)
    tables = (m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding))
    known = next((p for p in (known, *tables) if isinstance(p, int) and p > 0), 0)
    words = [t for t in tensors_of(records) if _is_words(t)]
    if any(t.is_cuda and known > int(t.amax()) for t in words):
        known = 0
    return [known, 0] if known else [0]


def _is_words(t: Tensor) -> bool:
    return t.dim() > 1 and not t.is_floating_point() and not is_mask(t)


def longest(records: Batch) -> int:
    """Positions of texts, masks and series; 0 where nothing of a record is one: images, numbers."""
    return max((t.shape[axis] for t in tensors_of(records) if (axis := positions_of(t))), default=0)


def positions_of(t: Tensor) -> int:
    """Of positions; 0 for none."""
    if t.dim() > 1 and not t.is_floating_point():
        return t.dim() - 1
    if t.dim() > 1 and t.numel() and is_mask(t):
        return t.dim() - 1
    return 1 if t.dim() == 3 else 0


def shortened(records: Batch, shares: Sequence[float], padding: int = 0) -> Batch:
    """The records with so much of their positions left, each: masks and series end in zeros, words
    in ``padding`` (labels that know a mark for none, below zero, in that), and numbers of positions
    are less.
    """
    whole = longest(records)

    def cut(t: Tensor) -> Tensor:
        axis = positions_of(t)
        if not axis:
            counts = t.dim() == 1 and not t.is_floating_point() and t.dtype != torch.bool
            if not (counts and int(t.amax()) == whole):
                return t
            left = [_left(share, whole) for share in shares]
            return torch.minimum(t, torch.tensor(left, device=t.device, dtype=t.dtype))
        made, end = t.clone(), 0
        if _is_words(t):
            end = min(padding, int(t.amin())) if int(t.amin()) < 0 else padding
        for row, share in enumerate(shares):
            size = t.shape[axis]
            kept = _left(share, size)
            made[row].narrow(axis - 1, kept, size - kept).fill_(end)
        return made

    return map_tensors(records, cut)


def _left(share: float, size: int) -> int:
    return min(size, int(share * size) + (0.0 < share < 1.0))


def _on_gpu(records: Batch) -> bool:
    return any(t.is_cuda for t in tensors_of(records))
