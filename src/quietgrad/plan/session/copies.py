"""Copies of weights that a private run trained: known by their values, as they are other parameters
than those that were trained (``copy.deepcopy``, ``load_state_dict``, a file that was read again).

Of a parameter a few entries are looked at, and of those a digest is kept while the process lasts.
It counts for what a run trained only where it is another one than before that run, so that weights
which did not move are taken for no copy, and new ones of the same public start neither. All of it
is of released values.

Averages of the library's own (``quietgrad.averaging``) are known as well. Not known: values that
were rounded, averaged otherwise or permuted since, tensors of few different entries,
and what another process trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from quietgrad.tensors import is_spread

LOOKED_AT = 64  # entries of a tensor
# With fewer different ones (zeros, ones, a norm of classes) others may have the same by chance.
LEAST_DIFFERENT = 4

# Parameters -> their digest before a run trained them, as long as they are in memory.
_BEFORE: Any = WeakIdKeyDictionary()
# Digests of what runs made of them -> the run, as whoever keeps copies has it.
_AFTER: dict[bytes, Any] = {}


def some_of(tensor: Tensor) -> tuple[str, ...]:
    """A few entries as text, in which what is no number equals itself; none of a library's own
    layout, of a shard, or of what has no memory, or no size yet.
    """
    if is_lazy(tensor) or tensor.is_meta or is_spread(tensor):
        return ()
    try:
        entries, step = tensor.detach(), max(1, tensor.numel() // LOOKED_AT)
        if entries.is_contiguous():
            some = entries.view(-1)[::step][:LOOKED_AT]
        else:  # flattening would copy it whole
            last = min(LOOKED_AT * step, entries.numel())
            some = entries.take(torch.arange(0, last, step, device=entries.device))
        return tuple(repr(value) for value in some.cpu().tolist())
    except (RuntimeError, NotImplementedError, TypeError):
        return ()


def digest_of(tensor: Tensor) -> bytes | None:
    """Of a tensor's size and some of its entries; None where these are too much alike."""
    some = some_of(tensor)
    if len(set(some)) < LEAST_DIFFERENT or "nan" in some:
        return None
    return hashlib.blake2b(repr((tensor.numel(), some)).encode(), digest_size=16).digest()


def note_before(parameter: Tensor) -> None:
    """A run begins to train it: what it holds now is not that run's."""
    _BEFORE[parameter] = digest_of(parameter)


def moved(parameter: Tensor, value: Tensor | None = None) -> bytes | None:
    """Its digest, or that of a value for it, if the run that trains it, or trained it last, changed
    it.
    """
    held = parameter if value is None else value.to(parameter.dtype)
    digest = digest_of(held) if parameter in _BEFORE else None
    return None if digest is None or digest == _BEFORE[parameter] else digest


def note_values(trained: Iterable[tuple[Tensor, Any]], value: Tensor | None = None) -> None:
    """Of parameters and the run that trained them: copies of what they hold now, or of a value for
    them, will be known.
    """
    for parameter, run in trained:
        digest = moved(parameter, value)
        if digest is not None:
            _AFTER.setdefault(digest, run)  # what a later run leaves as it was is the first one's


def runs_of_values(tensors: Iterable[Tensor], held: Iterable[tuple[bytes, Any]]) -> Iterator[Any]:
    """Runs whose values the tensors hold.

    Args:
        tensors: of a model.
        held: digests of what others in memory hold now, and the runs that made it.
    """
    known = {**dict(held), **_AFTER}
    for tensor in tensors if known else ():
        digest = digest_of(tensor)
        if digest in known:
            yield known[digest]
