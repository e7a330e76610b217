"""Records are collated, and it is examined that a record's row is made of that record alone:
a collate_fn that mixes records (CutMix, MixUp, statistics of the batch, or of the first one, kept
for ever) would let one of them act in several rows, each of which is clipped for itself.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from quietgrad.clipping.soundness.held_still import NotedDraws, others_stand
from quietgrad.clipping.soundness.kept.lazily import as_before
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.loading.one_type import (
    collate_one_type,
    of_hugging_face,
    require_one_type,
)
from quietgrad.loading.reading import digest_of
from quietgrad.loading.unsaid import say_no_lengths
from quietgrad.tensors import fields_of, map_tensors, tensors_of

PAIRS = 4  # records that are put in another's place
NEAR = 1e-4
_NO_MODEL = nn.Identity()
_PYTHONS, _NUMPYS = slice(0, 1), slice(1, None)  # of where generators stand


class Collating:
    """A collate_fn, examined at micro-batches 1, 2, 4, 8, ... of several records, in each process
    that loads. Until the first of these, it keeps nothing of what it collates.

    Args:
        collate_fn: of the script.
        batch_dim: the records' dimension.
        as_rows: what it returns as one row a record, where it is something else.
        counted: whether who is given the batch knows how many records it holds anyway.
    """

    def __init__(
        self,
        collate_fn: Any,
        batch_dim: int = 0,
        as_rows: Callable[[Any], Any] | None = None,
        counted: bool = False,
    ) -> None:
        self.collate_fn = collate_fn
        self._as_rows = as_rows
        self._batch_dim = batch_dim
        self._counted = counted
        self._count = 0
        self._at_first: Snapshot | None = None  # what it kept before any record

    def __call__(self, records: list[Any]) -> Any:
        """What ``collate_fn`` makes of records, at least one.

        Raises:
            ValueError: where it makes a row of several records.
        """
        say_no_lengths()  # in each process that loads
        if self.collate_fn is default_collate:
            return collate_one_type(records)
        if of_hugging_face(self.collate_fn):
            require_one_type(records, self.collate_fn)
        if self._at_first is None:
            self._at_first = Snapshot(_NO_MODEL, self.collate_fn)
        if len(records) > 1:
            self._count += 1
            if self._count & (self._count - 1) == 0:
                self._examine(records)
        with nullcontext() if self._count else as_before(_NO_MODEL, self.collate_fn):
            return self.collate_fn(records)

    def dim(self, t: Tensor) -> int:
        """The records' dimension of one tensor."""
        return min(self._batch_dim, t.dim() - 1)

    def without_records(self, one: Any) -> Any:
        """What a batch of no records looks like: one record's, cut to no rows."""
        with as_before(_NO_MODEL, self.collate_fn):
            made = self.collate_fn([one])
        return map_tensors(made, lambda t: t.narrow(self.dim(t), 0, 0))

    def _examine(self, records: list[Any]) -> None:
        """One record in another's place: the rows of all others have to stay as they are.

        Raises:
            ValueError: where they do not.
        """
        before, beside = self._made(records)
        if not _same(before, (again := self._made(records))[0]) or beside != again[1]:
            raise ValueError(
                "collate_fn gives something else for the same records, though the generators of "
                "torch, numpy and Python begin at the same place, so it cannot be examined for "
                "mixing records; draw from those generators, or in the data set"
            )
        if self._count > 1 and not _same(before, self._made(records, as_at_first=True)[0]):
            raise ValueError(
                "collate_fn makes another row of the same record than it made before it met any: "
                "it uses what it kept of others, or how many micro-batches there were, so one "
                "record would count in others' rows; keep nothing, or compute it beforehand on "
                "public data"
            )
        n = len(records)
        for k in range(min(PAIRS, n)):
            for i, j in ((k, (k + 1) % n), ((k + 1) % n, k)):
                changed = list(records)
                changed[i] = records[j]
                after, beside_after = self._made(changed)
                if len(after) != len(before):
                    raise ValueError(
                        "collate_fn returns another number of tensors where one record is another "
                        "one (it takes the first record's keys for those of all?), so one record "
                        "would take a mask or a weight away from others; return the same tensors "
                        "for all records, with a value that stands for none"
                    )
                if [t.shape for t in after] != [t.shape for t in before]:
                    continue  # the longest record is gone: padding may change, rows need not match
                if not _same(before, after, except_row=i):
                    raise ValueError(
                        "collate_fn makes a row of several records (CutMix, MixUp, statistics of "
                        "the batch, or of the first one and kept), so one record would count "
                        "several times; mix nothing, or make views of a single record in the data "
                        "set"
                    )
                if not _same_beside(beside, beside_after, except_row=i):
                    raise ValueError(
                        "collate_fn puts what it makes of several records beside their rows (a "
                        "number of the whole batch, such as its norm, its labels' counts or its "
                        "tokens), which every record's loss may read; leave it out, or give each "
                        "record its own in a tensor with one row a record"
                    )
                break
        self._require_not_cut(records, before)
        self._require_no_count(records[0])
        self._require_own_numbers(records[0])

    def _require_not_cut(self, records: list[Any], together: list[Tensor]) -> None:
        """No row is shorter than it is where its record comes alone.

        Raises:
            ValueError: where one is, as beside a shorter record.
        """
        (one, _), (again, _) = (self._rows(records[:1], skip) for skip in (0, 1))
        if not _same(one, again):  # sizes may be drawn
            return
        for record in records[:PAIRS]:
            alone, _ = self._rows([record])
            pairs = zip(alone, together, strict=False)
            if any(a > b for s, t in pairs for a, b in zip(s.shape[1:], t.shape[1:], strict=False)):
                raise ValueError(
                    "collate_fn cuts records to a size that follows from the others (the shortest "
                    "of the batch), so one record would change what all others are made of; fill "
                    "up to the longest and mask that, or bring records to one size in the data set"
                )

    def _require_no_count(self, record: Any) -> None:
        """A record's row, and what stands beside the rows, are the same where it comes twice.

        Raises:
            ValueError: where they follow from how many records there are.
        """
        (one, made), (again, _) = (self._rows([record], skip) for skip in (0, 1))
        two, made_twice = self._rows([record, record])
        draws = not _same(one, again)  # then rows may differ by what is drawn alone
        counts = len(one) != len(two) or any(
            a.shape[1:] != b.shape[1:] or not (draws or _near(a, b[:1]))
            for a, b in zip(one, two, strict=True)
            if (len(a), len(b)) == (1, 2)
        )
        if counts or not (self._counted or _tell_alike(made, made_twice)):
            raise ValueError(
                "collate_fn makes something of how many records there are (rows that are divided "
                "by their number, or their number beside the rows), which follows from who else "
                "is in the batch; leave it out: a run knows by itself what to divide by"
            )

    def _rows(self, records: list[Any], skip: int = 0) -> tuple[list[Tensor], Any]:
        """Tensors, rows first, and all that was made; with random numbers from a little further
        on.
        """
        with as_before(_NO_MODEL, self.collate_fn), same_numbers():
            for draw in (torch.rand, np.random.rand, lambda n: random.random() if n else None):
                draw(skip)
            made = self.collate_fn(copy.deepcopy(records))
            rows = made if self._as_rows is None else self._as_rows(made)
        found = [t.movedim(self.dim(t), 0) for t in tensors_of(_plain(rows)) if t.dim()]
        return found, made

    def _require_own_numbers(self, record: Any) -> None:
        """No number is drawn once for all records: which records share it would follow from how
        many there are.

        Raises:
            ValueError: where one is, as far as shapes and states of generators tell.
        """
        before = others_stand()
        one, of_one = self._drawn([record])
        two, of_two = self._drawn([record, record])
        # Not by "less than twice as many": how many a record draws may follow from what it draws.
        once = any(two[shape] == count for shape, count in one.items())
        if once or any(
            before[part] != of_one[part] == of_two[part] for part in (_PYTHONS, _NUMPYS)
        ):
            raise ValueError(
                "collate_fn draws a random number that all records of a micro-batch share (one "
                "scale or one crop for all): with one record more, others would be in another "
                "micro-batch and meet another number; draw one for each record, in the data set "
                "or in collate_fn"
            )

    def _drawn(self, records: list[Any]) -> tuple[Counter[tuple[int, ...]], tuple[Any, ...]]:
        """How often torch drew which shape; where Python's and numpy's generators stood then."""
        with as_before(_NO_MODEL, self.collate_fn), same_numbers(), NotedDraws() as noted:
            self.collate_fn(copy.deepcopy(records))
            return Counter(noted.shapes), others_stand()

    def _made(
        self, records: list[Any], as_at_first: bool = False
    ) -> tuple[list[Tensor], list[Any]]:
        """Rows, and what stands beside them."""
        with as_before(_NO_MODEL, self.collate_fn) as now, same_numbers():
            if as_at_first and self._at_first is not None:
                self._at_first.put_back()
                now.put_back_generators()
            made = self.collate_fn(copy.deepcopy(records))
            beside = list(_beside(_plain(made), len(records)))
            made = made if self._as_rows is None else self._as_rows(made)
        found = [t for t in tensors_of(_plain(made)) if t.dim()]
        return [t.movedim(self.dim(t), 0) for t in found], beside


def _plain(made: Any) -> Any:
    return dict(made) if hasattr(made, "keys") else made


def _beside(value: Any, records: int) -> Iterator[Any]:
    """What is no tensor, as digests; a list of them where there is one thing for each record."""
    if isinstance(value, Tensor):
        return
    several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    if several and len(value) == records and not any(True for _ in tensors_of(value)):
        yield [digest_of(one) for one in value]
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _beside(one, records)
    elif isinstance(value, Mapping) or fields_of(value):
        inside = value if isinstance(value, Mapping) else fields_of(value)
        for one in inside.values():
            yield from _beside(one, records)
    else:
        yield digest_of(value)


def _same_beside(first: list[Any], second: list[Any], except_row: int) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, list) and isinstance(b, list):
            a, b = ([*one[:except_row], *one[except_row + 1 :]] for one in (a, b))
        if a != b:
            return False
    return True


def _tell_alike(one: Any, two: Any) -> bool:
    """Whether what is made of a record, and of it and a copy, differs in nothing but one thing more
    where there is one for each.
    """
    one, two = _plain(one), _plain(two)
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor)
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_tell_alike(one[k], two[k]) for k in one)
    if fields_of(one):
        return _tell_alike(fields_of(one), fields_of(two))
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray) and one.ndim and two.ndim:
        return one.shape[1:] == two.shape[1:] and digest_of(one) == digest_of(two[: len(one)])
    if isinstance(one, list | tuple) and type(one) is type(two):
        if len(one) == len(two):
            return all(_tell_alike(a, b) for a, b in zip(one, two, strict=True))
        return len(two) == 2 * len(one) and digest_of(one) == digest_of(two[: len(one)])
    return digest_of(one) == digest_of(two)


def _near(one: Tensor, other: Tensor) -> bool:
    """Up to what a product with another number of rows may round."""
    if not one.is_floating_point() or one.shape != other.shape:
        return _same([one], [other])
    scale = float(one.double().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if one.numel() else 0.0
    return torch.allclose(
        one.double(), other.double(), rtol=NEAR, atol=NEAR * scale, equal_nan=True
    )


def _same(first: list[Tensor], second: list[Tensor], except_row: int | None = None) -> bool:
    if [(t.shape, t.dtype) for t in first] != [(t.shape, t.dtype) for t in second]:
        return False
    for a, b in zip(first, second, strict=True):
        rows = torch.arange(len(a)) != (-1 if except_row is None else except_row)
        equal = (a == b) | ((a != a) & (b != b))
        if not bool(equal[rows.to(a.device)].all()):
            return False
    return True


@contextmanager
def same_numbers() -> Iterator[None]:
    """Each time the same random numbers; the generators go on as if nothing had been drawn."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
